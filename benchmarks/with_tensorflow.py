"""TensorFlow: the ops by tf.custom_gradient, and the uses of them."""

from __future__ import annotations

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


BY_HAND = {
    "on_host": lambda x: tf.ensure_shape(tf.numpy_function(on_host, [x], x.dtype), x.shape),
    "solve": solve_by_hand,
    "cube": tf.custom_gradient(cube),
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
