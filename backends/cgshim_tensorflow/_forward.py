"""Operations with a gradient of our own, and forward mode.

A `tf.autodiff.ForwardAccumulator` has no rule of its own for such an operation. It calls the
gradient while the operation is made, and differentiates the result with respect to the upstreams:
this is the transpose of the rule, and so the tangent if the rule is linear.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from cgshim.backend import Call, Rule, Tensor, is_differentiable, subvals
from cgshim_tensorflow._private import record
from cgshim_tensorflow._tensors import dense

Pullback = Callable[..., Sequence[Tensor | None]]
"""takes one upstream gradient for each output, and returns one gradient for each source"""
ORDERS_IN_GRAPHS = 3
"""how many orders of forward mode a kept output supports in a graph, where they are not counted"""


class _State(threading.local):
    result: Any = None
    """the values and the gradient of the operation that is being made in a graph"""
    transposed: Call | None = None
    """the call whose rule an accumulator transposes: tapes record nothing there (TensorFlow 2.21)"""


_state = _State()


def call_in_transposition() -> Call | None:
    """Return the call whose rule an accumulator is transposing; None if there is none."""
    return _state.transposed


def operation(
    name: str, values: Sequence[Tensor], gradient: Pullback, sources: Sequence[Tensor]
) -> list[Tensor]:
    """Return the values as outputs of one operation of the sources with this gradient."""
    if tf.executing_eagerly():
        outputs = [*map(tf.stop_gradient, values)]
        record(name, outputs, sources, gradient)
        return outputs
    _state.result = list(values), gradient
    return list(_operation(*sources))


@tf.custom_gradient
def _operation(*_: Tensor) -> Any:
    """Serve all calls: to decorate a function takes as long as to call it."""
    result, _state.result = _state.result, None
    return result


def attach(
    call: Call, rule: Rule, pullback: Pullback, values: Sequence[Tensor], sources: Sequence[Tensor]
) -> tuple[list[Tensor], int]:
    """Return the values with the pullback of a rule as their gradient.

    The second result is the number of accumulators that follow the operation.
    """
    transposed = 0
    is_made = False

    def gradient(*upstreams: Tensor | None) -> Sequence[Tensor | None]:
        nonlocal transposed
        if is_made:
            return pullback(*upstreams)
        transposed += 1
        return _transposable(call, rule, pullback, sources, upstreams)

    outputs = operation(call.name, values, gradient, sources)
    is_made = True
    if transposed and tf.executing_eagerly():
        if rule.jvp_fn is None:
            check_linear(pullback, outputs, call.refuse_nonlinear)
    elif transposed:
        # Around an IdentityN the tangents are zeros (TensorFlow 2.21), around a function they are
        # the transpose of the gradient.
        if rule.jvp_fn is not None and not call.forward_mode:
            call.refuse("in a graph, forward mode transposes grad_fn", "a jvp_fn",
                        "say that it is the transpose: op_custom_gradient(forward_mode=True)")  # fmt: skip
        again = lambda *sources: operation(call.name, values, gradient, sources)
        outputs = list(tf.function(again, autograph=False)(*sources))
        transposed = ORDERS_IN_GRAPHS
    return outputs, transposed


def has_tangent(tensor: Tensor) -> bool:
    """Return True if an accumulator follows a tensor: it transposes an identity at once."""
    calls: list[Tensor] = []

    def gradient(upstream: Tensor) -> list[Tensor]:
        calls.append(upstream)
        return [upstream]

    if is_differentiable(tensor.dtype):
        operation("has_tangent", [tensor], gradient, [tensor])
    return bool(calls)


def _transposable(
    call: Call, rule: Rule, pullback: Pullback, sources: Sequence[Tensor], upstreams: Sequence[Any]
) -> Sequence[Tensor | None]:
    """Return gradients whose derivative with respect to the upstreams, transposed, is the tangent."""
    if rule.jvp_fn is not None and tf.executing_eagerly():
        return _pushed(rule, sources, upstreams)
    if not call.forward_mode:
        call.refuse_forward_mode("tf.autodiff.ForwardAccumulator")
    outer, _state.transposed = _state.transposed, call
    try:
        return [*map(dense, pullback(*upstreams))]
    finally:
        _state.transposed = outer


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
    function: Pullback, like: Sequence[Tensor], refuse: Callable[[str], NoReturn]
) -> None:
    """Refuse an eager function of such tensors that is not linear, or that stops gradients.

    Its values at two vectors must add up to its value at their sum, and its derivative at the first
    must be the function itself.
    """
    first = [_wave(x, at) for at, x in enumerate(like)]
    total = [1.37 * tf.ones_like(x) if is_differentiable(x.dtype) else x for x in like]
    second = [
        t - x if is_differentiable(x.dtype) else x for t, x in zip(total, first, strict=True)
    ]
    with tf.GradientTape() as tape:
        tape.watch(first)
        at_first = [*map(dense, function(*first))]
    for parts in zip(at_first, function(*second), function(*total), strict=True):
        a, b, both = map(dense, parts)
        if a is not None and is_differentiable(a.dtype):
            size = tf.reduce_sum(tf.abs(a)) + tf.reduce_sum(tf.abs(b))
            if not bool(tf.reduce_all(tf.abs(a + b - both) <= 1e-3 * size)):
                refuse("a gradient that is not the sum of those of two parts of upstream")
    moving = [y for y in at_first if y is not None and is_differentiable(y.dtype)]
    derivatives = tape.gradient(moving, first, output_gradients=moving)
    of_inputs = sum(_dot(d, x) for d, x in zip(derivatives, first, strict=True) if d is not None)
    of_outputs = sum(_dot(y, y) for y in moving)
    if not bool(tf.abs(of_outputs - of_inputs) <= 1e-3 * tf.abs(of_outputs)):
        refuse("a gradient whose derivative is not the gradient itself")


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return tf.math.real(tf.cast(tf.reduce_sum(dense(a) * tf.math.conj(b)), tf.complex128))


def _wave(x: Tensor, phase: int) -> Tensor:
    """Return a tensor like x with numbers of both signs."""
    if not is_differentiable(x.dtype):
        return x
    wave = 2.3 * tf.cos(1.7 * tf.range(tf.size(x), dtype=tf.float32) + 2.0 + phase)
    return tf.reshape(tf.cast(wave, x.dtype), tf.shape(x))
