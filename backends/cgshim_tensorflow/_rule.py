"""Functions as gradients in TensorFlow: on tapes, in graphs and in forward mode.

The means are those of `tf.custom_gradient`, without its faults: tapes record what f computes, so
that residuals are functions of the inputs; but the outputs are detached from it and have the rule
alone for their gradient, so that no transformation can use autodiff's number instead.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from cgshim.backend import (
    Call,
    CustomGradientTypeError,
    Mapped,
    Tensor,
    TransformationError,
    refusal,
)
from cgshim_tensorflow._forward import (
    Backward,
    Linearity,
    judge,
    observe_functions,
    observe_tapes,
    transposition,
)
from cgshim_tensorflow._private import (
    LegacyGraph,
    gradient_registry,
    pack_tangents,
    random_operations,
    record,
    uid,
    wrap_for_pfor,
)
from cgshim_tensorflow._record import note
from cgshim_tensorflow._values import detached, is_eager, values_of, with_values

MakeGradient = Callable[[Sequence[Tensor]], Backward]
"""takes the outputs and returns their gradient"""
Forward = Callable[[Callable[[], None], Sequence[Tensor]], None]
"""takes what lets the accumulators transpose the gradient, and runs it; and the outputs"""


def attach_gradient(
    call: Call, sources: Sequence[Tensor], values: Sequence[Tensor], make_gradient: MakeGradient,
    forward: Forward | None = None, are_detached: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Return the values again, as outputs of one operation on the sources that has this gradient.

    In eager mode the values themselves may be the outputs: if they are detached, nothing is
    recorded for them.
    """
    if tf.executing_eagerly():
        outputs = list(values) if are_detached else [*map(detached, values)]
        backward = make_gradient(outputs)
    else:
        outputs, backward = _identity_in_graph(call, sources, values, make_gradient)
    note(outputs, sources)
    # The tapes come first: they have to record what an accumulator computes from the outputs.
    record.record_operation_backprop_only(call.name, outputs, sources, backward)
    # An accumulator that transposes the rule in which this is called follows this without tangents,
    # too.
    transpose = functools.partial(
        record.record_operation_forwardprop_only, call.name, outputs, sources, backward, None
    )
    if forward and pack_tangents(sources).tangents:
        observe_tapes()
        forward(transpose, outputs)
    else:
        transpose()
    return outputs


def _identity_in_graph(
    call: Call, sources: Sequence[Tensor], values: Sequence[Tensor], make_gradient: MakeGradient
) -> tuple[list[Tensor], Backward]:
    """Make one IdentityN of the values and the sources, whose registered gradient leads to the
    sources.
    """
    observe_functions()
    observe_tapes()
    count = len(values)
    graph = tf.compat.v1.get_default_graph()
    if isinstance(graph, LegacyGraph):
        call.refuse(
            "a rule needs a graph that keeps its gradients",
            "the legacy function Defun",
            "use tf.function",
        )

    def gradient(op: Any, *upstreams: Tensor) -> list[Tensor | None]:
        if op is not None and op.graph is not graph:
            _refuse_copied_graph(call.name)
        try:
            return [None] * count + list(backward(*upstreams[:count]))
        except TransformationError as error:
            if op is not None:
                raise
            # what a SavedModel keeps of a refused gradient: tensors that fail with the message when
            # they are run
            with tf.control_dependencies([tf.debugging.Assert(False, [str(error)])]):
                return [None] * count + [tf.identity(source) for source in sources]

    with (
        record.stop_recording(),
        graph.gradient_override_map({"IdentityN": _register(call, gradient)}),
    ):
        outputs = tf.identity_n([*values, *sources])
    operation = outputs[0].op
    backward = make_gradient(outputs[:count])
    operation.pfor_converter = _converter(count, backward, call)
    # the graph keeps its own gradients alive, and nothing else does
    operation.cgshim_gradient = gradient
    return list(outputs[:count]), backward


def _register(call: Call, gradient: Callable[..., Any]) -> str:
    """Register a gradient for as long as it lives, and return its name, by which a SavedModel finds
    it.
    """
    name = f"CustomGradient-cgshim-{uid()}"
    alive = weakref.ref(gradient)
    refuse = functools.partial(_refuse_copied_graph, call.name)
    # The garbage collector may take the graph of f after TensorFlow has found this and before it
    # calls this.
    run = tf.autograph.experimental.do_not_convert(
        lambda op, *upstreams: (alive() or refuse)(op, *upstreams)
    )
    tf.RegisterGradient(name)(run)
    weakref.finalize(gradient, gradient_registry._registry.pop, name, None)
    return name


