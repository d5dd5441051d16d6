"""How a rule becomes the gradient of f's outputs in TensorFlow: on tapes, in graphs and in forward mode.

`tf.custom_gradient` by its own means, without its faults: what f computes stays on the tapes, so that residuals are
functions of the inputs, but the outputs are cut off from it and hang on the rule alone; no transformation can take
autodiff's number instead.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from _cgshim_tensorflow_forward import Backward, is_differentiable
from _cgshim_tensorflow_pfor import converter
from tensorflow.python.eager import record
from tensorflow.python.eager.forwardprop_util import pack_tangents
from tensorflow.python.framework.op_callbacks import add_op_callback, remove_op_callback
from tensorflow.python.framework.ops import gradient_registry, uid

if TYPE_CHECKING:
    from cgshim._call import Call
    from cgshim._convention import Rule

Tensor = Any

# --- Attaching a gradient ---------------------------------------------------------------------------------------


def attach(
    call: Call, sources: Sequence[Tensor], values: Sequence[Tensor], backward: Backward, linear: Callable[[], bool]
) -> list[Tensor]:
    """The values again, as outputs of one operation on the sources with this gradient.

    linear tells whether the rule can be seen to be linear, and so whether forward mode may use its transpose unasked.
    """
    if not call.forward_mode and pack_tangents(sources).tangents and not linear():
        call.refuse_forward_mode("tf.autodiff.ForwardAccumulator")
    with record.stop_recording():
        if tf.executing_eagerly():
            outputs = [tf.identity(value) for value in values]
        else:
            outputs = _identity_in_graph(call, sources, values, backward, linear)
    record.record_operation(call.name, outputs, sources, backward)
    return outputs


def _identity_in_graph(
    call: Call, sources: Sequence[Tensor], values: Sequence[Tensor], backward: Backward, linear: Callable[[], bool]
) -> list[Tensor]:
    """One IdentityN from the values and the sources, whose registered gradient leads to the sources."""
    count = len(values)
    graph = tf.compat.v1.get_default_graph()

    def gradient(op: Any, *upstreams: Tensor) -> list[Tensor | None]:
        if op is not None and op.graph is not graph:
            call.refuse("grad_fn finds what it keeps of f only in the graph that f ran in", "a copy of that graph",
                        "call the op outside the loop or the tf.function that is copied")  # fmt: skip
        return [None] * count + list(backward(*upstreams[:count]))

    with graph.gradient_override_map({"IdentityN": _register(gradient)}):
        outputs = tf.identity_n([*values, *sources])
    operation = outputs[0].op
    operation.pfor_converter = converter(count, backward, functools.partial(attach, call, linear=linear))
    operation.cgshim_gradient = gradient  # the graph keeps its own gradients alive, and nothing else does
    return list(outputs[:count])


def _register(gradient: Callable[..., Any]) -> str:
    """Register a gradient for as long as it lives, under a name of its own (a SavedModel finds it by that name)."""
    name = f"CustomGradient-cgshim-{uid()}"
    alive = weakref.ref(gradient)
    tf.RegisterGradient(name)(lambda op, *upstreams: alive()(op, *upstreams))  # type: ignore[misc]
    weakref.finalize(gradient, gradient_registry._registry.pop, name, None)
    return name


# --- Captured values --------------------------------------------------------------------------------------------

_running_rule: contextvars.ContextVar[bool] = contextvars.ContextVar("cgshim_tensorflow_running_rule", default=False)


@contextlib.contextmanager
def running_rule() -> Iterator[None]:
    """Within a rule, what an op captures is a constant: that lets an inner op define the second order."""
    token = _running_rule.set(True)
    try:
        yield
    finally:
        _running_rule.reset(token)


def run(call: Call, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Rule, list[Tensor], list[Tensor]]:
    """f's outputs and rule, and the tensors that f read without being given them.

    First those that a tape or an accumulator watches: variables to a rule that takes them, and refused otherwise. Then
    those of a graph of which nobody knows yet.
    """
    eager = tf.executing_eagerly()
    if _running_rule.get() or (eager and not record.could_possibly_record()):
        return *call(inputs), [], []
    outputs, rule, read = _run_eagerly(call, inputs) if eager else _run_in_graph(call, inputs)
    watched, unknown = [], []
    for tensor in filter(is_differentiable, read):
        origins = list(_origins(tensor))
        if any(map(_is_watched, origins)):
            watched.append(tensor)
        elif not eager and (len(origins) > 1 or tensor.op.inputs or tensor.op.type in _OPEN):
            unknown.append(tensor)
    if watched and not rule.takes_variables:
        call.refuse_captured(watched[0])
    return outputs, rule, watched, unknown


def readable(x: Tensor) -> Tensor:
    """A tensor as f reads it: a variable's value, and in a graph a tensor of that graph."""
    x = tf.convert_to_tensor(x) if isinstance(x, tf.Variable) else x
    if tf.executing_eagerly():
        return x
    capture = getattr(tf.compat.v1.get_default_graph(), "capture", None)
    return tf.nest.map_structure(capture, x, expand_composites=True) if capture else x


def _run_eagerly(call: Call, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Rule, list[Tensor]]:
    """f's outputs and rule, and the tensors that it read: older than the run, and not given."""
    given = {x._id for x in _parts(inputs)}
    read: dict[int, Tensor] = {}
    start = uid()

    def notice(op_type: str, tensors: Sequence[Tensor], *_: Any, **__: Any) -> None:
        read.update({t._id: t for t in tensors if t._id < start and t._id not in given})

    add_op_callback(notice)
    try:
        outputs, rule = call(inputs)
    finally:
        remove_op_callback(notice)
    notice("output", _parts(outputs))
    return outputs, rule, list(read.values())


def _run_in_graph(call: Call, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Rule, list[Tensor]]:
    """f's outputs and rule, and the tensors that it read: not made by its own operations, and not given."""
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    outputs, rule = call(inputs)
    outputs = [readable(output) for output in outputs]
    made = graph.get_operations()[before:]
    known = {id(t) for op in made if op.type not in _READ_ONLY for t in op.outputs} | set(map(id, _parts(inputs)))
    read = {id(t): t for tensors in (*[op.inputs for op in made], _parts(outputs)) for t in tensors}
    return outputs, rule, [tensor for at, tensor in read.items() if at not in known]


_OPEN = ("Placeholder", "PlaceholderWithDefault")
_READ_ONLY = ("Const", *_OPEN)


def _parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [part for tensor in tensors for part in tf.nest.flatten(tensor, expand_composites=True)]


def _origins(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor, and what it stands for in the graphs around its own."""
    while tensor is not None:
        yield tensor
        eager = isinstance(tensor, tf.__internal__.EagerTensor)
        captures = () if eager else getattr(tensor.graph, "captures", ())
        tensor = next((external for external, internal in captures if internal is tensor), None)


def _is_watched(tensor: Tensor) -> bool:
    return bool(record.should_record_backprop([tensor]) or pack_tangents([tensor]).tangents)
