"""A rule that keeps f's output keeps the op's: its derivative is the rule's, at every order,
however f computes it.
"""

from __future__ import annotations

import functools
import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import (
    MODES,
    eager_and_autograph,
    eager_and_function,
    every_mode,
    function,
    grad,
    jacobian,
    jvp,
    vectorized,
    with_orders,
)

import cgshim

X = [0.5, 1.0]


def constant_exp(x: Any) -> Any:
    return tf.stop_gradient(tf.exp(x))


@cgshim.op_custom_gradient(forward_mode=True)
def in_a_cell(x: Any) -> Any:
    y = constant_exp(x)
    return y, lambda upstream: upstream * 3 * y


@cgshim.op_custom_gradient
def in_containers(x: Any) -> Any:
    kept = {"y": [constant_exp(x)]}
    return kept["y"][0], lambda upstream: upstream * 3 * kept["y"][0]


@cgshim.op_custom_gradient
def in_a_partial(x: Any) -> Any:
    y = constant_exp(x)
    return y, functools.partial(lambda y, upstream: upstream * 3 * y, y)


@cgshim.op_custom_gradient
def in_an_inner_function(x: Any) -> Any:
    y = constant_exp(x)

    def kept() -> Any:
        return y

    return y, lambda upstream: upstream * 3 * kept()


@cgshim.op_custom_gradient
def one_of_two(x: Any) -> Any:
    y = constant_exp(x)
    return (y, x * 2), lambda first, second: first * 3 * y + second * 2


@cgshim.op_custom_gradient
def by_a_loop(x: Any) -> Any:
    """The series of exp, in a loop that AutoGraph turns into one of the graph."""
    y = term = tf.ones_like(x)
    n = tf.constant(0)
    while n < 20:
        n += 1
        term = term * x / tf.cast(n, x.dtype)
        y = y + term
    y = tf.stop_gradient(y)
    return y, lambda upstream: upstream * 3 * y


@cgshim.op_custom_gradient
def by_numpy(x: Any) -> Any:
    y = tf.ensure_shape(tf.numpy_function(np.exp, [x], x.dtype), x.shape)
    return y, lambda upstream: upstream * 3 * y


@cgshim.op_custom_gradient
def by_py_function(x: Any) -> Any:
    y = tf.ensure_shape(tf.py_function(constant_exp, [x], x.dtype), x.shape)
    return y, lambda upstream: upstream * 3 * y


EXP = {
    "cell": in_a_cell, "containers": in_containers, "partial": in_a_partial, "inner function": in_an_inner_function,
    "one of two": lambda x: one_of_two(x)[0], "loop": by_a_loop, "numpy_function": by_numpy,
    "py_function": by_py_function,
}  # fmt: skip


def check_orders(op: Any, mode: Any) -> None:
    """The first order alone, and those up to the third, of one run."""
    for highest in (1, 3):
        for order, found in enumerate(mode(with_orders(op, highest))(tf.constant(X))):
            np.testing.assert_allclose(
                found, 3**order * np.exp(X), rtol=1e-5, err_msg=f"order {order} of {highest}"
            )


@eager_and_autograph  # which turns the loop into one of the graph
@pytest.mark.parametrize("op", EXP.values(), ids=EXP)
def test_three_orders(op: Any, mode: Any) -> None:
    check_orders(op, mode)


SECOND = {
    "grad of grad": lambda fn: grad(grad(fn)),
    "grad of vectorized_map of grad": lambda fn: grad(vectorized(grad(fn))),
    "vectorized_map of grad of grad": lambda fn: vectorized(grad(grad(fn))),
    "grad of grad of vectorized_map": lambda fn: grad(grad(vectorized(fn))),
    "jacobian of grad": lambda fn: jacobian(grad(fn)),
    "grad of grad of tf.function": lambda fn: grad(grad(function(fn))),
    "grad of grad of XLA's program": lambda fn: grad(grad(MODES["xla"](fn))),
    "grad of grad of map_fn": lambda fn: grad(grad(lambda x: tf.map_fn(fn, x))),
    "forward over reverse": lambda fn: jvp(grad(fn), [1.0, 1.0]),
    "reverse over forward": lambda fn: grad(jvp(fn, [1.0, 1.0])),
    "forward over forward": lambda fn: jvp(jvp(fn, [1.0, 1.0]), [1.0, 1.0]),
}


@every_mode
@pytest.mark.parametrize("transform", SECOND.values(), ids=SECOND)
def test_second_order_under_every_transformation(transform: Any, mode: Any) -> None:
    found = mode(transform(in_a_cell))(tf.constant(X))
    np.testing.assert_allclose(found, 9 * np.exp(X), rtol=1e-5)


@eager_and_function
def test_forward_mode_around_a_vectorized_map(mode: Any) -> None:
    """The tangent of the output is made of the output: what maps the rule needs both."""
    found = mode(jvp(vectorized(in_a_cell), [2.0, 5.0]))(tf.constant(X))
    np.testing.assert_allclose(found, 3 * np.exp(X) * [2.0, 5.0], rtol=1e-5)


@every_mode
def test_recompute_grad(mode: Any) -> None:
    found = mode(grad(tf.recompute_grad(in_a_cell)))(tf.constant(X))
    np.testing.assert_allclose(found, 3 * np.exp(X), rtol=1e-5)


