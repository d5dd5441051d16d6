"""Operations with a custom gradient, and derivatives by TensorFlow's own means.

A `tf.autodiff.ForwardAccumulator` has no rule of its own for such an operation. It calls the
gradient while the operation is made, and differentiates the result with respect to the upstreams:
this is the transpose of the gradient, and so the tangent if the gradient is linear.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import tensorflow as tf

from cgshim.backend import Call, Tensor, TransformationError, is_differentiable, refusal
from cgshim_tensorflow._private import record_operation, set_converter
from cgshim_tensorflow._tensors import dense, fitting, values_of, with_values

T = TypeVar("T")
Pullback = Callable[..., Sequence[Tensor | None]]
"""maps one upstream gradient per output to one gradient per source"""


class _State(threading.local):
    transposed: Call | None = None
    """the call whose rule an accumulator transposes: tapes record nothing there (TensorFlow 2.21)
    """
    inputs: Sequence[Tensor] | None = ()
    """the inputs of the running f; None while f must not call the host"""


state = _State()


def with_state(name: str, value: Any, function: Callable[..., T], *args: Any) -> T:
    """Return a function's result, with another value in `state` while it runs."""
    outer = getattr(state, name)
    setattr(state, name, value)
    try:
        return function(*args)
    finally:
        setattr(state, name, outer)


def operation(
    name: str, values: Sequence[Tensor], gradient: Pullback, sources: Sequence[Tensor]
) -> list[Tensor]:
    """Return new tensors as outputs of an operation with this gradient.

    No tape or accumulator follows `values`. Each accumulator that follows a source calls the
    gradient before this returns.
    """
    outputs = [*map(tf.stop_gradient, values)]
    if not tf.executing_eagerly():
        # In a graph an accumulator follows the IdentityN of a tf.custom_gradient, and not its
        # gradient (TensorFlow 2.21). So it sees only the record below.
        in_graph = tf.custom_gradient(lambda *_: (outputs, gradient))
        outputs = [*in_graph(*map(unseen, sources))]
    # tf.custom_gradient makes the same call: eagerly, its checks take twice as long
    record_operation(name, outputs, sources, gradient)
    return outputs


def operation_in_orders(
    name: str,
    values: Sequence[Tensor],
    gradient: Pullback,
    transposable: Pullback,
    sources: Sequence[Tensor],
    keep: Callable[[list[Tensor]], None] = lambda outputs: None,
) -> tuple[list[Tensor], int]:
    """Return the outputs of an operation, and how many accumulators follow its sources.

    An accumulator transposes the gradient before the outputs exist: it calls the transposable one.
    The gradient may be a function of the outputs. So the operation is made again for each order of
    forward mode, and `keep` gets the outputs each time.
    """
    outputs: list[Tensor] = []
    made = orders = 0

    def gradient_of(number: int) -> Pullback:
        def either(*upstreams: Tensor | None) -> Sequence[Tensor | None]:
            nonlocal orders
            if made > number:
                return gradient(*upstreams)
            orders += number == 0
            return transposable(*upstreams)

        return either

    while made <= orders:
        outputs = operation(name, values, gradient_of(made), sources)
        made += 1
        keep(outputs)
    return outputs, orders


def unseen(x: Tensor) -> Tensor:
    """Return a tensor of a graph that no tape and no accumulator relates to x."""
    graph = tf.compat.v1.get_default_graph()
    identity = graph.create_op("Identity", [tf.convert_to_tensor(x)], [x.dtype])
    # by itself tf.vectorized_map makes a dense tensor of the parts of sparse ones
    set_converter(identity, lambda pfor_input: list(pfor_input.inputs))
    return identity.outputs[0]


def count_accumulators(tensors: Sequence[Tensor]) -> int:
    """Return how many accumulators follow any of the tensors."""
    floats = [x for x in tensors if is_differentiable(x.dtype)]
    same = lambda *upstreams: upstreams
    return operation_in_orders("count", floats, same, same, floats)[1] if floats else 0


