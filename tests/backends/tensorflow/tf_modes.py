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

# To convert a test and all that it calls takes longer than to trace it: AutoGraph is for the tests
# of functions (test_tf_functions.py), of each transformation (test_tf_never_dropped.py) and of each
# place (test_tf_written.py).
function = functools.partial(tf.function, autograph=False)
MODES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "eager": lambda fn: fn,
    "function": function,
    "xla": functools.partial(function, jit_compile=True),
}
WITH_AUTOGRAPH = {
    "eager": MODES["eager"],
    "function": tf.function,
    "xla": functools.partial(tf.function, jit_compile=True),
}


def _in(modes: list[str], of: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("mode", [of[mode] for mode in modes], ids=modes)


every_mode = _in(["eager", "function", "xla"], MODES)
eager_and_function = _in(["eager", "function"], MODES)
every_mode_with_autograph = _in(["eager", "function", "xla"], WITH_AUTOGRAPH)
eager_and_autograph = _in(["eager", "function"], WITH_AUTOGRAPH)


def seven(x: Any) -> Any:
    """x * x with a rule that is wrong on purpose: 7 * x, where autodiff would say 2 * x."""
    return x * x, lambda upstream: upstream * 7 * x


square = cgshim.op_custom_gradient(seven, forward_mode=True)


def grad(fn: Callable[..., Any], of: Callable[..., Any] = lambda y: y) -> Callable[..., Any]:
    """The gradient of a function of one tensor, by a tape."""

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = of(fn(x))
        return tape.gradient(y, x)

    return gradient


def with_next_order(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns a list, with the gradient of the last one after it, by a tape."""

    def derivatives(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            lower = fn(x)
        return [*lower, tape.gradient(lower[-1], x)]

    return derivatives


def with_orders(fn: Callable[..., Any], highest: int) -> Callable[..., Any]:
    """A function's value and its derivatives up to an order, of one run in nested tapes."""
    value = lambda x: [fn(x)]
    return functools.reduce(lambda fn, _: with_next_order(fn), range(highest), value)


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