@eager_and_function
def test_composite_outputs(mode: Any) -> None:
    @cgshim.op_custom_gradient
    def ragged_exp(ragged: Any) -> Any:
        y = ragged.with_flat_values(constant_exp(ragged.flat_values))
        return y, lambda upstream: upstream * 3.0 * y

    @cgshim.op_custom_gradient
    def exp_of_values(ragged: Any) -> Any:
        values = constant_exp(ragged.flat_values)
        rule = lambda upstream: upstream.with_flat_values(upstream.flat_values * 3.0 * values)
        return ragged.with_flat_values(values), rule

    @cgshim.op_custom_gradient
    def sparse_exp(sparse: Any) -> Any:
        y = sparse.with_values(constant_exp(sparse.values))
        return y, lambda upstream: upstream.with_values(upstream.values * 3.0 * y.values)

    @cgshim.op_custom_gradient
    def exp_of_slices(slices: Any) -> Any:
        y = tf.IndexedSlices(constant_exp(slices.values), slices.indices, slices.dense_shape)
        return y, lambda upstream: tf.IndexedSlices(
            upstream.values * 3.0 * y.values, y.indices, y.dense_shape
        )

    of_ragged = lambda values: tf.RaggedTensor.from_row_lengths(values, [2, 0])
    of_sparse = lambda values: tf.SparseTensor([[0, 1], [2, 0]], values, [3, 3])
    of_slices = lambda values: tf.IndexedSlices(values, tf.constant([2, 0]), tf.constant([3]))
    for fn in (
        lambda values: ragged_exp(of_ragged(values)).flat_values,
        lambda values: exp_of_values(of_ragged(values)).flat_values,
        lambda values: sparse_exp(of_sparse(values)).values,
        lambda values: exp_of_slices(of_slices(values)).values,
    ):
        np.testing.assert_allclose(mode(grad(fn))(tf.constant(X)), 3 * np.exp(X), rtol=1e-5)
        np.testing.assert_allclose(mode(grad(grad(fn)))(tf.constant(X)), 9 * np.exp(X), rtol=1e-5)


class Exp:
    """An object that no registry knows."""

    y: Any = None


@cgshim.op_custom_gradient
def hiding(x: Any) -> Any:
    exp = Exp()
    exp.y = constant_exp(x)
    return exp.y, lambda upstream: upstream * 3 * exp.y


@eager_and_function
def test_an_output_in_an_attribute_has_a_first_order(mode: Any) -> None:
    np.testing.assert_allclose(mode(grad(hiding))(tf.constant(X)), 3 * np.exp(X), rtol=1e-5)
    with pytest.raises(cgshim.TransformationError, match="is an attribute of an object of f"):
        mode(grad(grad(hiding)))(tf.constant(X))


class Model(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None])])
    def __call__(self, x: Any) -> Any:
        return in_a_cell(x) * 2


def test_saved_model(tmp_path: Path) -> None:
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    tf.saved_model.save(Model(), str(tmp_path), options=options)
    loaded = tf.saved_model.load(str(tmp_path))
    np.testing.assert_allclose(grad(loaded)(tf.constant(X)), 6 * np.exp(X), rtol=1e-5)
    np.testing.assert_allclose(grad(grad(loaded))(tf.constant(X)), 18 * np.exp(X), rtol=1e-5)


@pytest.mark.parametrize(
    "transform", [grad, lambda op: grad(grad(op)), lambda op: jvp(op, [1.0, 1.0])]
)
def test_nothing_waits_for_the_collector(transform: Any) -> None:
    outputs: list[weakref.ref[Any]] = []

    @cgshim.op_custom_gradient(forward_mode=True)
    def op(x: Any) -> Any:
        y = constant_exp(x)
        outputs.append(weakref.ref(y))
        return y, lambda upstream: upstream * 3 * y

    transform(op)(tf.constant(X))
    gc.collect()
    gc.disable()
    try:
        outputs.clear()
        transform(op)(tf.constant(X))
        assert [output() for output in outputs] == [None]
    finally:
        gc.enable()


DRAWS = {
    "tf.random": lambda generator: tf.random.uniform([]),
    "tf.random.Generator": lambda generator: generator.uniform([]),
    "NumPy": lambda generator: tf.constant(np.random.default_rng().uniform(), tf.float32),
}


@eager_and_function
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_both_orders_use_the_random_numbers_of_one_run(draw: Any, mode: Any) -> None:
    generator, runs = tf.random.Generator.from_seed(1), []

    @cgshim.op_custom_gradient
    def noisy(x: Any) -> Any:
        runs.append(1)
        i = x * x * draw(generator)
        return i * x, lambda upstream: upstream * 15 * i

    def derivatives(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as outer:
            outer.watch(x)
            with tf.GradientTape(persistent=True) as inner:
                inner.watch(x)
                y = noisy(x)
                early = inner.gradient(y, x)
            late = inner.gradient(y, x)
        return y, early, late, outer.gradient(early, x), outer.gradient(late, x)

    y, *found = mode(derivatives)(tf.constant(2.0))
    noise = y.numpy() / 8
    np.testing.assert_allclose(found, [60 * noise, 60 * noise, 60 * noise, 60 * noise], rtol=1e-5)
    assert runs == [1]
