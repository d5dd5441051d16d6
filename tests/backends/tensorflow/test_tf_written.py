"""The rule runs as it was written: wherever f keeps a residual, each order of each transformation
is right or refused.

The op of most tests is x**3 with a rule that has 15 for 3, so that autodiff's answer is never taken
for the rule's.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import (
    eager_and_function,
    function,
    grad,
    jacobian,
    jvp,
    square,
    vectorized,
    with_next_order,
    with_orders,
)

import cgshim

X = 2.0
Rule = Callable[[Any], Any]


@dataclasses.dataclass
class Record:
    """An object that no registry knows."""

    held: Any = None


# --- Where f can put a residual -------------------------------------------------------------------


def _a_nested_function(held: Any) -> Rule:
    def slope() -> Any:
        return 15 * held

    return lambda u: u * slope()


def _a_function_attribute(held: Any) -> Rule:
    def rule(u: Any) -> Any:
        return 15 * u * vars(rule)["held"]

    vars(rule)["held"] = held
    return rule


PLACES: dict[str, Callable[[Any], Rule]] = {
    "cell": lambda held: lambda u: 15 * u * held,
    "list": lambda held: (lambda kept: lambda u: 15 * u * kept[0])([held]),
    "dict": lambda held: (lambda kept: lambda u: 15 * u * kept["x"])({"x": held}),
    "nested function": _a_nested_function,
    "partial": lambda held: functools.partial(lambda kept, u: 15 * u * kept, held),
    "dataclass": lambda held: (lambda record: lambda u: 15 * u * record.held)(Record(held)),
    "object": lambda held: (lambda kept: lambda u: 15 * u * kept.held)(
        types.SimpleNamespace(held=held)
    ),
    "function attribute": _a_function_attribute,
    "default value": lambda held: lambda u, held=held: 15 * u * held,
}


def _persistent(fn: Callable[[Any], Any], highest: int) -> Callable[[Any], Any]:
    def derivatives(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            found = [fn(x)]
            for _ in range(highest - 1):
                found.append(tape.gradient(found[-1], x))
        return [*found, tape.gradient(found[-1], x)]

    return derivatives


def _tf_gradients(fn: Callable[[Any], Any], highest: int) -> Callable[[Any], Any]:
    def derivatives(x: Any) -> Any:
        found = [fn(x)]
        for _ in range(highest):
            found += tf.gradients(found[-1], x)
        return found

    return function(derivatives)


def _vectorized(fn: Callable[[Any], Any], highest: int) -> Callable[[Any], Any]:
    found = vectorized(with_orders(fn, highest))
    return lambda x: [of_two[0] for of_two in found(tf.stack([x, x]))]


def _tapes_of_a_jacobian(fn: Callable[[Any], Any], highest: int) -> Callable[[Any], Any]:
    return with_orders(jacobian(lambda x: fn(tf.reshape(x, [1]))), highest - 1)


def _forward_over_reverse(fn: Callable[[Any], Any], highest: int) -> Callable[[Any], Any]:
    if highest == 1:
        return with_orders(fn, 1)

    def derivatives(x: Any) -> Any:
        with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)) as accumulator:
            _, *lower = with_orders(fn, highest - 1)(x)
        return [lower[0], *(accumulator.jvp(y, tf.UnconnectedGradients.ZERO) for y in lower)]

    return derivatives


# the last of what they return are the derivatives of order 1 to the highest, of one run
TRANSFORMATIONS: dict[str, Callable[[Any, int], Callable[[Any], Any]]] = {
    "tapes": with_orders,
    "a persistent tape": _persistent,
    "tf.function of tapes": lambda fn, highest: tf.function(with_orders(fn, highest)),
    "tapes of tf.function": lambda fn, highest: with_orders(function(fn), highest),
    "a tape of tf.function of tapes": lambda fn, highest: with_next_order(
        function(with_orders(fn, highest - 1))
    ),
    "XLA": lambda fn, highest: function(with_orders(fn, highest), jit_compile=True),
    "tf.gradients": _tf_gradients,
    "vectorized_map": _vectorized,
    "tapes of a Jacobian": _tapes_of_a_jacobian,
    "forward over reverse": _forward_over_reverse,
    "forward over reverse in tf.function": lambda fn, highest: function(
        _forward_over_reverse(fn, highest)
    ),
}
# a first order has a way of its own; the others are of one run
to_each_order = pytest.mark.parametrize("highest", [1, 3])


def check(found: Any, expected: list[float], rtol: float = 1e-5) -> None:
    for order, (a, b) in enumerate(zip(found[-len(expected) :], expected, strict=True), 1):
        np.testing.assert_allclose(a, b, rtol=rtol, err_msg=f"order {order} of {len(expected)}")


@to_each_order
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("place", PLACES)
def test_a_residual_in_any_place(place: str, transformation: str, highest: int) -> None:
    @functools.partial(cgshim.op_custom_gradient, forward_mode=True)
    def op(x: Any) -> Any:
        return x**3, PLACES[place](x**2)

    found = TRANSFORMATIONS[transformation](op, highest)(tf.constant(X))
    check(found, [15 * X**2, 30 * X, 30.0][:highest])


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("place", PLACES)
def test_an_output_in_any_place(place: str, transformation: str) -> None:
    """Its derivative is the rule's, though autodiff could see through f.

    Up to the second order; the third is tested in one place, below.
    """

    @functools.partial(cgshim.op_custom_gradient, forward_mode=True)
    def op(x: Any) -> Any:
        y = tf.exp(x)
        return y, PLACES[place](y)

    found = TRANSFORMATIONS[transformation](op, 2)(tf.constant(X))
    check(found, [15 * np.exp(X), 15**2 * np.exp(X)], rtol=1e-4)


@to_each_order
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_an_output_that_f_has_read_too(transformation: str, highest: int) -> None:
    @functools.partial(cgshim.op_custom_gradient, forward_mode=True)
    def op(x: Any) -> Any:
        y = tf.exp(x)
        tf.reduce_sum(y * 2.0)
        return y, lambda u: 15 * u * y

    found = TRANSFORMATIONS[transformation](op, highest)(tf.constant(X))
    check(found, [15**order * np.exp(X) for order in range(1, highest + 1)], rtol=1e-4)


@to_each_order
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("place", ["cell", "object"])
def test_what_f_made_of_its_output_has_fs_derivative(
    place: str, transformation: str, highest: int
) -> None:
    """f's own derivative of 2 exp(x) is itself, and the rule's is 15 times that."""

    @functools.partial(cgshim.op_custom_gradient, forward_mode=True)
    def op(x: Any) -> Any:
        y = tf.exp(x)
        return y, PLACES[place](2 * y)

    found = TRANSFORMATIONS[transformation](op, highest)(tf.constant(X))
    check(found, [30 * np.exp(X)] * highest)


# --- Derivatives that a rule takes itself ---------------------------------------------------------


def five_cubes_by_a_tape(x: Any) -> Any:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = 5 * x**3
    return y, lambda u: 7 * tape.gradient(y, x, output_gradients=u)


@eager_and_function
@pytest.mark.parametrize("f", [five_cubes_by_a_tape])
@to_each_order
def test_a_rule_that_takes_the_gradient_by_the_tape_of_f(f: Any, highest: int, mode: Any) -> None:
    found = mode(with_orders(cgshim.op_custom_gradient(f), highest))(tf.constant(X))
    check(found, [105 * X**2, 210 * X, 210.0][:highest], rtol=1e-7)


def test_a_tape_that_can_be_asked_once() -> None:
    @cgshim.op_custom_gradient
    def op(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = 5 * x**3
        return y, lambda u: tape.gradient(y, x, output_gradients=u)

    assert grad(grad(op))(tf.constant(X)).numpy() == 30 * X


def test_a_rule_that_asks_for_the_gradients_of_variables() -> None:
    w = tf.Variable(3.0)

    @cgshim.op_custom_gradient
    def op(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x**3 * w

        def rule(u: Any, variables: Any) -> Any:
            of_x, *of_variables = tape.gradient(y, [x, *variables], output_gradients=u)
            return of_x, of_variables

        return y, rule

    with tf.GradientTape() as tape:
        x = tf.constant(X)
        tape.watch(x)
        y = op(x) * 2
    assert [g.numpy() for g in tape.gradient(y, [x, w])] == [2 * 9 * X**2, 2 * X**3]


# --- The very object ------------------------------------------------------------------------------


def test_a_first_order_calls_the_very_object_that_f_returned() -> None:
    class Slope:
        def __init__(self, x: Any) -> None:
            self.x: Any = x
            self.seen: list[Any] = []

        def __call__(self, u: Any) -> Any:
            self.seen.append(u)
            x, self.x = self.x, None
            return 7 * u * x

    slopes: list[Slope] = []

    @cgshim.op_custom_gradient
    def op(x: Any) -> Any:
        slopes.append(Slope(x))
        return x * x, slopes[-1]

    assert grad(op, of=lambda y: 3 * y)(tf.constant(X)).numpy() == 42
    (slope,) = slopes
    assert [u.numpy() for u in slope.seen] == [3]
    assert slope.x is None


# --- Residuals that cannot be connected -----------------------------------------------------------

UNCONNECTED = "{}: a second order needs every tensor that grad_fn reads as a function of the arguments, got f32[] that "


def of_values(x: Any) -> Any:
    slope = tf.constant(np.exp(x.numpy()))
    return tf.exp(x), lambda u: 5 * u * slope


def of_values_in_a_row(x: Any) -> Any:
    slope = tf.reduce_sum(tf.constant([np.exp(x.numpy())]))
    return tf.exp(x), lambda u: 5 * u * slope


@pytest.mark.parametrize("f", [of_values, of_values_in_a_row])
@pytest.mark.parametrize("second", [grad, lambda fn: jvp(fn, 1.0)], ids=["reverse", "forward"])
def test_a_tensor_of_values_raises_in_the_second_order(f: Any, second: Any) -> None:
    op, x = cgshim.op_custom_gradient(f, forward_mode=True), tf.constant(X)
    np.testing.assert_allclose(grad(op)(x), 5 * np.exp(X), rtol=1e-5)
    with pytest.raises(cgshim.TransformationError) as caught:
        second(grad(op))(x)
    assert str(caught.value).startswith(
        UNCONNECTED.format(f.__name__) + "f has made of the values of tensors"
    )


def test_complex_numbers_in_the_code_of_f_are_constants() -> None:
    turn = 2.0j

    @cgshim.op_custom_gradient(forward_mode=True)
    def op(x: Any) -> Any:
        k, n = tf.constant([3.0 - 1.0j, 0.5j], tf.complex64), tf.constant([turn], tf.complex64)
        return 2.0 * x, lambda u: 7.0 * u * x * tf.math.real(tf.reduce_sum(k) + n * n)[0]

    for second in (grad(grad(op)), jvp(grad(op), 1.0), grad(jvp(op, 1.0))):
        assert second(tf.constant(X)).numpy() == -7


def test_an_opaque_output_is_known_by_the_rule() -> None:
    @cgshim.op_custom_gradient
    def op(x: Any) -> Any:
        y = tf.constant(np.exp(x.numpy()))
        return y, lambda u: 5 * u * y

    for highest in (1, 2, 3):
        found = with_orders(op, highest)(tf.constant(X))
        check(found, [5**order * np.exp(X) for order in range(1, highest + 1)])


@eager_and_function
def test_sizes_of_an_output_that_the_rule_reads_too(mode: Any) -> None:
    """An integer has no derivative; and f's own functions are traced while an accumulator follows
    its arguments.
    """

    def f(x: Any) -> Any:
        y = tf.function(tf.exp)(x)
        size = tf.size(y)
        return y, lambda u: 15 * u * y / tf.cast(size, u.dtype)

    op = cgshim.op_custom_gradient(f, forward_mode=True)
    for second in (grad(grad(op)), jvp(grad(op), [1.0]), jacobian(grad(op))):
        np.testing.assert_allclose(mode(second)(tf.constant([X])), [225 * np.exp(X)], rtol=1e-5)


table = tf.constant([15.0, 4.0])


class Scaled:
    """An op with a number in an attribute."""

    scale = 0.5

    def __init__(self) -> None:
        self.slope = 0.3

    @cgshim.op_custom_gradient(forward_mode=True)
    def op(self, x: Any) -> Any:
        slope = tf.constant(self.slope)
        return x**3, lambda u: 50 * u * slope * x**2


def a_constant_of_code(x: Any) -> Any:
    slope = tf.constant([15.0, 0.0])
    return x**3, lambda u: u * slope[0] * x**2


def a_table(x: Any) -> Any:
    return x**3, lambda u: u * table[0] * x**2


def of_sizes(x: Any) -> Any:
    ramp = tf.linspace(0.0, 30.0, 3) / tf.cast(tf.size(x), tf.float32)
    return x**3, lambda u: u * ramp[1] * x**2


def an_integer(x: Any) -> Any:
    slope = tf.constant(int(x) + 13)
    return x**3, lambda u: u * tf.cast(slope, u.dtype) * x**2


HARMLESS: dict[str, Any] = {
    "a constant of the code": cgshim.op_custom_gradient(a_constant_of_code, forward_mode=True),
    "a table that was there before": cgshim.op_custom_gradient(a_table, forward_mode=True),
    "what is made of sizes": cgshim.op_custom_gradient(of_sizes, forward_mode=True),
    "an integer": cgshim.op_custom_gradient(an_integer, forward_mode=True),
    "a number in an attribute": lambda x: Scaled().op(x),
}


@pytest.mark.parametrize("op", HARMLESS.values(), ids=HARMLESS)
@pytest.mark.parametrize("second", [grad, lambda fn: jvp(fn, 1.0)], ids=["reverse", "forward"])
def test_what_is_harmless_passes(op: Any, second: Any) -> None:
    np.testing.assert_allclose(second(grad(op))(tf.constant(X)), 30 * X, rtol=1e-5)


def test_a_python_number_is_a_constant_as_by_hand() -> None:
    """A limitation: a number that Python read looks like a number of the code."""

    def f(x: Any) -> Any:
        slope = float(x)
        return x * x, lambda u: 7 * u * slope * x

    for decorator in (cgshim.op_custom_gradient, tf.custom_gradient):
        assert grad(grad(decorator(f)))(tf.constant(X)).numpy() == 7 * X


# --- Outputs and their uses -----------------------------------------------------------------------


@eager_and_function
def test_the_output_of_an_op_inside_and_what_f_made_of_it(mode: Any) -> None:
    @cgshim.op_custom_gradient
    def op(x: Any) -> Any:
        z = square(x)
        w = z * 2.0
        return (z, w), lambda u, v: u * 3.0 + v * 11.0 * x

    assert mode(grad(lambda x: op(x)[1]))(tf.constant(X)).numpy() == 11 * X
    assert mode(grad(lambda x: op(x)[0] * x))(tf.constant(X)).numpy() == 3 * X + X * X


def test_a_gradient_that_dies_takes_no_derivative_with_it() -> None:
    """A tape counts uses: a second order counts the uses of an output that f read again."""

    @cgshim.op_custom_gradient
    def op(x: Any, w: Any) -> Any:
        y = tf.exp(x) * w
        tf.debugging.check_numerics(y, "y")
        tf.reduce_sum(y * 2)
        return y, lambda u: (5 * u * y, 7 * u * y)

    x, w = tf.constant(X), tf.constant(1.0)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape(persistent=True) as inner:
            inner.watch([x, w])
            y = op(x, w)
        for _ in range(3):
            first = inner.gradient(y, x)
        del inner
    np.testing.assert_allclose(outer.gradient(first, x), 25 * np.exp(X), rtol=1e-5)
