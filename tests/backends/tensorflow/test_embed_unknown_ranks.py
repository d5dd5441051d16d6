"""op_embed_gradient in graphs that do not know how many axes a tensor has."""

import numpy as np
import pytest
import tensorflow as tf

from cgshim import CustomGradientValueError, op_embed_gradient


def gradient(fn):
    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def of(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = fn(x)
        return tape.gradient(value, x)

    return of(tf.constant([1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    ("gx", "expected"),
    [(lambda x: 7.0 * x, [21.0, 42.0, 63.0]), (lambda x: 7.0, [21.0, 21.0, 21.0])],
)
def test_a_scalar_value(gx, expected):
    np.testing.assert_allclose(gradient(lambda x: 3.0 * op_embed_gradient(5.0, gx(x), x)), expected)


def test_a_batch_of_values_is_refused():
    with pytest.raises(
        CustomGradientValueError,
        match=r"^op_embed_gradient: fx must be a scalar or one value for each leading index",
    ):
        gradient(lambda x: op_embed_gradient(x, 7.0 * x, x))
