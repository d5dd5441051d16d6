"""Functions as gradients in TensorFlow: on tapes, in graphs and in forward mode.

The means are those of `tf.custom_gradient`, without its faults: tapes record what f computes, so
that residuals are functions of the inputs; but the outputs are detached from it and have the rule
alone for their gradient, so that no transformation can use autodiff's number instead.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import tensorflow as tf

from cgshim.backend import TransformationError, refusal
from cgshim_tensorflow._forward import Backward, observe_functions
from cgshim_tensorflow._pfor import converter
from cgshim_tensorflow._private import (
    LegacyGraph,
    count_accumulators,
    gradient_registry,
    pack_tangents,
    record,
    uid,
)
from cgshim_tensorflow._record import note
from cgshim_tensorflow._values import detached, values_of, with_values

if TYPE_CHECKING:
    from cgshim.backend import Call

Tensor = Any
MakeGradient = Callable[[Sequence[Tensor]], Backward]
"""takes the outputs and returns their gradient"""
Forward = Callable[[Callable[[], None], Sequence[Tensor]], None]
"""is given what lets the accumulators transpose the gradient, and runs it; and the outputs"""


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
    if not count_accumulators():
        record.record_operation(call.name, outputs, sources, backward)
        return outputs
    # The tapes come first: they have to record what an accumulator computes from the outputs.
    record.record_operation_backprop_only(call.name, outputs, sources, backward)
    # An accumulator that transposes the rule in which this is called follows this without tangents,
    # too.
    transpose = functools.partial(
        record.record_operation_forwardprop_only, call.name, outputs, sources, backward, None
    )
    if forward and pack_tangents(sources).tangents:
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
    operation.pfor_converter = converter(
        count, backward, functools.partial(attach_gradient, call), call
    )
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

    def refused(*_: Any) -> NoReturn:
        refuse()

    with record.stop_recording():
        number = tf.constant(0.0)
    if not tf.executing_eagerly():
        ((number,), _) = _identity_in_graph(call, sources, [number], lambda _: refused)
    # An accumulator asks at once for every derivative: it is given one, and refused when it uses
    # that.
    record.record_operation(
        call.name, [number], sources, refused, lambda *_: [tf.zeros_like(number)]
    )
    return number
