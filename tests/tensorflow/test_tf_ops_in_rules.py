"""An op that is called while a rule runs: what it captures is differentiated as anywhere else."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import every_mode, function, grad, jvp, square

import cgshim

CAPTURED = "inner: f must be given every tensor that is differentiated"


@cgshim.op_custom_gradient
def captures_x(x: Any) -> Any:
    def rule(upstream: Any) -> Any:
        inner = cgshim.op_custom_gradient(
            lambda z: (z * 3 * x * x, lambda u: u * 3 * x * x), name="inner"
        )
        return upstream * inner(tf.ones_like(x))

    return x * x * x, rule


@every_mode
def test_an_inner_op_that_captures_x_is_refused_where_x_is_differentiated(mode: Any) -> None:
    assert mode(grad(captures_x))(tf.constant(2.0)).numpy() == 12
    for outer in (grad, lambda fn: jvp(fn, 1.0)):
        with pytest.raises(cgshim.CustomGradientTypeError, match=CAPTURED):
            mode(outer(grad(captures_x)))(tf.constant(2.0))


@pytest.mark.parametrize("around", [lambda fn: function(grad(fn)), lambda fn: grad(function(fn))])
def test_an_inner_op_that_captures_the_argument_of_a_branch(around: Any) -> None:
    branch = lambda x: tf.cond(x > 0, lambda: captures_x(x), lambda: x)
    assert around(branch)(tf.constant(2.0)).numpy() == 12


@every_mode
def test_an_inner_op_with_variables_is_given_x(mode: Any) -> None:
    @cgshim.op_custom_gradient
    def cube(x: Any) -> Any:
        def inner(z: Any) -> Any:
            return z * 3 * x * x, lambda u, variables: (u * 3 * x * x, [u * z * 30 * x])

        return (
            x * x * x,
            lambda upstream: upstream * cgshim.op_custom_gradient(inner)(tf.ones_like(x)),
        )

    assert mode(grad(grad(cube)))(tf.constant(2.0)).numpy() == 60


@every_mode
def test_an_inner_op_with_a_variable(mode: Any) -> None:
    w = tf.Variable(2.0)

    @cgshim.op_custom_gradient
    def scale(x: Any) -> Any:
        inner = cgshim.op_custom_gradient(
            lambda u: (u * w, lambda v, variables: (v * w, [v * u * 5]))
        )
        return x * w, lambda upstream, variables: (inner(upstream), [upstream * x])

    def mixed(x: Any) -> Any:
        with tf.GradientTape() as tape:
            gradient = grad(scale)(x) * 7
        return tape.gradient(gradient, w)

    assert mode(mixed)(tf.constant(3.0)).numpy() == 35


def checkpoint(fn: Any) -> Any:
    """fn again while the rule runs, on a tape of the rule's own."""

    @cgshim.op_custom_gradient
    def op(x: Any) -> Any:
        def rule(upstream: Any, variables: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch([x, *[v for v in variables if not isinstance(v, tf.Variable)]])
                y = fn(x)
            of_x, *of_variables = tape.gradient(y, [x, *variables], output_gradients=upstream)
            return of_x, of_variables

        return tf.stop_gradient(fn(x)), rule

    return op


@every_mode
@pytest.mark.parametrize("make", [tf.Variable, tf.constant], ids=["variable", "tensor"])
def test_a_checkpoint_written_as_an_op(make: Any, mode: Any) -> None:
    w = make(3.0)
    scaled = cgshim.op_custom_gradient(
        lambda x: (x * w, lambda u, variables: (u * 5, [u * x for _ in variables]))
    )

    def gradients(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x] if make is tf.Variable else [x, w])
            y = checkpoint(lambda x: tf.square(scaled(x)))(x)
        return tape.gradient(y, [x, w])

    of_x, of_w = mode(gradients)(tf.constant(2.0))
    assert (of_x.numpy(), of_w.numpy()) == (2 * 6 * 5, 2 * 6 * 2)


PRODUCTS = {"x first": lambda x, y: x * y, "x last": lambda x, y: y * x}


def second_of(product: Any, watched: str) -> Any:
    """The second derivative of an op whose rule gives x alone to an op that captures a product of x
    and y.
    """

    @cgshim.op_custom_gradient
    def op(x: Any, y: Any) -> Any:
        i = product(x, y)
        inner = cgshim.op_custom_gradient(lambda z: (i, lambda u: u * 100), name="inner")
        return i * x, lambda upstream: (upstream * inner(x), None)

    def second(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x if watched == "x" else [x, y])
            gradient = grad(lambda x: op(x, y))(x)
        return tape.gradient(gradient, x)

    return second


@every_mode
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_a_residual_that_depends_on_what_the_inner_op_is_not_given(product: Any, mode: Any) -> None:
    x, y = tf.constant(2.0), tf.constant(3.0)
    assert mode(second_of(product, "x"))(x, y).numpy() == 100
    with pytest.raises(cgshim.CustomGradientTypeError, match=CAPTURED):
        mode(second_of(product, "x and y"))(x, y)


def test_an_inner_op_that_captures_what_a_function_is_given_has_nan_for_it() -> None:
    """Nobody knows, while a function is traced, whether its arguments will be differentiated."""

    def first(x: Any, c: Any) -> Any:
        inner = cgshim.op_custom_gradient(lambda u: (u * c, lambda v: v * 7 * c))
        return grad(
            cgshim.op_custom_gradient(lambda x: (x * x, lambda upstream: x * inner(upstream)))
        )(x)

    x, c = tf.constant(2.0), tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch([x, c])
        y = function(first)(x, c)
    of_x, of_c = tape.gradient(y, [x, c])
    assert (y.numpy(), of_x.numpy()) == (6, 3)
    assert np.isnan(of_c)