def _refuse_copied_graph(op: str, *_: Any) -> NoReturn:
    raise refusal(TransformationError, op,
                  must="grad_fn finds what it keeps of f only in the graph that f ran in",
                  got="a copy of that graph",
                  do="call the op outside the loop or the tf.function that is copied")  # fmt: skip


# --- Gradients without derivatives ----------------------------------------------------------------


def without_derivative(
    call: Call,
    sources: Sequence[Tensor],
    values: Sequence[Tensor | None],
    refuse: Callable[[], NoReturn],
) -> list[Tensor | None]:
    """Return the values again; their derivative with respect to the sources, and no other, is
    refused.
    """
    present = [values_of(value) for value in values if value is not None]
    again = iter(
        attach_gradient(call, sources, present, lambda _: lambda *_: refuse()) if present else []
    )
    return [None if value is None else with_values(value, next(again)) for value in values]


def stand_in_for(call: Call, sources: Sequence[Tensor], refuse: Callable[[], NoReturn]) -> Tensor:
    """Return a number that depends on the sources, and keeps none of them; its derivative is
    refused.
    """

    refused = lambda *_: refuse()
    with record.stop_recording():
        number = tf.constant(0.0)
    if not tf.executing_eagerly():
        ((number,), _) = _identity_in_graph(call, sources, [number], lambda _: refused)
    # An accumulator asks at once for every derivative: it gets one, and is refused when it uses
    # that.
    record.record_operation(
        call.name, [number], sources, refused, lambda *_: [tf.zeros_like(number)]
    )
    return number


# --- Under tf.vectorized_map ----------------------------------------------------------------------
#
# `pfor` rewrites the operations of a loop's body one by one. If an operation has a gradient of its
# own, pfor keeps its values alone, and autodiff's gradient with them. So the rule is rewritten here
# as well: the gradient of all iterations is the vectorized rule.


def _converter(count: int, backward: Backward, call: Call) -> Callable[[Any], list[Any]]:
    """Return what pfor calls to vectorize an operation on `count` values and then sources with this
    gradient.
    """

    # what refuses a derivative has no rule to transpose
    require_transpose = getattr(backward, "require_transpose", lambda: None)

    def convert(pfor_input: Any) -> list[Any]:
        if isinstance(call.f, Mapped):  # the values are those of its batch, with its gradient
            return [wrap_for_pfor(x.t, x.is_stacked) for x in pfor_input.inputs]
        own = list(pfor_input.op.outputs[:count])
        rule = _Traced(backward, own, call)
        pfor_input.stack_inputs()
        inputs = [wrapped.t for wrapped in pfor_input.inputs]
        values, sources = inputs[:count], inputs[count:]

        def vectorized(outputs: Sequence[Tensor]) -> Backward:
            # first: a residual may be made of an output, as its tangent is
            for one, every in zip(own, outputs, strict=True):
                pfor_input.pfor._add_conversion(one, wrap_for_pfor(every))
            residuals = [_converted(pfor_input.pfor, tensor) for tensor in rule.residuals]
            over_all: Any = lambda *upstreams: rule.over_all(outputs, residuals, upstreams)
            over_all.require_transpose = require_transpose  # for a loop around this one
            return over_all  # type: ignore[no-any-return]

        def forward(transpose: Callable[[], None], _: Sequence[Tensor]) -> None:
            require_transpose()
            rule.judge()
            transpose()

        outputs = attach_gradient(call, sources, values, vectorized, forward)
        return [wrap_for_pfor(tensor) for tensor in [*outputs, *sources]]

    return convert


def mapped(function: Mapped, inputs: Sequence[Tensor], /) -> list[Tensor]:
    """Return what a function returns for one iteration, in a function of its own: a loop that is
    vectorized calls it once for all.
    """
    if tf.executing_eagerly():
        return list(function.run(None, (), *inputs)[0])
    arguments = [*map(tf.convert_to_tensor, inputs)]
    traced = tf.function(
        lambda *xs: list(function.run(None, (), *xs)[0]), autograph=False
    ).get_concrete_function(*[tf.TensorSpec(x.shape, x.dtype) for x in arguments])
    with record.stop_recording():
        outputs = traced(*arguments)
    for output in outputs:
        output.op.pfor_converter = functools.partial(_over_iterations, function, len(arguments))
    return outputs  # type: ignore[no-any-return]


