"""No transformation may take autodiff's gradient: a rule of zeros for sin gives zeros everywhere,
and never cos.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import (
    eager_and_function,
    every_mode_with_autograph,
    grad,
    jacobian,
    jvp,
    square,
    vectorized,
)

import cgshim


@cgshim.op_custom_gradient(forward_mode=True)
def flat_sin(x: Any) -> Any:
    return tf.sin(x), lambda upstream: upstream * 0


def batch_jacobian(fn: Any) -> Any:
    def of(x: Any) -> Any:
        x = x[:, None]
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fn(x)
        return tape.batch_jacobian(y, x)[:, 0, 0]

    return of


TANGENT = [1.0, 1.0, 1.0]
TRANSFORMATIONS: dict[str, Any] = {
    "tape": grad,
    "tape of vectorized_map": lambda fn: grad(vectorized(fn)),
    "tape of vectorized_map of tf.function": lambda fn: grad(vectorized(tf.function(fn))),
    "tape of vectorized_map of vectorized_map": lambda fn: grad(
        lambda x: vectorized(vectorized(fn))(x[:, None])[:, 0]
    ),
    "vectorized_map of tape": lambda fn: vectorized(grad(fn)),
    "tape of map_fn": lambda fn: grad(lambda x: tf.map_fn(fn, x)),
    "tape of tf.function": lambda fn: grad(tf.function(fn)),
    "tape of recompute_grad": lambda fn: grad(tf.recompute_grad(fn)),
    "jacobian": jacobian,
    "batch_jacobian": batch_jacobian,
    "jacobian of vectorized_map": lambda fn: jacobian(vectorized(fn)),
    "ForwardAccumulator": lambda fn: jvp(fn, TANGENT),
    "ForwardAccumulator of tf.function": lambda fn: jvp(tf.function(fn), TANGENT),
    "ForwardAccumulator of vectorized_map": lambda fn: jvp(vectorized(fn), TANGENT),
    "vectorized_map of ForwardAccumulator": lambda fn: vectorized(jvp(fn, 1.0)),
    "op_grad": lambda fn: cgshim.op_grad(lambda x: tf.reduce_sum(fn(x))),
}
every_transformation = pytest.mark.parametrize(
    "transform", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS
)


@every_mode_with_autograph
@every_transformation
def test_the_rule_is_never_dropped(transform: Any, mode: Any) -> None:
    x = tf.constant([0.1, 0.2, 0.3])
    assert np.allclose(flat_sin(x), np.sin(x))
    assert not np.any(mode(transform(flat_sin))(x))
    assert np.array_equal(mode(transform(square))(x), 7 * x)


@eager_and_function
def test_vectorized_map_within_vectorized_map(mode: Any) -> None:
    cube = cgshim.op_custom_gradient(lambda x: (x**3, lambda upstream: upstream * 7 * x))
    x = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    gradient = grad(lambda x: vectorized(vectorized(cube))(x))
    assert np.array_equal(mode(gradient)(x), 7 * x)
    assert np.array_equal(mode(grad(gradient))(x), tf.fill([2, 3], 7.0))


@pytest.mark.parametrize("size", [0, 1])
def test_batches_of_none_and_of_one(size: int) -> None:
    x = tf.fill([size], 3.0)
    assert np.array_equal(tf.convert_to_tensor(grad(vectorized(square))(x)), [21.0] * size)


def test_vectorized_map_over_one_of_two_arguments() -> None:
    @cgshim.op_custom_gradient
    def scaled(x: Any, k: Any) -> Any:
        return x * k, lambda upstream: (upstream * 7, upstream * 11 * x)

    k = tf.constant(5.0)
    with tf.GradientTape() as tape:
        tape.watch(k)
        y = vectorized(lambda x: scaled(x, k))(tf.constant([2.0, 3.0])) * [1.0, 10.0]
    assert tape.gradient(y, k).numpy() == 11 * (2 + 30)


def test_per_sample_gradients_of_a_variable() -> None:
    w = tf.Variable(3.0)

    @cgshim.op_custom_gradient
    def scaled(x: Any) -> Any:
        return x * w, lambda upstream, variables: (upstream * 7, [upstream * 11 * x])

    def per_sample(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = scaled(x) * 2
        return tape.gradient(y, w)

    x = tf.constant([2.0, 3.0])
    assert vectorized(per_sample)(x).numpy().tolist() == [44, 66]
    with tf.GradientTape() as tape:
        y = vectorized(scaled)(x) * 2
    assert tape.gradient(y, w).numpy() == 110


@eager_and_function
def test_a_rule_that_gives_no_gradient(mode: Any) -> None:
    constant = cgshim.op_custom_gradient(lambda x: (tf.sin(x), lambda upstream: (None,)))
    gradient = mode(grad(lambda x: vectorized(constant)(x) + x * x))(tf.constant([2.0, 3.0]))
    assert gradient.numpy().tolist() == [4, 6]


@eager_and_function
def test_numpy_in_f_and_in_its_rule(mode: Any) -> None:
    def numpy(function: Any, x: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(function, [x], x.dtype), x.shape)

    @cgshim.op_custom_gradient
    def op(x: Any) -> Any:
        return numpy(
            np.square, x
        ), lambda upstream: upstream * numpy(lambda x: np.float32(7) * x, x)

    gradient = mode(grad(vectorized(op), of=lambda y: y * [1.0, 10.0]))(tf.constant([2.0, 3.0]))
    assert gradient.numpy().tolist() == [14, 210]


def test_a_loop_invariant_of_a_tf_function_raises() -> None:
    inner = tf.function(lambda x, k: square(k) * x)
    outer = lambda k: vectorized(lambda x: inner(x, k))(tf.constant([1.0, 2.0]))
    with pytest.raises(TypeError, match="out of scope"):  # as by hand
        grad(outer)(tf.constant(2.0))
