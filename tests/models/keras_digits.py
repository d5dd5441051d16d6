"""Train a Keras model with an op inside on scikit-learn's digits for one epoch; print its loss, and
what an op says of a symbolic tensor.

python keras_digits.py BACKEND, where numpy stands for the same model written out by hand over
cgshim's NumPy backend: Keras itself cannot train there.
"""

import importlib.util
import os
import sys

import numpy as np

from cgshim import BackendError, op_custom_gradient, op_value_and_grad, ops

HIDDEN, CLASSES, BATCH, RATE = 16, 10, 64, 0.1


@op_custom_gradient
def stretched(x):
    """The identity, with a rule that makes the gradient 3 times as large: it trains otherwise than
    the identity.
    """
    return x * 1.0, lambda upstream: 3.0 * upstream


def affine_rule(x, w, upstream):
    """Gradients of x @ w + b: those of w and b are 2 and 5 times as large."""
    of_x, of_w = ops.matmul(upstream, ops.transpose(w)), ops.matmul(ops.transpose(x), upstream)
    return of_x, 2.0 * of_w, 5.0 * ops.sum(upstream, axis=0)


@op_custom_gradient
def affine(x, w, b):
    return ops.matmul(x, w) + b, lambda upstream: affine_rule(x, w, upstream)


def data():
    from sklearn.datasets import load_digits  # 3 s, which only these tests take

    x, labels = load_digits(return_X_y=True)
    count = len(x) // BATCH * BATCH
    return (x[:count] / 16).astype("float32"), np.eye(CLASSES, dtype="float32")[labels[:count]]


def weights():
    rng = np.random.default_rng(0)
    shapes = [(64, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)]
    return [(0.3 * rng.normal(size=shape)).astype("float32") for shape in shapes]


def losses_of_keras():
    import keras

    class Affine(keras.layers.Layer):
        """`affine`, whose op declares the weights that it captures."""

        def build(self, shape):
            self.w = self.add_weight(shape=(shape[-1], HIDDEN), name="w")
            self.b = self.add_weight(shape=(HIDDEN,), name="b")

        @op_custom_gradient(variables=lambda self: {"w": self.w, "b": self.b})
        def call(self, x):
            def grad(upstream, variables):
                of_x, of_w, of_b = affine_rule(x, variables["w"], upstream)
                return of_x, {"w": of_w, "b": of_b}

            return ops.matmul(x, self.w.value) + self.b.value, grad

    class Stretched(keras.layers.Layer):
        def call(self, x):
            return stretched(ops.tanh(x))

    model = keras.Sequential(
        [keras.Input((64,)), Affine(), Stretched(), keras.layers.Dense(CLASSES)]
    )
    model.set_weights(weights())
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(RATE), loss)
    history = model.fit(*data(), batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    return history.history["loss"]


def losses_by_hand():
    def loss(parameters, x, y):
        w, b, v, c = parameters
        logits = ops.matmul(stretched(ops.tanh(affine(x, w, b))), v) + c
        return ops.mean(ops.log(ops.sum(ops.exp(logits), axis=1)) - ops.sum(logits * y, axis=1))

    parameters, found = weights(), []
    x, y = data()
    for start in range(0, len(x), BATCH):
        batch = slice(start, start + BATCH)
        value, gradients = op_value_and_grad(loss)(parameters, x[batch], y[batch])
        parameters = [p - RATE * g for p, g in zip(parameters, gradients, strict=True)]
        found.append(float(value))
    return [float(np.mean(found))]


def error_of_a_symbolic_tensor():
    import keras

    try:
        return stretched(keras.Input((3,)))
    except BackendError as error:
        return error


if __name__ == "__main__":
    backend = sys.argv[1]
    os.environ["KERAS_BACKEND"] = backend
    print("loss:", *(losses_by_hand() if backend == "numpy" else losses_of_keras()))
    if importlib.util.find_spec("keras"):
        print("symbolic:", error_of_a_symbolic_tensor())
