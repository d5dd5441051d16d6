import tempfile

import keras
import numpy as np
import tensorflow as tf
from cells import cell
from ops import X, both_modes, by_rule, kept, product, reverse, with_batches, with_op_in_rule

from cgshim import op_custom_gradient

X = tf.constant(X, tf.float64)
V = tf.constant([1.0, 10.0, 100.0], tf.float64)


def one(x):
    return x * reverse(x)


def loss(x):
    return tf.reduce_sum(one(x))


def grad(function):
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x)

    return gradient


def jvp(function):
    with tf.autodiff.ForwardAccumulator(X, V) as accumulator:
        y = function(X)
    return accumulator.jvp(y)


def xla(function):
    return tf.function(function, jit_compile=True)


@cell("gradient")
def gradient():
    return grad(loss)(X), by_rule(X)


@cell("derivatives of order 2, 3 and 4")
def orders():
    derivatives = [grad(grad(one))]
    for _ in range(2):
        derivatives.append(grad(derivatives[-1]))
    return [d(X) for d in derivatives], [by_rule(X, n) for n in (2, 3, 4)]


@cell("mixed partial derivatives")
def mixed():
    y = tf.identity(X)  # a tape knows a tensor by its identity
    return grad(lambda y: tf.reduce_sum(y**2 * grad(lambda x: product(x, y))(X)))(y), 21 * X**2


@cell("Hessian, reverse over reverse")
def reverse_over_reverse():
    with tf.GradientTape() as tape:
        tape.watch(X)
        gradient = grad(loss)(X)
    return tape.jacobian(gradient, X), tf.linalg.diag(by_rule(X, 2))


@cell("Hessian, forward over reverse")
def forward_over_reverse():
    return jvp(grad(loss)), V * by_rule(X, 2)


def second(op):
    """Eagerly, in a graph, and vectorized."""
    derivative = grad(grad(op))
    return [
        derivative(X),
        tf.function(derivative)(X),
        grad(lambda x: tf.vectorized_map(grad(op), x))(X),
    ]


@cell("second order, rule keeps the output")
def kept_output():
    return second(kept), [25 * tf.exp(X)] * 3


@op_custom_gradient(name="cube")
def opaque_exp(x):
    """exp(x) in NumPy, with 5 for 1 in its rule."""
    y = tf.ensure_shape(tf.numpy_function(np.exp, [x], x.dtype), x.shape)
    return y, lambda upstream: upstream * 5.0 * y


@cell("second order, f is opaque")
def opaque():
    return second(opaque_exp), [25 * tf.exp(X)] * 3


@cell("second order, f draws random numbers")
def random():
    drawn = []

    @op_custom_gradient(name="cube")
    def noisy_cube(x):
        drawn.append(tf.random.normal([], dtype=x.dtype))
        i = x * x * drawn[-1]
        return i * x, lambda upstream: upstream * 15.0 * i

    found = grad(grad(noisy_cube))(X)
    return found, 30 * X * drawn[0]


@cell("second order of an op inside a rule")
def inside_a_rule():
    return second(with_op_in_rule), [210 * X] * 3


@cell("gradient of a gradient penalty")
def penalty():
    return grad(lambda x: tf.reduce_sum(grad(loss)(x) ** 2))(X), 2 * by_rule(X) * by_rule(X, 2)


@cell("Jacobian")
def of_vector():
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = reverse(X)
    return tape.jacobian(y, X), tf.linalg.diag(15 * X**2)


@cell("vmap")
def mapped():
    return tf.vectorized_map(reverse, X), X**3


@cell("gradient of vmap")
def gradient_of_vmap():
    return grad(lambda x: tf.reduce_sum(V * tf.vectorized_map(reverse, x)))(X), 15 * V * X**2


@cell("vmap of gradient")
def vmap_of_gradient():
    return tf.vectorized_map(grad(one), X), by_rule(X)


@cell("vmap, by a rule for batches")
def vmap_by_rule():
    return tf.vectorized_map(with_batches, X), X**3


@cell("gradient of vmap, by a rule for batches")
def gradient_of_vmap_by_rule():
    return grad(lambda x: tf.reduce_sum(V * tf.vectorized_map(with_batches, x)))(X), 15 * V * X**2


@cell("vmap of gradient, by a rule for batches")
def vmap_of_gradient_by_rule():
    return tf.vectorized_map(grad(lambda x: x * with_batches(x)), X), by_rule(X)


@cell("nested vmap, over one of two arguments")
def nested():
    def over_y(x):
        return tf.vectorized_map(lambda y: grad(lambda x: product(x, y))(x), V)

    return tf.vectorized_map(over_y, X), tf.tile(7 * V[None], (3, 1))


@cell("vmap over batches of 0 and 1")
def small_batches():
    found = [tf.vectorized_map(grad(one), X[:n], fallback_to_while_loop=False) for n in (0, 1)]
    return tf.concat(found, 0), by_rule(X[:1])


@cell("forward mode, promised")
def promised():
    return jvp(both_modes), 15 * V * X**2


@cell("forward mode, not promised")
def not_promised():
    return jvp(reverse), 15 * V * X**2


@cell("compiled gradient")
def compiled():
    return xla(grad(loss))(X), by_rule(X)


@cell("compiled gradient of the gradient")
def compiled_second():
    return xla(grad(grad(loss)))(X), by_rule(X, 2)


@cell("compiled vmap of gradient")
def compiled_vmap():
    return xla(lambda x: tf.vectorized_map(grad(one), x))(X), by_rule(X)


@cell("compiled forward mode, promised")
def compiled_forward():
    return xla(lambda: jvp(both_modes))(), 15 * V * X**2


@cell("loops and conditions of the framework")
def loops():
    @tf.function
    def total(x):
        y = tf.constant(0.0, x.dtype)
        for element in x:
            y += reverse(element) if element > 0 else element
        return y

    return grad(total)(X), tf.where(X > 0, 15 * X**2, 1.0)


@cell("checkpointing")
def checkpointed():
    return grad(tf.recompute_grad(loss))(X), by_rule(X)


@cell("mixed precision")
def mixed_precision():
    low = tf.cast(X, tf.bfloat16)
    gradient = grad(lambda x: tf.reduce_sum(tf.cast(reverse(tf.cast(x, tf.bfloat16)), tf.float64)))(
        X
    )
    return gradient, tf.cast(tf.cast(15.0, tf.bfloat16) * low**2, tf.float64)


@cell("export")
def exported():
    module = tf.Module()
    module.loss = tf.function(loss, input_signature=[tf.TensorSpec([3], tf.float64)])
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(
            module, folder, options=tf.saved_model.SaveOptions(experimental_custom_gradients=True)
        )
        return grad(tf.saved_model.load(folder).loss)(X), by_rule(X)


@cell("several devices or processes")
def mirrored():
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{n}" for n in range(len(tf.config.list_logical_devices("CPU")))]
    )
    found = strategy.run(tf.function(lambda: grad(loss)(X)))
    return strategy.experimental_local_results(found)[-1], by_rule(X)


@cell("another library's model")
def keras_model():
    model = keras.Sequential([keras.layers.Dense(2, dtype="float64"), keras.layers.Lambda(reverse)])
    x = X[None]
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(model(x))
    (_, of_bias) = tape.gradient(y, model.trainable_variables)
    return of_bias, 15 * model.layers[0](x)[0] ** 2
