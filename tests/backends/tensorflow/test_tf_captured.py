"""What f reads without being given it: variables arrive, what is differentiated is refused, the
rest is constant.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import eager_and_function, every_mode, function, grad

import cgshim

X, V = [2.0, -3.0], [1.0, 10.0]
CAPTURED = (
    "scale: grad_fn must take variables when f reads trainable state, got <lambda>(u) and f32[]; "
    "write grad_fn(..., variables=None) and return (gradients, [one per variable]), or pass the "
    "state as an argument"
)


@every_mode
def test_weights_of_a_line(mode: Any) -> None:
    w = tf.Variable([1.0, 1.0])

    @cgshim.op_custom_gradient
    def line(x: Any) -> Any:
        def rule(upstream: Any, variables: Any) -> Any:
            assert variables[0] is w
            return upstream * w[1], [
                tf.stack([tf.reduce_sum(upstream * x**1), tf.reduce_sum(upstream * x**0)])
            ]

        return w[1] * x + w[0], rule

    def gradients(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = line(x)
        return y, *tape.gradient(y, [x, w])

    y, dx, dw = mode(gradients)(tf.constant([1.0, 2.0, 3.0]))
    assert [t.numpy().tolist() for t in (y, dx, dw)] == [[2, 3, 4], [1, 1, 1], [6, 3]]


@eager_and_function
def test_variables_that_grad_fn_does_not_take(mode: Any) -> None:
    w = tf.Variable(2.0)
    scale = cgshim.op_custom_gradient(lambda x: (x * w, lambda u: u), name="scale")
    with pytest.raises(
        cgshim.CustomGradientTypeError, match="scale: grad_fn must take variables when f reads"
    ):
        mode(grad(scale))(tf.constant(1.0))


@every_mode
def test_a_variable_as_argument(mode: Any) -> None:
    w = tf.Variable(3.0)
    scale = cgshim.op_custom_gradient(lambda x, w: (x * w, lambda u: (u * 7, u * 11)))

    def gradients(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = scale(x, w=w) * 5
        return tape.gradient(y, w)

    assert mode(gradients)(tf.constant(2.0)).numpy() == 55


def _scale_by(c: Any) -> Any:
    return cgshim.op_custom_gradient(lambda x: (x * c, lambda u: u * c * 7), name="scale")


@eager_and_function
def test_a_captured_tensor_that_is_differentiated_is_refused(mode: Any) -> None:
    def gradient(x: Any, c: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, c])
            y = _scale_by(tf.square(c))(x)
        return tape.gradient(y, x)

    with pytest.raises(cgshim.CustomGradientTypeError) as error:
        mode(gradient)(tf.constant(2.0), tf.constant(3.0))
    assert str(error.value) == CAPTURED


# TensorFlow captures small tensors in another way than large ones
@pytest.mark.parametrize("size", [1, 1000])
def test_an_eager_tensor_that_a_function_captures_is_refused(size: int) -> None:
    c = tf.fill([size], 3.0)

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, c])
            y = _scale_by(c)(x)
        return tape.gradient(y, x)

    with pytest.raises(cgshim.CustomGradientTypeError, match="as an argument"):
        function(gradient)(tf.constant(2.0))


@eager_and_function
@pytest.mark.parametrize(
    "f",
    [
        lambda c: c,
        lambda c: function(lambda x: x * c),
        lambda c: lambda x: tf.cond(x > 0, lambda: c, lambda: x),
        lambda c: lambda x: tf.vectorized_map(lambda y: y * c, x[None])[0],
    ],
)
def test_captured_however_f_reads_it(f: Any, mode: Any) -> None:
    def gradient(x: Any, c: Any) -> Any:
        reads = f(c)
        op = cgshim.op_custom_gradient(
            lambda x: (reads(x) if callable(reads) else reads, lambda u: u), name="op"
        )
        with tf.GradientTape() as tape:
            tape.watch([x, c])
            y = op(x) * x
        return tape.gradient(y, c)

    with pytest.raises(cgshim.CustomGradientTypeError, match="as an argument"):
        mode(gradient)(tf.constant(2.0), tf.constant(3.0))


@every_mode
def test_tensors_made_in_a_vectorized_loop_are_not_captured(mode: Any) -> None:
    @cgshim.op_custom_gradient
    def halves(x: Any) -> Any:
        y = tf.vectorized_map(lambda row: row / 2, x)
        return y * y, lambda upstream: upstream * 7 * y

    second = mode(grad(grad(halves)))(tf.constant(X))
    np.testing.assert_allclose(mode(grad(halves))(tf.constant(X)), 3.5 * np.array(X))
    np.testing.assert_allclose(second, [3.5, 3.5])


@every_mode
def test_capturing_what_is_not_differentiated_is_fine(mode: Any) -> None:
    c = tf.constant(3.0)
    assert mode(grad(_scale_by(c)))(tf.constant(2.0)).numpy() == 21
    assert mode(grad(grad(_scale_by(tf.square(c)))))(tf.constant(2.0)) is None


def test_a_vjp_takes_what_was_made_of_a_variable_for_a_constant() -> None:
    w = tf.Variable(3.0)
    assert cgshim.op_grad(lambda x: _scale_by(2 * w)(x))(tf.constant(5.0)).numpy() == 42
    # which watches variables
    with tf.GradientTape(), pytest.raises(cgshim.CustomGradientTypeError) as error:
        cgshim.op_grad(lambda x: _scale_by(2 * w)(x))(tf.constant(5.0))
    assert str(error.value) == CAPTURED


def test_captured_in_a_function_differentiated_outside_is_nan() -> None:
    # which arguments of a tf.function will be differentiated is unknown while it is traced: the
    # gradient says so
    inner = function(lambda x, c: _scale_by(c)(x))
    x, c = tf.constant(2.0), tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch([x, c])
        y = inner(x, c)
    dx, dc = tape.gradient(y, [x, c])
    assert dx.numpy() == 21
    assert np.isnan(dc)


@eager_and_function
def test_a_tape_within_f_may_watch_what_it_likes(mode: Any) -> None:
    @cgshim.op_custom_gradient
    def solve(x: Any) -> Any:
        z = tf.constant(5.0)
        with tf.GradientTape() as tape:
            tape.watch(z)
            y = z * z
        return x * tape.gradient(y, z), lambda u: u * 7

    assert mode(grad(solve))(tf.constant(2.0)).numpy() == 7


def test_captured_in_a_function_inside_an_accumulator_is_nan() -> None:
    inner = function(lambda x, c: _scale_by(c)(x))
    x, c = tf.constant(2.0), tf.constant(3.0)
    for tangents, expected in (((5.0, 0.0), 5 * 21), ((5.0, 7.0), np.nan), ((0.0, 7.0), np.nan)):
        pairs = [
            (z, tf.constant(tangent))
            for z, tangent in zip((x, c), tangents, strict=True)
            if tangent
        ]
        with tf.autodiff.ForwardAccumulator(*map(list, zip(*pairs, strict=True))) as accumulator:
            y = inner(x, c)
        np.testing.assert_equal(accumulator.jvp(y).numpy(), np.float32(expected))


@pytest.mark.parametrize(
    "multiply", [lambda x, w: x * w, lambda x, w: w * x], ids=["behind", "before"]
)
def test_a_captured_tensor_of_a_graph_raises(multiply: Any) -> None:
    @tf.function
    def differentiated(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            read = w * 2.0
            op = cgshim.op_custom_gradient(
                lambda x: (multiply(x, read), lambda u: u * 7.0), name="op"
            )
            y = op(x)
        return tape.gradient(y, [x, w])

    with pytest.raises(cgshim.CustomGradientTypeError, match=r"^op: "):
        differentiated(tf.constant(X), tf.constant(V))
