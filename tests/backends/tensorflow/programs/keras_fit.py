"""An op inside a Keras layer: fit, and mixed precision."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import cgshim

assert keras.backend.backend() == "tensorflow"
dtypes = set()


@cgshim.op_custom_gradient
def matmul(x: Any, w: Any) -> Any:
    dtypes.add((x.dtype.name, w.dtype.name))
    return x @ w, lambda upstream: (upstream @ tf.transpose(w), 2 * tf.transpose(x) @ upstream)


class Linear(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=(shape[-1], 1), initializer="ones")

    def call(self, x: Any) -> Any:
        return matmul(x, self.w)


def trained(loss: Any = "mse", **options: Any) -> Any:
    """The weights after one step: the gradient of the mean of (x w - y) ** 2, doubled by the rule."""
    model = keras.Sequential(
        [keras.Input((2,)), Linear(), keras.layers.Activation("linear", dtype="float32")]
    )
    model.compile(keras.optimizers.SGD(0.125), loss, **options)
    model.fit(np.array([[1.0, 2.0]]), np.array([[1.0]]), epochs=1, verbose=0)
    return model.layers[0].w.numpy().ravel().tolist()


for options in ({}, {"run_eagerly": True}, {"jit_compile": True}):
    dtypes.clear()
    assert trained(**options) == [1 - 0.125 * 2 * 4, 1 - 0.125 * 2 * 8], options
    assert dtypes == {("float32", "float32")}

loss = cgshim.op_custom_gradient(
    lambda y, found: (tf.reduce_mean((y - found) ** 2), lambda u: (None, u * 6 * (found - y)))
)
assert trained(loss) == [1 - 0.125 * 3 * 2 * 4, 1 - 0.125 * 3 * 2 * 8]  # a rule with 6 for 2

keras.config.set_dtype_policy("mixed_float16")
dtypes.clear()
layer = Linear()
x = tf.constant([[1.0, 2.0]])
with tf.GradientTape() as tape:
    y = layer(x)
gradient = tape.gradient(y, layer.w.value)
assert y.dtype == tf.float16
assert gradient.dtype == tf.float32
assert gradient.numpy().ravel().tolist() == [2, 4]
assert dtypes == {("float16", "float16")}
print("fitted")
