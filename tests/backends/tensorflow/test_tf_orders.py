"""Derivatives of every order, by tapes in tapes: through the rule, and through its residuals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import every_mode, grad, jvp, square

import cgshim


@cgshim.op_custom_gradient
def cube(x: Any) -> Any:
    i = x * x
    return i * x, lambda upstream: upstream * 3 * i


@every_mode
def test_four_orders(mode: Any) -> None:
    derivative = lambda x: cube(x) * x
    for expected in (32.0, 48.0, 48.0, 24.0):  # of x ** 4 at 2
        derivative = grad(derivative)
        assert mode(derivative)(tf.constant(2.0)).numpy() == expected


@every_mode
@pytest.mark.parametrize("outer", [grad, lambda fn: jvp(fn, 1.0)], ids=["reverse", "forward"])
def test_hessian_goes_through_the_rule_alone(mode: Any, outer: Any) -> None:
    # y = x * x by the rule 7x: the gradient of y * y is 2y * 7x, and its own is 2 * 7x * 7x + 2y *
    # 7
    assert (
        mode(outer(grad(square, of=tf.square)))(tf.constant(2.0)).numpy() == 2 * 14 * 14 + 2 * 4 * 7
    )


@every_mode
def test_mixed_partials(mode: Any) -> None:
    @cgshim.op_custom_gradient
    def product(x: Any, y: Any) -> Any:
        return x * y * y, lambda upstream: (upstream * y * y, tf.reduce_sum(upstream * 2 * x * y))

    def mixed(x: Any, y: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(y)
            with tf.GradientTape() as inner:
                inner.watch(x)
                z = product(x, y)
            gradient = inner.gradient(z, x)
        return outer.gradient(gradient, y)

    x = tf.constant([2.0, 3.0, 5.0])
    assert mode(mixed)(x, tf.constant(7.0)).numpy() == 2 * 7 * 3


@every_mode
def test_gradient_penalty(mode: Any) -> None:
    def penalty(w: Any) -> Any:
        x = tf.constant([1.0, 2.0])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = cube(x * w)
        return tf.reduce_sum(tf.square(tape.gradient(y, x)))  # (3 x**2 w**3) ** 2

    assert np.isclose(mode(grad(penalty))(tf.constant(2.0)), 6 * 9 * (1 + 16) * 2.0**5)


@every_mode
def test_nested_recipe_has_the_inner_rules_second_order(mode: Any) -> None:
    @cgshim.op_custom_gradient
    def fused(x: Any) -> Any:
        value, first = x * x * x, 3 * x * x

        def rule(upstream: Any) -> Any:
            @cgshim.op_custom_gradient
            def derivative(z: Any) -> Any:
                return first, lambda u: u * 100 * x

            return upstream * derivative(x)

        return value, rule

    assert mode(grad(fused))(tf.constant(2.0)).numpy() == 12
    assert mode(grad(grad(fused)))(tf.constant(2.0)).numpy() == 200


@every_mode
def test_persistent_tape_is_asked_twice(mode: Any) -> None:
    def twice(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = square(x)
            z = y * x
        return tape.gradient(z, x), tape.gradient(z, x, output_gradients=10.0), tape.gradient(z, y)

    assert [g.numpy() for g in mode(twice)(tf.constant(2.0))] == [32, 320, 2]


@every_mode
def test_jacobians(mode: Any) -> None:
    def jacobians(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = square(x)
        return tape.jacobian(y, x), tape.batch_jacobian(y, x)

    full, batch = mode(jacobians)(tf.constant([[2.0, 3.0], [5.0, 7.0]]))
    diagonals = np.array([[[14, 0], [0, 21]], [[35, 0], [0, 49]]])
    assert np.array_equal(batch, diagonals)
    assert np.array_equal(np.asarray(full)[[0, 1], :, [0, 1], :], diagonals)
    assert np.sum(full) == np.sum(diagonals)


@every_mode
def test_op_vjp_of_op_vjp(mode: Any) -> None:
    def second(x: Any) -> Any:
        def first(x: Any) -> Any:
            _, pullback = cgshim.op_vjp(square, x)
            return pullback(tf.constant([1.0, 10.0]))[0]

        _, pullback = cgshim.op_vjp(first, x)
        return *pullback(tf.constant([2.0, 3.0])), *pullback(tf.constant([4.0, 6.0]))

    once, doubled = mode(second)(tf.constant([5.0, 7.0]))
    assert once.numpy().tolist() == [14, 210]
    assert doubled.numpy().tolist() == [28, 420]
