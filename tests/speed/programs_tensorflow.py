"""Ops and the same ops by hand, as XLA optimises them inside TensorFlow."""

import tensorflow as tf
from hlo import nameless

from cgshim import op_custom_gradient


def cube(x):
    square = x * x
    return square * x, lambda upstream: 7 * upstream * square


def scaled(pair):
    a, b = pair["a"], pair["b"]
    return (a * b, 5 * a), lambda first, second: {
        "a": 7 * first * b + 5 * second,
        "b": 3 * first * a,
    }


X = tf.range(6, dtype="float32")


def compiled(fn):
    """The optimised program."""
    return nameless(
        tf.function(fn, jit_compile=True).experimental_get_compiler_ir(X)(stage="optimized_hlo")
    )


def gradient(op):
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = op(tf.sin(x))
        return tape.gradient(y, x)

    return run


def of_pair(op):
    return lambda x: sum(op({"a": x, "b": 2 * x}))


CASES = {
    "gradient": (gradient, op_custom_gradient(cube), tf.custom_gradient(cube), lambda x: x * x * x),
    "second order": (
        lambda op: gradient(gradient(op)), op_custom_gradient(cube), tf.custom_gradient(cube), lambda x: x * x * x
    ),
    "trees": (
        lambda op: gradient(of_pair(op)), op_custom_gradient(scaled), tf.custom_gradient(scaled),
        lambda p: (p["a"] * p["b"], 5 * p["a"]),
    ),
}  # fmt: skip
