"""f and grad_fn as NumPy code in TensorFlow's graphs and loops: the numbers, and how often f runs."""

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import function

import cgshim
from cgshim import TransformationError, op_custom_gradient, op_host

X = np.array([0.5, -2.0, 3.0], "float32")


class Cube:
    """x cubed, with 7 for its rule's 3, and a residual that no framework knows."""

    def __init__(self, keep=8):
        self.runs = 0
        self.op = op_custom_gradient(self.f, host_outputs=lambda x: x, keep=keep, name="cube")

    def f(self, x):
        self.runs += 1
        kept = {"square": [x * x]}
        return x**3, lambda upstream: 7 * upstream * kept["square"][0]


def gradient_of(function, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return tape.gradient(y, x)


@pytest.mark.parametrize("keep", [8, 0])
def test_a_gradient_in_a_function(keep):
    cube = Cube(keep)
    gradient = function(lambda x: gradient_of(lambda x: 5.0 * cube.op(x), x))
    for at in (1, 2):
        cube.runs = 0
        np.testing.assert_allclose(gradient(tf.constant(at * X)), 35 * (at * X) ** 2, rtol=1e-6)
        assert cube.runs == (1 if keep else 2)


def test_more_runs_than_are_kept():
    """A loop of ten with two rules kept: f runs again for the others, and for nothing else."""
    cube = Cube(keep=2)

    @tf.custom_gradient
    def by_hand(x):
        return x**3, lambda upstream: 7 * upstream * x**2

    x = tf.constant([1.1, -1.2, 0.9])

    def gradient(op):
        @tf.function
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.while_loop(
                    lambda at, y: at < 10, lambda at, y: (at + 1, 0.3 * op(y)), (0, x)
                )[1]
            return tape.gradient(y, x)

        return run(x)

    expected, found = gradient(by_hand), gradient(cube.op)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert cube.runs == 18


def test_vectorized_loops():
    cube = Cube(keep=50)
    xs = tf.constant(np.stack([X, 2 * X, -X, X + 1]))
    found = tf.vectorized_map(lambda x: gradient_of(lambda x: 5.0 * cube.op(x), x), xs)
    np.testing.assert_allclose(found, 35 * xs.numpy() ** 2, rtol=1e-6)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(xs)
        y = cube.op(xs)
    diagonal = np.einsum("ijij->ij", tape.jacobian(y, xs).numpy())
    np.testing.assert_allclose(diagonal, 7 * xs.numpy() ** 2, rtol=1e-6)


def test_the_second_order_is_refused():
    cube = Cube()
    second = lambda x: gradient_of(lambda x: gradient_of(cube.op, x), x)
    for run in (second, function(second)):
        with pytest.raises(
            TransformationError,
            match=r"^the gradient of cube: what runs on the host has no derivative",
        ):
            run(tf.constant(X))


def test_a_foreign_function_in_a_graph_at_two_orders():
    sine = op_host(
        lambda x: cgshim.op_sin(x) * x, outputs=lambda x: x, backend="numpy", name="sine"
    )
    w, v = np.array([1.0, 5.0, -2.0], "float32"), np.array([2.0, -3.0, 7.0], "float32")
    first = lambda x: gradient_of(lambda x: sine(x) * w, x)
    second = lambda x: gradient_of(lambda x: first(x) * v, x)
    np.testing.assert_allclose(
        function(first)(tf.constant(X)), w * (np.cos(X) * X + np.sin(X)), rtol=1e-5
    )
    np.testing.assert_allclose(
        function(second)(tf.constant(X)), w * v * (2 * np.cos(X) - np.sin(X) * X), rtol=1e-5
    )  # fmt: skip


@pytest.mark.parametrize("compiler", [tf.function, lambda f: f])
def test_a_batch_of_a_vectorized_rule_is_one_call(compiler):
    """Over ten elements: one call of f and one of its rule, whichever derivative comes first."""
    runs = []

    @op_custom_gradient(host_outputs=lambda x: x, vectorized=True)
    def op(x):
        runs.append("f")

        def rule(upstream):
            runs.append("rule")
            return 7 * upstream * x

        return x * x, rule

    x = tf.reshape(tf.range(30.0), (10, 3))
    mapped = lambda x: tf.vectorized_map(op, x)
    for program in (
        lambda x: tf.vectorized_map(lambda x: gradient_of(op, x), x),
        lambda x: gradient_of(mapped, x),
    ):
        runs.clear()
        np.testing.assert_allclose(compiler(program)(x), 7 * x)
        assert runs == ["f", "rule"]
