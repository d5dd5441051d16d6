"""needs_input_grad on TensorFlow: what tapes and accumulators watch when f runs; all of it within a
tf.function.

The rule is wrong on purpose, and by another number for each way in which it is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from cgshim import op_custom_gradient

X, W = tf.constant([1.0, 2.0]), tf.constant([3.0, 5.0])


def _product(x: Any, w: Any, *, needs_input_grad: Any) -> Any:
    """x * w, with 100 more if f may need the gradient of x, and 200 if that of w; and a factor that
    says the same.
    """
    by_f = 100.0 * needs_input_grad[0] + 200.0 * needs_input_grad[1]

    def rule(upstream: Any, needs_input_grad: Any) -> Any:
        of_x, of_w = needs_input_grad
        factor = 7.0 + 10.0 * of_x + 20.0 * of_w
        return factor * upstream * w if of_x else None, factor * upstream * x if of_w else None

    return x * w + by_f, rule


product = op_custom_gradient(_product)
linear = op_custom_gradient(_product, forward_mode=True)


def told_f(output: Any) -> tuple[bool, bool]:
    """What f was told, as its output says it."""
    said = round(float(np.max(output - X * W)) / 100)
    return bool(said & 1), bool(said & 2)


def gradient(of: Callable[[], Any], watched: Any, by: Any = None, **options: Any) -> Any:
    """The gradient of `of()` by a tensor, which is watched if nothing else is."""
    with tf.GradientTape(**options) as tape:
        tape.watch(watched)
        output = of()
    return tape.gradient(output, watched if by is None else by)


def test_an_undifferentiated_call_needs_nothing() -> None:
    assert told_f(product(X, W)) == (False, False)
    with tf.GradientTape() as tape, tape.stop_recording():
        tape.watch([X, W])
        assert told_f(product(X, W)) == (False, False)


def test_what_is_watched_is_needed() -> None:
    np.testing.assert_allclose(gradient(lambda: product(X, W), X), 17 * W)
    np.testing.assert_allclose(gradient(lambda: product(X, W), W), 27 * X)
    np.testing.assert_allclose(gradient(lambda: product(2 * X, W), X), 2 * 17 * W)
    for found, expected in zip(
        gradient(lambda: product(X, W), [X, W]), (37 * W, 37 * X), strict=True
    ):
        np.testing.assert_allclose(found, expected)


def test_a_persistent_tape_gives_any_gradient_later() -> None:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([X, W])
        output = product(X, W)
    for tensor, expected in ((W, 37 * X), (X, 37 * W), (W, 37 * X)):
        np.testing.assert_allclose(tape.gradient(output, tensor), expected)


def test_variables() -> None:
    trained, frozen = tf.Variable(W), tf.Variable(W, trainable=False)
    np.testing.assert_allclose(gradient(lambda: product(X, trained), [], trained), 27 * X)
    np.testing.assert_allclose(gradient(lambda: product(X, trained), X), 37 * W)
    np.testing.assert_allclose(
        gradient(lambda: product(X, trained), X, watch_accessed_variables=False), 17 * W
    )
    np.testing.assert_allclose(gradient(lambda: product(X, frozen), X), 17 * W)
    np.testing.assert_allclose(gradient(lambda: product(X, frozen), frozen), 27 * X)


def test_a_tape_around_another() -> None:
    """Both may ask for the gradients of one call, so that it needs all that either of them watches."""
    with tf.GradientTape() as outer:
        outer.watch(X)
        first = gradient(lambda: product(X, W), W)
    np.testing.assert_allclose(first, 37 * X)
    np.testing.assert_allclose(outer.gradient(first, X), [37.0, 37.0])


def test_an_accumulator() -> None:
    with tf.autodiff.ForwardAccumulator(X, 2 * X) as accumulator:
        output = linear(X, W)
    np.testing.assert_allclose(accumulator.jvp(output), 34 * W * X)


def test_a_recomputed_call() -> None:
    """It runs f first without a tape, and again with one."""
    np.testing.assert_allclose(
        gradient(lambda: tf.recompute_grad(lambda x: product(x, W))(X), X), 17 * W
    )


TRACED: dict[str, Callable[[], Any]] = {
    "a function": lambda: gradient(lambda: tf.function(lambda x: product(x, W))(X), X),
    "the gradient in it": lambda: tf.function(lambda x: gradient(lambda: product(x, W), x))(X),
    "a map": lambda: tf.vectorized_map(lambda xw: gradient(lambda: product(*xw), xw[0]), (X, W)),
}


@pytest.mark.parametrize("take", TRACED.values(), ids=TRACED)
def test_a_function_asks_for_all(take: Callable[[], Any]) -> None:
    np.testing.assert_allclose(take(), 37 * W)


A, B = tf.reshape(tf.range(12.0), (4, 3)) / 10, tf.reshape(tf.range(6.0), (3, 2)) / 7


@op_custom_gradient
def in_the_rule(x: Any, w: Any) -> Any:
    def rule(upstream: Any, needs_input_grad: Any) -> Any:
        assert needs_input_grad == (True, True)
        return upstream @ tf.transpose(w), tf.transpose(x) @ upstream

    return x @ w, rule


@op_custom_gradient
def in_f(x: Any, w: Any, *, needs_input_grad: Any) -> Any:
    """A loss whose gradients are made in the forward pass, as fused kernels do."""
    assert needs_input_grad == (True, True)
    y = tf.tanh(x @ w)
    of_x, of_w = (1 - y * y) @ tf.transpose(w), tf.transpose(x) @ (1 - y * y)
    return tf.reduce_sum(y), lambda upstream: (upstream * of_x, upstream * of_w)


USES: dict[str, tuple[Any, int]] = {
    "none": (lambda op: op, 1),
    "x's": (lambda op: lambda x, w: gradient(lambda: op(x, w) ** 2, x), 2),
    "w's": (lambda op: lambda x, w: gradient(lambda: op(x, w) ** 2, w), 2),
    "both": (lambda op: lambda x, w: gradient(lambda: op(x, w) ** 2, [x, w]), 3),
}


@pytest.mark.parametrize(("use", "products"), USES.values(), ids=USES)
@pytest.mark.parametrize("op", [in_the_rule, in_f], ids=["rule", "f"])
def test_xla_computes_no_unused_gradient(op: Any, use: Any, products: int) -> None:
    function = tf.function(use(op), jit_compile=True)
    program = function.experimental_get_compiler_ir(A, B)(stage="optimized_hlo")
    assert program.count(" dot(") == products, program
