"""A WeakTensor, which is no tf.Tensor: the number of the rule, 7 x for x^2, and not autodiff's."""

import tensorflow as tf
import tensorflow.experimental.numpy as tnp

from cgshim import op_custom_gradient

tnp.experimental_enable_numpy_behavior(dtype_conversion_mode="all")


@op_custom_gradient
def square(x):
    return x * x, lambda upstream: 7.0 * upstream * x


x = tf.constant(3.0)
assert not isinstance(x, tf.Tensor)
with tf.GradientTape() as tape:
    tape.watch(x)
    y = 5.0 * square(x)
print(float(tape.gradient(y, x)))