def _over_iterations(function: Mapped, count: int, pfor_input: Any) -> list[Any]:
    """Return what a function returns for all iterations."""
    if any(x.is_stacked for x in pfor_input.inputs[count:]):
        raise refusal(CustomGradientTypeError, function.call.name,
                      must="f must be given every tensor of compiled code that it reads",
                      got="a captured one", do="pass it as an argument")  # fmt: skip
    pfor_input.stack_inputs(function.in_batch)
    inputs = pfor_input.inputs[:count]
    stacked = next(x.t for x in inputs if x.is_stacked)
    size = tf.shape(stacked)[0] if stacked.shape[0] is None else stacked.shape[0]
    outputs, have = function.run(size, [x.is_stacked for x in inputs], *[x.t for x in inputs])
    return [wrap_for_pfor(y, has) for y, has in zip(outputs, have, strict=True)]


def run_again(run: Callable[[], Any], refuse: Callable[..., NoReturn], /) -> Any:
    """Run for a derivative what has run for the value; refuse what does not do the same again."""
    if tf.executing_eagerly():
        return run()
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    result = run()
    types = _types_of(graph, graph.get_operations()[before:])
    if any(map(_DRAWS.match, types)) or not random_operations.isdisjoint(types):
        refuse()
    if any(map(_WRITES.match, types)):
        refuse("one that writes to a variable", "let it return the new value")
    return result


_DRAWS, _WRITES = re.compile("Rng"), re.compile("Assign|Resource(?!Gather)")
"""operations of a tf.random.Generator, and those that write to variables"""


def _types_of(graph: Any, operations: Sequence[Any]) -> set[str]:
    """Return the types of operations, and of those in the functions that they call."""
    functions = {f.signature.name: f.node_def for f in graph.as_graph_def().library.function}
    nodes = [operation.node_def for operation in operations]
    for node in nodes:  # to which more is added
        for value in node.attr.values():
            for called in (value.func, *value.list.func):
                nodes += functions.pop(called.name, ())
    return {node.op for node in nodes}


class _Traced:
    """A rule as a function of tensors alone: its upstream gradients and its residuals."""

    def __init__(self, backward: Backward, values: Sequence[Tensor], call: Call) -> None:
        self._call, self._count = call, len(values)
        self._present: list[bool] = []
        self._error: Exception | None = None
        self.residuals: list[Tensor] = []

        def of_sources(*upstreams: Tensor) -> list[Tensor]:
            gradients = backward(*upstreams)
            self._present = [gradient is not None for gradient in gradients]
            return [
                tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None
            ]

        try:
            with values[0].graph.as_default():
                self._function = tf.function(of_sources, autograph=False).get_concrete_function(
                    *[tf.TensorSpec(value.shape, value.dtype) for value in values]
                )
        except Exception as error:  # noqa: BLE001  # the author's: raised again for whoever asks for a gradient
            self._error = error.with_traceback(None)
        else:
            self.residuals = self._function.captured_inputs

    def judge(self) -> None:
        """Raise an error if the rule is not linear; or the one that it raised when it was traced."""
        if self._error is not None:
            raise self._error
        graph = self._function.graph
        judge(self._call, Linearity.of_graph(graph, graph.inputs[: self._count], graph.outputs))

    def over_all(
        self,
        outputs: Sequence[Tensor],
        residuals: Sequence[tuple[Tensor, bool]],
        upstreams: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Return the gradients of all iterations; each residual comes with whether it has a row for
        each of them.
        """
        if self._error is not None:
            raise self._error
        if transposition.current is not None:
            self.judge()
        dense = [
            tf.zeros_like(output) if upstream is None else tf.convert_to_tensor(upstream)
            for upstream, output in zip(upstreams, outputs, strict=True)
        ]
        stacked = [tensor for tensor, is_stacked in residuals if is_stacked]

        def of_one(elements: tuple[list[Tensor], list[Tensor]]) -> list[Tensor]:
            rows = iter(elements[1])
            read = [next(rows) if is_stacked else tensor for tensor, is_stacked in residuals]
            with record.stop_recording():  # only what pfor makes of it is run and differentiated
                return list(
                    tf.raw_ops.StatefulPartitionedCall(
                        args=[*elements[0], *read],
                        Tout=[output.dtype for output in self._function.outputs],
                        f=self._function,
                    )
                )

        gradients = iter(tf.vectorized_map(of_one, (dense, stacked)) if any(self._present) else ())
        return [next(gradients) if present else None for present in self._present]


def _converted(pfor: Any, residual: Tensor) -> tuple[Tensor, bool]:
    """Return a residual for all iterations, and whether it has a row for each."""
    if is_eager(residual):
        return residual, False
    wrapped = pfor._convert_helper(residual)
    return wrapped.t, wrapped.is_stacked
