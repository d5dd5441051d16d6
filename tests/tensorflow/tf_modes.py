"""What the tests of TensorFlow share: ways to run a function, ways to differentiate it, and an op
to try them on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import cgshim

MODES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "eager": lambda fn: fn,
    "function": tf.function,
    "xla": functools.partial(tf.function, jit_compile=True),
}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
eager_and_function = pytest.mark.parametrize(
    "mode", [MODES["eager"], MODES["function"]], ids=["eager", "function"]
)


def seven(x: Any) -> Any:
    """x * x with a rule that is wrong on purpose: 7 * x, where autodiff would say 2 * x."""
    return x * x, lambda upstream: upstream * 7 * x


square = cgshim.op_custom_gradient(seven)


def grad(fn: Callable[..., Any], of: Callable[..., Any] = lambda y: y) -> Callable[..., Any]:
    """The gradient of a function of one tensor, by a tape."""

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = of(fn(x))
        return tape.gradient(y, x)

    return gradient


def jacobian(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of the sum of a function of one tensor, by a tape's Jacobian."""

    def of(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fn(x)
        return tf.reduce_sum(tape.jacobian(y, x), axis=0)

    return of


def jvp(fn: Callable[..., Any], tangent: Any) -> Callable[..., Any]:
    """The derivative of a function of one tensor along a tangent, by a ForwardAccumulator."""

    def derivative(x: Any) -> Any:
        with tf.autodiff.ForwardAccumulator(x, tf.constant(tangent, x.dtype)) as accumulator:
            y = fn(x)
        return accumulator.jvp(y, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    return derivative


def vectorized(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *xs: tf.vectorized_map(lambda elements: fn(*elements), xs)


def calls_of(run: Callable[[], Any]) -> int:
    """How many functions, of Python and of C, a run calls."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for _ in range(3):
        run()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls
