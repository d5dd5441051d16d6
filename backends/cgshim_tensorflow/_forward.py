"""Operations with a gradient of our own, and forward mode.

A `tf.autodiff.ForwardAccumulator` has no rule of its own for such an operation. It calls the
gradient while the operation is made, and differentiates the result with respect to the upstreams:
this is the transpose of the rule, and so the tangent if the rule is linear.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import tensorflow as tf

from cgshim.backend import Call, Rule, Tensor, is_differentiable, subvals
from cgshim_tensorflow._private import record
from cgshim_tensorflow._tensors import dense

Pullback = Callable[..., Sequence[Tensor | None]]
"""takes one upstream gradient for each output, and returns one gradient for each source"""
Transposition = tuple[Sequence[Any], Sequence[Tensor | None]]
"""what an accumulator that follows an operation has called the gradient with, and got"""


class _State(threading.local):
    result: Any = None
    """the values and the gradient of the operation that is being made in a graph"""
    transposed: Call | None = None
    """the call whose rule an accumulator transposes: tapes record nothing there (TensorFlow 2.21)"""
    f: RunningF | None = None


_state = _State()


@dataclass(slots=True, eq=False)
class RunningF:
    """The f of an op that is running."""

    inputs: Sequence[Tensor] = ()
    without_tangents: list[tuple[Tensor, Callable[[], NoReturn]]] = field(default_factory=list)
    """the tensors that have no tangents in forward mode, with the error for who needs them"""

    def run(self, call: Call) -> tuple[list[Tensor], Rule]:
        outer, _state.f = _state.f, self
        try:
            return call(self.inputs)
        finally:
            _state.f = outer


def running_f() -> RunningF:
    """Return the innermost f that is running, and an empty one if none is."""
    return _state.f or RunningF()


def call_in_transposition() -> Call | None:
    """Return the call whose rule is being transposed; None if there is none."""
    return _state.transposed


def operation(
    name: str, values: Sequence[Tensor], gradient: Pullback, sources: Sequence[Tensor]
) -> list[Tensor]:
    """Return the values as outputs of one operation of the sources with this gradient.

    Each accumulator that follows a source calls the gradient before this returns.
    """
    if tf.executing_eagerly():
        outputs = [*map(tf.stop_gradient, values)]
        record(name, outputs, sources, gradient)
        return outputs
    is_made = is_followed = False

    def gradient_in_graph(*upstreams: Tensor | None) -> Sequence[Tensor | None]:
        nonlocal is_followed
        if is_made:
            return gradient(*upstreams)
        is_followed = True
        return [None] * len(sources)

    outputs = _in_graph(values, gradient_in_graph, sources)
    is_made = True
    if is_followed:
        # In a graph an accumulator follows the IdentityN of a tf.custom_gradient, and not its
        # gradient (TensorFlow 2.21). So it does not see another one, and is told of the gradient.
        unseen = [[*map(_unseen, tensors)] for tensors in (values, sources)]
        outputs = _in_graph(unseen[0], gradient_in_graph, unseen[1])
        record(name, outputs, sources, gradient)
    return outputs


def _in_graph(
    values: Sequence[Tensor], gradient: Pullback, sources: Sequence[Tensor]
) -> list[Tensor]:
    _state.result = list(values), gradient
    return list(_operation(*sources))


def _unseen(x: Tensor) -> Tensor:
    """Return a tensor of a graph that no tape and no accumulator relates to x."""
    graph = tf.compat.v1.get_default_graph()
    return graph.create_op("Identity", [tf.convert_to_tensor(x)], [x.dtype]).outputs[0]


@tf.custom_gradient
def _operation(*_: Tensor) -> Any:
    """Serve all calls: to decorate a function takes as long as to call it."""
    result, _state.result = _state.result, None
    return result


def attach(
    call: Call, rule: Rule, pullback: Pullback, values: Sequence[Tensor], sources: Sequence[Tensor]
) -> tuple[list[Tensor], list[Transposition]]:
    """Return the values with the pullback of a rule as their gradient, and its transpositions."""
    transpositions: list[Transposition] = []
    is_made = False

    def gradient(*upstreams: Tensor | None) -> Sequence[Tensor | None]:
        if is_made:
            return pullback(*upstreams)
        gradients = _transposable(call, rule, pullback, sources, upstreams)
        transpositions.append((upstreams, gradients))
        return gradients

    outputs = operation(call.name, values, gradient, sources)
    is_made = True
    return outputs, transpositions


def _in_transposition(call: Call, function: Callable[..., Any], *args: Any) -> Any:
    outer, _state.transposed = _state.transposed, call
    try:
        return function(*args)
    finally:
        _state.transposed = outer


def count_accumulators(tensors: Sequence[Tensor]) -> int:
    """Return how many accumulators follow any of the tensors: each transposes an operation at once."""
    count = 0

    def gradient(*upstreams: Tensor) -> list[Tensor]:
        nonlocal count
        count += 1
        return list(upstreams)

    floats = [x for x in tensors if is_differentiable(x.dtype)]
    if floats:
        operation("count_accumulators", floats, gradient, floats)
    return count


def _transposable(
    call: Call, rule: Rule, pullback: Pullback, sources: Sequence[Tensor], upstreams: Sequence[Any]
) -> Sequence[Tensor | None]:
    """Return gradients whose derivative with respect to the upstreams, transposed, is the tangent."""
    if rule.jvp_fn is not None:
        return _pushed(rule, sources, upstreams)
    if not call.forward_mode:
        call.refuse_forward_mode("tf.autodiff.ForwardAccumulator")
    return [*map(dense, _in_transposition(call, pullback, *upstreams))]


def _pushed(
    rule: Rule, sources: Sequence[Tensor], upstreams: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return zeros whose derivative with respect to the upstreams is the author's jvp_fn."""
    count = len(rule.shapes)
    floats = [at for at in range(count) if is_differentiable(sources[at].dtype)]

    def jvp(*tangents: Tensor) -> list[Tensor]:
        full = subvals([None] * count, floats, tangents)
        outputs = rule.tangents(full, upstreams, lambda at: tf.zeros_like(sources[at]))
        return [
            tf.zeros_like(u) if t is None else t for t, u in zip(outputs, upstreams, strict=True)
        ]

    zeros = operation("jvp_fn", [tf.zeros_like(sources[at]) for at in floats], jvp, upstreams)
    return subvals([None] * len(sources), floats, zeros)  # type: ignore[no-any-return]


