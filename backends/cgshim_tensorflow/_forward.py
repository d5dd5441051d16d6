"""Operations with a gradient of our own, and derivatives by TensorFlow's own means.

A `tf.autodiff.ForwardAccumulator` has no rule of its own for such an operation. It calls the
gradient while the operation is made, and differentiates the result with respect to the upstreams:
this is the transpose of the gradient, and so the tangent if the gradient is linear.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from cgshim.backend import Call, Rule, Tensor, TransformationError, is_differentiable, refusal
from cgshim_tensorflow._private import is_watched, record_operation
from cgshim_tensorflow._tensors import dense, fitting, values_of, with_values

Pullback = Callable[..., Sequence[Tensor | None]]
"""takes one upstream gradient for each output, and returns one gradient for each source"""


class _State(threading.local):
    result: Any = None
    """the values and the gradient of the operation that is being made in a graph"""
    transposed: Call | None = None
    """the call whose rule an accumulator transposes: tapes record nothing there (TensorFlow 2.21)"""
    inputs: Sequence[Tensor] | None = ()
    """the inputs of the f that is running; None while it must not call the host"""


state = _State()


def in_transposition(call: Call, function: Callable[..., Any], *args: Any) -> Any:
    outer, state.transposed = state.transposed, call
    try:
        return function(*args)
    finally:
        state.transposed = outer


def run_f(
    call: Call, inputs: Sequence[Tensor], known: Sequence[Tensor] | None
) -> tuple[list[Tensor], Rule]:
    """Run f on inputs; `state.inputs` is the known ones meanwhile."""
    outer, state.inputs = state.inputs, known
    try:
        return call(inputs)
    finally:
        state.inputs = outer


def operation(
    name: str, values: Sequence[Tensor], gradient: Pullback, sources: Sequence[Tensor]
) -> list[Tensor]:
    """Return new tensors, which nothing follows, as outputs of an operation with this gradient.

    Each accumulator that follows a source calls the gradient before this returns.
    """
    if tf.executing_eagerly():
        # tf.custom_gradient makes the same call, after inspections that take twice as long
        record_operation(name, values, sources, gradient)
        return list(values)
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
        given = [[*map(unseen, tensors)] for tensors in (values, sources)]
        outputs = _in_graph(given[0], gradient_in_graph, given[1])
        record_operation(name, outputs, sources, gradient)
    return outputs


def _in_graph(
    values: Sequence[Tensor], gradient: Pullback, sources: Sequence[Tensor]
) -> list[Tensor]:
    state.result = list(values), gradient
    return list(_operation(*sources))


def unseen(x: Tensor) -> Tensor:
    """Return a tensor of a graph that no tape and no accumulator relates to x."""
    graph = tf.compat.v1.get_default_graph()
    return graph.create_op("Identity", [tf.convert_to_tensor(x)], [x.dtype]).outputs[0]


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _operation(*_: Tensor) -> Any:
    """Serve all calls: to decorate a function takes as long as to call it."""
    result, state.result = state.result, None
    return result


def count_accumulators(tensors: Sequence[Tensor]) -> int:
    """Return how many accumulators follow any of the tensors: each transposes an operation at once."""
    count = 0

    def gradient(*upstreams: Tensor) -> list[Tensor]:
        nonlocal count
        count += 1
        return list(upstreams)

    floats = [x for x in tensors if is_differentiable(x.dtype)]
    if floats:
        operation("count_accumulators", [*map(tf.stop_gradient, floats)], gradient, floats)
    return count


# --- Derivatives of any function ------------------------------------------------------------------


def vjp(
    fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], variables: Sequence[Tensor] = ()
) -> tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], Sequence[Tensor]]]:
    """Return fn's outputs at inputs, and its pullback to the inputs and the variables."""
    if state.transposed is not None:
        state.transposed.refuse("forward mode needs a rule that takes no derivative itself",
                                 "op_vjp in it", "use reverse mode")  # fmt: skip
    values = [tf.identity(values_of(x)) for x in inputs]  # two inputs may be one object
    sources = [*values, *variables]
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(sources)
        if sources and not any(map(is_watched, sources)):  # an accumulator transposes a function
            raise refusal(TransformationError, "op_vjp",
                          must="a derivative needs a tape that records",
                          got="forward mode of the rule that takes it", do="use reverse mode")  # fmt: skip
        outputs = list(fn(*map(with_values, inputs, values)))

    def pullback(upstreams: Sequence[Tensor]) -> list[Tensor]:
        used = [
            (values_of(y), tf.convert_to_tensor(fitting(u, y, "op_vjp", lambda: "the output")))
            for y, u in zip(outputs, upstreams, strict=True)
            if is_differentiable(y.dtype)
        ]
        gradients = tape.gradient(
            [y for y, _ in used], sources, output_gradients=[u for _, u in used],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )  # fmt: skip
        return [
            with_values(x, tf.convert_to_tensor(g))
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
        check_linear(of_values, ones, of_values(*ones), refuse)
    return vjp(of_values, ones)[1](upstreams)


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
        at_first = [*map(dense, function(*first), values)]
    moving = []
    for a, b, both in zip(at_first, map(dense, function(*second), values), values, strict=True):
        if (a is None) != (both is None):
            refuse("a gradient that is sometimes None")
        if a is not None and is_differentiable(a.dtype):
            moving.append(a)
            size = 1e-3 * (tf.reduce_sum(tf.abs(a)) + tf.reduce_sum(tf.abs(b)))
            if not bool(tf.reduce_all(tf.abs(a + b - 1.37 * tf.stop_gradient(both)) <= size)):
                refuse("a gradient that is not the sum of those of two parts of upstream")
    derivatives = tape.gradient(moving, first, output_gradients=moving) if moving else []
    pairs = zip(derivatives, first, strict=False)
    of_inputs = sum(_dot(d, x) for d, x in pairs if d is not None)
    of_outputs = sum(_dot(y, y) for y in moving)
    if not abs(of_outputs - of_inputs) <= 1e-3 * abs(of_outputs):
        refuse("a gradient whose derivative is not the gradient itself")


def _dot(a: Tensor, b: Tensor) -> float:
    return complex(tf.reduce_sum(dense(a, b) * tf.math.conj(b)).numpy()).real


def _wave(x: Tensor, phase: int) -> Tensor:
    """Return a tensor like x with numbers of both signs."""
    if not is_differentiable(x.dtype):
        return x
    wave = 2.3 * tf.cos(1.7 * tf.range(tf.size(x), dtype=tf.float32) + 2.0 + phase)
    return tf.reshape(tf.cast(wave, x.dtype), tf.shape(x))