# --- Derivatives of any function ------------------------------------------------------------------


def vjp(
    fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], variables: Sequence[Tensor] = ()
) -> tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], Sequence[Tensor]]]:
    """Return fn's outputs at inputs, and its pullback to the inputs and the variables."""
    values = [tf.identity(values_of(x)) for x in inputs]  # two inputs may be one object
    sources = [*values, *variables]
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(sources)
        outputs = list(fn(*map(with_values, inputs, values)))
        recorded = [*map(tf.identity, sources[:1])]

    def pullback(upstreams: Sequence[Tensor]) -> list[Tensor]:
        used = [
            (values_of(y), tf.convert_to_tensor(fitting(u, y, "op_vjp", lambda: "the output")))
            for y, u in zip(outputs, upstreams, strict=True)
            if is_differentiable(y.dtype)
        ]
        gradients = tape.gradient(
            [y for y, _ in used], sources, output_gradients=[u for _, u in used]
        )
        if all(g is None for g in gradients) and None in tape.gradient(recorded, sources[:1]):
            # An accumulator lets no tape record a rule: all would be zeros (TensorFlow 2.21).
            raise refusal(TransformationError, state.transposed.name if state.transposed else "op_vjp",
                          must="forward mode needs a rule that takes no derivative itself",
                          got="op_vjp in it", do="use reverse mode")  # fmt: skip
        return [
            with_values(x, tf.zeros_like(values_of(x)) if g is None else tf.convert_to_tensor(g))
            for x, g in zip([*inputs, *variables], gradients, strict=True)
        ]

    return outputs, pullback


def transposed(
    fn: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    upstreams: Sequence[Tensor],
    refuse: Callable[[str], NoReturn],
) -> Sequence[Tensor]:
    """Return the transpose of a linear function of tensors like the inputs, at upstreams."""
    of_values: Any = lambda *tangents: fn(*map(with_values, inputs, tangents))
    ones = [tf.ones_like(values_of(x)) for x in inputs]
    if tf.executing_eagerly():
        check_linear(of_values, ones, refuse)
    return vjp(of_values, ones)[1](upstreams)


# --- Is a function linear? ------------------------------------------------------------------------


def check_linear(
    function: Callable[..., Sequence[Tensor]],
    like: Sequence[Tensor],
    refuse: Callable[[str], NoReturn],
) -> None:
    """Raise an error for an eager function that is not linear, or that stops gradients.

    Its derivative at one point must be the function itself, which is compared at another point.
    """
    at = [_wave(x, phase) for phase, x in enumerate(like)]
    with tf.GradientTape() as tape:
        tape.watch(at)
        first = function(*at)
    other = [_wave(x, 0.6 * phase - 3.0) for phase, x in enumerate(like)]
    second = function(*other)
    pairs = [
        (y, dense(z, y)) for y, z in zip(first, second, strict=True) if is_differentiable(y.dtype)
    ]
    weights = [_wave(z, phase) for phase, (_, z) in enumerate(pairs)]
    back = tape.gradient([y for y, _ in pairs], at, output_gradients=weights)
    by_derivative = sum(_dot(d, x) for d, x in zip(back, other, strict=True) if d is not None)
    terms = [_dot(z, w) for (_, z), w in zip(pairs, weights, strict=True)]
    if abs(sum(terms) - by_derivative) > 1e-3 * sum(map(abs, terms)):  # not of NaN
        refuse("a gradient whose derivative is not the gradient itself")


def _dot(a: Tensor, b: Tensor) -> float:
    return complex(tf.reduce_sum(dense(a, b) * tf.math.conj(b)).numpy()).real


def _wave(x: Tensor, phase: float) -> Tensor:
    """Return a tensor like x with numbers of both signs."""
    if not is_differentiable(x.dtype):
        return x
    wave = 2.3 * tf.cos(1.7 * tf.range(tf.size(x), dtype=tf.float32) + 2.0 + phase)
    return tf.reshape(tf.cast(wave, x.dtype), tf.shape(x))