# --- Is a function linear? ------------------------------------------------------------------------


def check_linear(
    function: Pullback,
    at: Sequence[Tensor],
    values: Sequence[Tensor | None],
    refuse: Callable[[str], NoReturn],
) -> None:
    """Refuse an eager function that is not linear, or that stops gradients.

    Its values at two vectors must add up to the values at their sum, and its derivative at the
    first must be the function itself.
    """
    first = [_wave(x, phase) for phase, x in enumerate(at)]
    second = [
        1.37 * x - a if is_differentiable(x.dtype) else x for x, a in zip(at, first, strict=True)
    ]
    with tf.GradientTape() as tape:
        tape.watch(first)
        at_first = [*map(dense, function(*first))]
    moving = []
    for a, b, both in zip(at_first, map(dense, function(*second)), values, strict=True):
        if (a is None) != (both is None):
            refuse("a gradient that is sometimes None")
        if a is not None and is_differentiable(a.dtype):
            moving.append(a)
            size = 1e-3 * (tf.reduce_sum(tf.abs(a)) + tf.reduce_sum(tf.abs(b)))
            if not bool(tf.reduce_all(tf.abs(a + b - 1.37 * tf.stop_gradient(both)) <= size)):
                refuse("a gradient that is not the sum of those of two parts of upstream")
    derivatives = tape.gradient(moving, first, output_gradients=moving) if moving else []
    of_inputs = sum(_dot(d, x) for d, x in zip(derivatives, first) if d is not None)
    of_outputs = sum(_dot(y, y) for y in moving)
    if not abs(of_outputs - of_inputs) <= 1e-3 * abs(of_outputs):
        refuse("a gradient whose derivative is not the gradient itself")


def _dot(a: Tensor, b: Tensor) -> float:
    return complex(tf.reduce_sum(dense(a) * tf.math.conj(b)).numpy()).real


def _wave(x: Tensor, phase: int) -> Tensor:
    """Return a tensor like x with numbers of both signs."""
    if not is_differentiable(x.dtype):
        return x
    wave = 2.3 * tf.cos(1.7 * tf.range(tf.size(x), dtype=tf.float32) + 2.0 + phase)
    return tf.reshape(tf.cast(wave, x.dtype), tf.shape(x))
