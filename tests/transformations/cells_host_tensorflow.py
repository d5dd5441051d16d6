import re
import tempfile

import tensorflow as tf
from cells import host_cell
from cells_tensorflow import grad, xla
from ops import X, by_rule

import cgshim

X = tf.constant(X, tf.float64)
V = tf.constant([1.0, 10.0, 100.0], tf.float64)


def one(op):
    return lambda x: x * op(x)


def loss(op):
    return lambda x: tf.reduce_sum(x * op(x))


def jvp(function):
    with tf.autodiff.ForwardAccumulator(X, V) as accumulator:
        y = function(X)
    return accumulator.jvp(y)


@host_cell("gradient")
def gradient(op):
    return grad(loss(op))(X), by_rule(X)


@host_cell("Jacobian")
def of_vector(op):
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = op(X)
    return tape.jacobian(y, X), tf.linalg.diag(15 * X**2)


@host_cell("second order")
def second(op):
    return grad(grad(loss(op)))(X), by_rule(X, 2)


@host_cell("second order, compiled")
def compiled_second(op):
    return tf.function(grad(grad(loss(op))))(X), by_rule(X, 2)


@host_cell("vmap")
def mapped(op):
    return tf.vectorized_map(op, X), X**3


@host_cell("gradient of vmap")
def gradient_of_vmap(op):
    return grad(lambda x: tf.reduce_sum(V * tf.vectorized_map(op, x)))(X), 15 * V * X**2


@host_cell("vmap of gradient")
def vmap_of_gradient(op):
    return tf.vectorized_map(grad(one(op)), X), by_rule(X)


@host_cell("forward mode, promised")
def promised(op):
    return jvp(op), 15 * V * X**2


@host_cell("Hessian, forward over reverse, promised")
def forward_over_reverse(op):
    return jvp(grad(loss(op))), V * by_rule(X, 2)


@host_cell("compiled")
def compiled(op):
    return tf.function(op)(X), X**3


@host_cell("compiled gradient")
def compiled_gradient(op):
    return tf.function(grad(loss(op)))(X), by_rule(X)


@host_cell("compiled vmap")
def compiled_vmap(op):
    return tf.function(lambda x: tf.vectorized_map(op, x))(X), X**3


@host_cell("compiled vmap of gradient")
def compiled_vmap_of_gradient(op):
    return tf.function(lambda x: tf.vectorized_map(grad(one(op)), x))(X), by_rule(X)


@host_cell("compiled forward mode, promised")
def compiled_forward(op):
    return tf.function(lambda: jvp(op))(), 15 * V * X**2


@host_cell("loops and conditions of the framework")
def loops(op):
    @tf.function
    def total(x):
        y = tf.constant(0.0, x.dtype)
        for element in x:
            y += op(element) if element > 0 else element
        return y

    return grad(total)(X), tf.where(X > 0, 15 * X**2, 1.0)


@host_cell("checkpointing")
def checkpointed(op):
    gradient = grad(tf.recompute_grad(loss(op)))
    return [gradient(X), tf.function(gradient)(X)], [by_rule(X)] * 2


@host_cell("mixed precision")
def mixed_precision(op):
    low = tf.cast(X, tf.bfloat16)
    gradient = grad(lambda x: tf.reduce_sum(tf.cast(op(tf.cast(x, tf.bfloat16)), tf.float64)))(X)
    return gradient, tf.cast(tf.cast(15.0, tf.bfloat16) * low**2, tf.float64)


@host_cell("export")
def exported(op):
    module = tf.Module()
    module.op = tf.function(op, input_signature=[tf.TensorSpec([3], tf.float64)])
    with tempfile.TemporaryDirectory() as folder:
        try:
            tf.saved_model.save(module, folder)
        except ValueError as error:  # TensorFlow puts its own around the refusal
            raise error.__cause__ or error from None
        return tf.saved_model.load(folder).op(X), X**3


@host_cell("several devices or processes")
def mirrored(op):
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{n}" for n in range(len(tf.config.list_logical_devices("CPU")))]
    )
    found = strategy.run(tf.function(lambda: grad(loss(op))(X)))
    return strategy.experimental_local_results(found)[-1], by_rule(X)


@host_cell("a pipeline of data")
def dataset(op):
    rows = tf.stack([n * X for n in range(3)])
    dataset = tf.data.Dataset.from_tensor_slices(rows).map(grad(loss(op)), num_parallel_calls=2)
    return list(dataset), by_rule(rows)


@host_cell("compiled by XLA")
def compiled_by_xla(op):
    try:
        return xla(op)(X), X**3
    except tf.errors.InvalidArgumentError as error:  # XLA has no such operation, and names it
        name = re.search(r"host_function_(\w+)_without_jit_compile", str(error)).group(1)
        message = f"{name}: XLA cannot call the host, says TensorFlow"
        raise cgshim.TransformationError(message) from None