@every_mode
def test_what_the_rules_own_tape_watches_is_differentiated(mode: Any) -> None:
    @cgshim.op_custom_gradient
    def op(x: Any) -> Any:
        def rule(upstream: Any) -> Any:
            z = 3 * x
            inner = cgshim.op_custom_gradient(lambda x: (x * z, lambda u: u * z), name="inner")
            with tf.GradientTape() as tape:
                tape.watch(z)
                y = inner(x)
            return upstream * tape.gradient(y, z)

        return x * x, rule

    with pytest.raises(cgshim.CustomGradientTypeError, match=CAPTURED):
        mode(grad(op))(tf.constant(2.0))


@every_mode
@pytest.mark.parametrize(
    "outer", [lambda op: grad(op), lambda op: grad(grad(op))], ids=["first order", "second order"]
)
def test_what_op_vjp_differentiates_in_a_rule_is_differentiated(outer: Any, mode: Any) -> None:
    """Though it was made of x, which the inner op is given."""

    @cgshim.op_custom_gradient
    def op(x: Any) -> Any:
        def of(z: Any) -> Any:
            return cgshim.op_custom_gradient(lambda x: (x * z, lambda u: u * z), name="inner")(x)

        return x * x, lambda upstream: upstream * cgshim.op_vjp(of, 3 * x)[1](tf.ones_like(x))[0]

    with pytest.raises(cgshim.CustomGradientTypeError, match=CAPTURED):
        mode(outer(op))(tf.constant(2.0))


# TensorFlow captures small tensors in another way than large ones
@pytest.mark.parametrize("size", [1, 1000])
def test_an_inner_op_that_captures_an_eager_tensor_in_a_function(size: int) -> None:
    c = tf.fill([size], 3.0)

    @cgshim.op_custom_gradient
    def op(x: Any) -> Any:
        inner = cgshim.op_custom_gradient(lambda u: (u * c[0], lambda v: v * 7))
        return x * x, lambda upstream: inner(upstream) * x

    assert function(grad(op, of=lambda y: y * 5))(tf.constant(2.0)).numpy() == 5 * 3 * 2


@every_mode
def test_upstream_is_not_captured_either(mode: Any) -> None:
    @cgshim.op_custom_gradient
    def op(x: Any) -> Any:
        def rule(upstream: Any) -> Any:
            inner = cgshim.op_custom_gradient(
                lambda z: (z * 3 * upstream, lambda u: u * 5 * upstream), name="inner"
            )
            return inner(x)

        return x * x, rule

    assert mode(grad(op))(tf.constant(2.0)).numpy() == 6
    assert mode(grad(grad(op, of=lambda y: y * 7)))(tf.constant(2.0)).numpy() == 35
    with pytest.raises(cgshim.CustomGradientTypeError, match=CAPTURED):
        mode(grad(grad(op, of=tf.square)))(tf.constant(2.0))


@every_mode
def test_what_an_accumulator_computes_is_not_captured(mode: Any) -> None:
    twice = lambda x: square(2 * x)
    for outer in (grad, lambda fn: jvp(fn, 1.0)):
        assert mode(outer(jvp(twice, 1.0)))(tf.constant(3.0)).numpy() == 2 * 2 * 7

    @cgshim.op_custom_gradient
    def op(x: Any) -> Any:
        return (
            x * x,
            lambda u, variables=(): (
                (u * 7 * x, [None for _ in variables]) if variables else u * 7 * x
            ),
        )

    assert mode(jvp(op, 3.0))(tf.constant(2.0)).numpy() == 42


def _plus(read: Any, x: Any) -> Any:
    return x + read(), lambda upstream: upstream


def test_threads_see_what_they_capture_each() -> None:
    missed: list[int] = []

    def work() -> None:
        for _ in range(20):
            x, c = tf.constant(2.0), tf.constant(3.0)
            add = functools.partial(tf.py_function, lambda c: c, [c], x.dtype)
            op = cgshim.op_custom_gradient(functools.partial(_plus, add))
            with tf.GradientTape() as tape:
                tape.watch([x, c])
                try:
                    op(x)
                except cgshim.CustomGradientTypeError:
                    continue
                missed.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not missed


# --- Rules that say "not differentiable" ----------------------------------------------------------


class NotDifferentiableError(Exception):
    """The author's own."""


@cgshim.op_custom_gradient
def forbidden(x: Any) -> Any:
    def rule(upstream: Any) -> Any:
        raise NotDifferentiableError("not here")

    return x * x, rule


@every_mode
def test_a_rule_that_raises_does_so_when_a_gradient_is_taken(mode: Any) -> None:
    x = tf.constant([2.0, 3.0])
    forward = {
        "call": forbidden,
        "vectorized_map": lambda x: tf.vectorized_map(forbidden, x),
        "map_fn": lambda x: tf.map_fn(forbidden, x),
        "an accumulator of another tensor": lambda x: jvp(lambda z: z * forbidden(x), [1.0, 1.0])(
            tf.constant([0.0, 0.0])
        ),
    }
    for fn in forward.values():
        assert mode(fn)(x).numpy().tolist() == [4, 9]
    for transform in (grad(forbidden), grad(forward["vectorized_map"]), jvp(forbidden, [1.0, 1.0])):
        with pytest.raises(NotDifferentiableError, match="not here"):
            mode(transform)(x)
