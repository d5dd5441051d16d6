"""TensorFlow: the ops by tf.custom_gradient, and the uses of them."""

from __future__ import annotations

import math
from functools import partial

import tensorflow as tf

from benchmarks.ops import (
    cube,
    depth_of,
    innermost,
    nest,
    on_host,
    residual,
    solve_by_hand,
    three_outputs,
    tree,
)

tf.config.threading.set_intra_op_parallelism_threads(1)


def _static(x, kind, config, scale):
    assert kind == "cube"
    assert config is None

    @tf.custom_gradient
    def op(x):
        return scale * x * x * x, lambda upstream: 3 * scale * upstream * x * x

    return op(x)


@tf.custom_gradient
def _leaves(*tensors):
    return sum(tensors), lambda upstream: [7 * upstream for _ in tensors]


@tf.custom_gradient
def _nested(lists):
    x = innermost(lists)
    return x * x, lambda upstream: nest(2 * upstream * x, depth_of(lists))


@tf.custom_gradient
def _log1pexp(x):
    value = tf.maximum(x, 0.0) + tf.math.log1p(tf.exp(-tf.abs(x)))
    return value, lambda upstream: upstream / (1.0 + tf.exp(-x))


def kalman(observations, mean, covariance, transition, seen, noise, error):
    likelihood = 0.0
    for at in range(observations.shape[0]):
        mean = tf.linalg.matvec(transition, mean)
        covariance = transition @ covariance @ tf.transpose(transition) + noise
        of_seen = seen @ covariance
        expected = of_seen @ tf.transpose(seen) + error
        surprise = observations[at] - tf.linalg.matvec(seen, mean)
        gain = tf.transpose(tf.linalg.solve(expected, of_seen))
        solved = tf.linalg.solve(expected, surprise[:, None])[:, 0]
        weighed = tf.reduce_sum(surprise * solved)
        likelihood = likelihood - 0.5 * (weighed + tf.linalg.slogdet(expected)[1])
        mean = mean + tf.linalg.matvec(gain, surprise)
        covariance = covariance - gain @ of_seen
    return likelihood - 0.5 * math.log(2 * math.pi) * observations.shape[0] * 2, mean, covariance


FUNCTIONS = {
    "exp": lambda m, v: tf.exp(m),
    "add": lambda m, v: tf.add(m, v),
    "maximum": lambda m, v: tf.maximum(m, 0.0),
    "where": lambda m, v: tf.where(m > 1.0, m, v),
    "clip": lambda m, v: tf.clip_by_value(m, 0.7, 1.2),
    "power": lambda m, v: tf.pow(m, 2.0),
    "sum": lambda m, v: tf.reduce_sum(m),
    "sum_of_axis": lambda m, v: tf.reduce_sum(m, axis=0),
    "mean_of_axis": lambda m, v: tf.reduce_mean(m, axis=1),
    "max_of_axis": lambda m, v: tf.reduce_max(m, axis=1, keepdims=True),
    "reshape": lambda m, v: tf.reshape(m, (16, 64)),
    "transpose": lambda m, v: tf.transpose(m),
    "expand_dims": lambda m, v: tf.expand_dims(m, 0),
    "stack": lambda m, v: tf.stack([m, m]),
    "concatenate": lambda m, v: tf.concat([m, m], axis=1),
    "matmul": lambda m, v: tf.matmul(m, m),
    "outer": lambda m, v: v[:, None] * v[None, :],
    "einsum": lambda m, v: tf.einsum("ij,ij->i", m, m),
    "zeros_like": lambda m, v: tf.zeros_like(m),
    "softmax": lambda m, v: tf.nn.softmax(m),
}

BY_HAND = {
    **{f"ops.{name}": function for name, function in FUNCTIONS.items()},
    "log1pexp": _log1pexp,
    "kalman": kalman,
    "on_host": lambda x: tf.ensure_shape(tf.numpy_function(on_host, [x], x.dtype), x.shape),
    "solve": solve_by_hand,
    "cube": tf.custom_gradient(cube),
    "given_forward": tf.custom_gradient(cube),
    "residual": tf.custom_gradient(residual),
    "in_a_list": tf.custom_gradient(residual),
    "static": _static,
    "three_outputs": tf.custom_gradient(three_outputs),
    "tree": tf.custom_gradient(tree),
    "leaves": lambda tensors: _leaves(*tensors),
    "positional": _leaves,
    "method": tf.custom_gradient(cube),
    "nested": _nested,
}


def tensor(size):
    return tf.linspace(0.5, 1.5, size) if size > 1 else tf.constant(0.7)


def plain(op, *args):
    return lambda: op(*args)


def forward(op, x):
    def run():
        with tf.GradientTape() as tape:
            tape.watch(x)
            return op(x)

    return run


def gradient(op, first, *static):
    def run():
        with tf.GradientTape() as tape:
            tape.watch(first)
            outputs = op(first, *static)
        return tape.gradient(outputs, first)

    return run


def jvp(op, x):
    tangent = tf.ones_like(x)

    def run():
        with tf.autodiff.ForwardAccumulator(x, tangent) as accumulator:
            y = op(x)
        return accumulator.jvp(y)

    return run


def second_order(op, x):
    def run():
        with tf.GradientTape() as outer:
            outer.watch(x)
            first = gradient(op, x)()
        return outer.gradient(first, x)

    return run


def compiled(op, x):
    return _function(op, x)


def compiled_by_xla(op, x):
    return _function(op, x, jit_compile=True)


def _function(op, x, **options):
    run = tf.function(lambda x: gradient(op, x)(), **options)
    return lambda: run(x)


def compiled_plain(op, x):
    run = tf.function(lambda x: op(x))
    return lambda: run(x)


def vmap(op, xs):
    return lambda: tf.vectorized_map(op, xs, warn=False)


def function(op, x):
    m = tf.reshape(x, (32, 32))
    v = m[0]
    return lambda: op(m, v)


def filtering(op, *arrays):
    return partial(op, *map(tf.constant, arrays))


def training_step(op, x):
    """A step of stochastic gradient descent for a small network, with the op after each of its
    hidden layers.
    """
    x, sizes = tf.reshape(x, (16, 32)), [(32, 64), (64, 64), (64, 1)]
    params = [tf.Variable(0.1 * tf.random.stateless_normal(size, (0, 7))) for size in sizes]

    def run():
        with tf.GradientTape() as tape:
            hidden = op(op(x @ params[0]) @ params[1])
            loss = tf.reduce_mean((hidden @ params[2]) ** 2)
        for param, slope in zip(params, tape.gradient(loss, params), strict=True):
            param.assign_sub(1e-4 * slope)

    return run


def compiled_training_step(op, x):
    return tf.function(training_step(op, x))


def compiled_pullback(op, matrix, right, upstream):
    if op is solve_by_hand:
        return partial(op, matrix, right, upstream)
    matrix, right, upstream = map(tf.constant, (matrix, right, upstream))

    @tf.function
    def run(matrix, right, upstream):
        with tf.GradientTape() as tape:
            tape.watch([matrix, right])
            solution = op(matrix, right)
        return solution, tape.gradient(solution, [matrix, right], upstream)

    return partial(run, matrix, right, upstream)


def tracing(op, x):
    return lambda: tf.function(lambda x: gradient(op, x)()).get_concrete_function(x)


def chain(op, x):
    return gradient(lambda x: op(op(op(op(x)))), x)


def checkpointed_chain(op, x):
    twice = tf.recompute_grad(lambda x: op(op(x)))
    return gradient(lambda x: twice(twice(x)), x)
