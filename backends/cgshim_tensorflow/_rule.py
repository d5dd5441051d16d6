"""How a rule becomes the gradient of f's outputs in TensorFlow: on tapes, in graphs and in forward mode.

`tf.custom_gradient` by its own means, without its faults: what f computes stays on the tapes, so that residuals are
functions of the inputs, but the outputs are cut off from it and hang on the rule alone; no transformation can take
autodiff's number instead.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.eager.forwardprop_util import pack_tangents
from tensorflow.python.framework.function import _FuncGraph as LegacyGraph
from tensorflow.python.framework.ops import gradient_registry, uid

from cgshim import TransformationError
from cgshim._errors import sentence
from cgshim_tensorflow._forward import Backward
from cgshim_tensorflow._origins import note
from cgshim_tensorflow._pfor import converter
from cgshim_tensorflow._values import values_of, with_values

if TYPE_CHECKING:
    from cgshim._call import Call

Tensor = Any
Around = Callable[[Sequence[Tensor]], Backward]
"""From the outputs, as the rule is to find them, to the gradient."""
Forward = Callable[[Callable[[], None]], None]
"""Is given what lets the accumulators transpose the gradient, and runs it."""


def attach(
    call: Call, sources: Sequence[Tensor], values: Sequence[Tensor], around: Around, forward: Forward | None = None
) -> list[Tensor]:
    """The values again, as outputs of one operation on the sources with this gradient."""
    if tf.executing_eagerly():
        with record.stop_recording():
            outputs = [tf.identity(value) for value in values]
        backward = around(outputs)
    else:
        outputs, backward = _identity_in_graph(call, sources, values, around)
    note(outputs, sources)
    # The tapes come first: what an accumulator computes from the outputs has to be followed on them.
    record.record_operation_backprop_only(call.name, outputs, sources, backward)
    # An accumulator that transposes the rule in which this is called follows it without tangents, too.
    transpose = functools.partial(record.record_operation_forwardprop_only, call.name, outputs, sources, backward, None)
    if forward and pack_tangents(sources).tangents:
        forward(transpose)
    else:
        transpose()
    return outputs


def _identity_in_graph(
    call: Call, sources: Sequence[Tensor], values: Sequence[Tensor], around: Around
) -> tuple[list[Tensor], Backward]:
    """One IdentityN from the values and the sources, whose registered gradient leads to the sources."""
    count = len(values)
    graph = tf.compat.v1.get_default_graph()
    if isinstance(graph, LegacyGraph):
        call.refuse("a rule needs a graph that keeps its gradients", "the legacy function Defun", "use tf.function")

    def gradient(op: Any, *upstreams: Tensor) -> list[Tensor | None]:
        if op is not None and op.graph is not graph:
            _refuse_copied_graph(call.name)
        try:
            return [None] * count + list(backward(*upstreams[:count]))
        except TransformationError as error:
            if op is not None:
                raise
            return [None] * count + _failing(sources, str(error))

    with record.stop_recording(), graph.gradient_override_map({"IdentityN": _register(call, gradient)}):
        outputs = tf.identity_n([*values, *sources])
    operation = outputs[0].op
    backward = around(outputs[:count])
    operation.pfor_converter = converter(count, backward, functools.partial(attach, call), call)
    operation.cgshim_gradient = gradient  # the graph keeps its own gradients alive, and nothing else does
    return list(outputs[:count]), backward


def _failing(sources: Sequence[Tensor], message: str) -> list[Tensor]:
    """What a SavedModel keeps of a gradient that is refused: it fails with the message when it is run."""
    with tf.control_dependencies([tf.debugging.Assert(False, [message])]):
        return [tf.identity(source) for source in sources]


def _register(call: Call, gradient: Callable[..., Any]) -> str:
    """Register a gradient for as long as it lives, under a name of its own (a SavedModel finds it by that name)."""
    name = f"CustomGradient-cgshim-{uid()}"
    alive = weakref.ref(gradient)
    refuse = functools.partial(_refuse_copied_graph, call.name)
    # Between TensorFlow's look into the registry and the call, the garbage collector may take the graph of f.
    run = tf.autograph.experimental.do_not_convert(lambda op, *upstreams: (alive() or refuse)(op, *upstreams))
    tf.RegisterGradient(name)(run)
    weakref.finalize(gradient, gradient_registry._registry.pop, name, None)
    return name


def _refuse_copied_graph(op: str, *_: Any) -> NoReturn:
    rule = "grad_fn finds what it keeps of f only in the graph that f ran in"
    raise TransformationError(
        sentence(op, rule, "a copy of that graph", "call the op outside the loop or the tf.function that is copied")
    )


# --- Gradients without derivatives ----------------------------------------------------------------------------------

Refuse = Callable[[], NoReturn]


def without_derivative(
    call: Call, sources: Sequence[Tensor], values: Sequence[Tensor | None], refuse: Refuse
) -> list[Tensor | None]:
    """The values again; whoever asks for their derivative with respect to the sources is refused, and nobody else."""
    present = [values_of(value) for value in values if value is not None]
    cut = iter(attach(call, sources, present, lambda _: lambda *_: refuse()) if present else [])
    return [None if value is None else with_values(value, next(cut)) for value in values]


def stand_in_for(call: Call, sources: Sequence[Tensor], refuse: Refuse) -> Tensor:
    """A number that depends on the sources, and keeps none of them: whoever asks for its derivative is refused."""

    def refused(*_: Any) -> NoReturn:
        refuse()

    with record.stop_recording():
        number = tf.constant(0.0)
    if not tf.executing_eagerly():
        ((number,), _) = _identity_in_graph(call, sources, [number], lambda _: refused)
    # An accumulator asks at once for every derivative: it gets one, and is refused when it goes on with it.
    record.record_operation(call.name, [number], sources, refused, lambda *_: [tf.zeros_like(number)])
    return number
