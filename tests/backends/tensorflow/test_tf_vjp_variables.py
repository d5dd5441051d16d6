"""op_vjp by Variables and other tensors that a function reads, and Keras layers under the
cookbook's recompute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tf_modes import every_mode, function

from cgshim import op_custom_gradient, op_stop_gradient, op_vjp

X = tf.constant([[1.0, -2.0, 0.5], [0.3, 0.7, -1.1]])
UPSTREAM = tf.constant([[2.0, -3.0], [0.5, 7.0]])


def recompute(fn: Callable[..., Any], variables: Any) -> Callable[..., Any]:
    """fn, with a rule that keeps nothing of what fn computes; fn reads these variables."""

    @op_custom_gradient(variables=variables)
    def recomputed(*args: Any, **options: Any) -> Any:
        run = partial(fn, **options)

        def grad(upstream: Any, variables: Any) -> Any:
            return op_vjp(run, *args, variables=variables, as_in_rules=True)[1](upstream)

        return run(*map(op_stop_gradient, args)), grad

    return recomputed


def layer_of(*layers: Any) -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((3,)), *layers])


def derivatives(fn: Callable[[Any], Any], variables: Any, order: int) -> Any:
    """The gradients by X and the variables, and in the second order those of a weighted sum of
    their squares.
    """
    sources = [X, *variables]
    with tf.GradientTape() as outer:
        outer.watch(X)
        with tf.GradientTape() as tape:
            tape.watch(X)
            loss = tf.reduce_sum(UPSTREAM * fn(X))
        gradients = tape.gradient(loss, sources)
        squares = [(at + 2.0) * tf.reduce_sum(g * g) for at, g in enumerate(gradients)]
    return gradients if order == 1 else outer.gradient(squares, sources)


def check_same(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@every_mode
@pytest.mark.parametrize("order", [1, 2])
def test_a_keras_layer(mode: Any, order: int) -> None:
    layer = layer_of(
        keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(2, activation="tanh")
    )
    again = recompute(layer, layer.trainable_variables)
    found = mode(lambda: derivatives(again, layer.trainable_variables, order))()
    check_same(found, derivatives(layer, layer.trainable_variables, order))


def test_it_runs_again_in_the_backward_pass() -> None:
    layer, runs = layer_of(keras.layers.Dense(2)), []

    def counted(x: Any) -> Any:
        runs.append(1)
        return layer(x)

    derivatives(recompute(counted, layer.trainable_variables), layer.trainable_variables, 1)
    assert len(runs) == 2


@every_mode
def test_a_layer_twice(mode: Any) -> None:
    """The argument of the second one was made from the Variables that it reads."""
    layer = layer_of(keras.layers.Dense(3, activation="tanh"))
    twice = lambda layer: lambda x: layer(layer(x))[:, 1:]
    found = mode(
        lambda: derivatives(
            twice(recompute(layer, layer.trainable_variables)), layer.trainable_variables, 2
        )
    )()
    check_same(found, derivatives(twice(layer), layer.trainable_variables, 2))


@every_mode
@pytest.mark.parametrize("order", [1, 2])
def test_dropout_has_the_same_mask_twice(mode: Any, order: int) -> None:
    layer = layer_of(keras.layers.Dense(2))
    run = lambda x, seed: tf.tanh(0.2 * keras.random.dropout(layer(x), 0.5, seed=seed))
    again, seeds = recompute(run, layer.trainable_variables), (0, 1)
    of = lambda fn: [
        derivatives(partial(fn, seed=seed), layer.trainable_variables, order) for seed in seeds
    ]
    found, plain = mode(lambda: (of(again), of(run)))()  # both, because XLA draws other numbers
    kernels = set()
    for found_of_seed, plain_of_seed in zip(found, plain, strict=True):
        check_same(found_of_seed, plain_of_seed)
        kernels.add(float(tf.reduce_sum(abs(found_of_seed[1]))))
    assert len(kernels) > 1  # the masks are not all the same


@every_mode
def test_an_embedding(mode: Any) -> None:
    """Its gradient comes as slices to a tape, and as a tensor from op_vjp."""
    layer = keras.layers.Embedding(5, 2)
    indices, upstream = tf.constant([1, 3, 1]), tf.constant([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]])
    layer.build()
    expected = [[0, 0], [8, 13], [0, 0], [3, 5], [0, 0]]

    def by_tape() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(upstream * recompute(layer, layer.trainable_variables)(indices))
        return tf.convert_to_tensor(tape.gradient(loss, layer.trainable_variables)[0])

    def by_op_vjp() -> Any:
        return op_vjp(layer, indices, variables=layer.trainable_variables)[1](upstream)[1][0]

    for gradient in mode(lambda: (by_tape(), by_op_vjp()))():
        np.testing.assert_allclose(gradient, expected)


READ_IN: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "operations": lambda w: lambda x: x * x * w,
    "a function": lambda w: function(lambda x: x * x * w),
    "a branch": lambda w: lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x * x * w, lambda: x),
    "a map": lambda w: lambda x: tf.map_fn(lambda each: each * each * w, x),
}


VARIABLES: dict[str, Callable[[Any], Any]] = {
    "tensor": tf.constant,
    "Variable": tf.Variable,
    "not trainable": lambda value: tf.Variable(value, trainable=False),
    "Keras Variable": keras.Variable,
}


@every_mode
@pytest.mark.parametrize("read", READ_IN.values(), ids=READ_IN)
def test_what_a_variable_may_be(read: Any, mode: Any) -> None:
    """All of them in one function, which is compiled once."""
    made = {name: (make(3.0), make([1.0, 2.0])) for name, make in VARIABLES.items()}
    fns = {name: read(w) for name, (w, _) in made.items()}
    gradients = lambda x, u: {
        name: op_vjp(fns[name], x, variables=[unread, w])[1](u)
        for name, (w, unread) in made.items()
    }
    for name, (of_args, of_variables) in mode(gradients)(
        tf.constant([1.0, 2.0]), tf.constant([10.0, 100.0])
    ).items():
        for found, expected in zip(
            [*of_args, *of_variables], ([60.0, 1200.0], [0.0, 0.0], 410.0), strict=True
        ):
            np.testing.assert_allclose(found, expected, err_msg=name)


def test_forward_over_reverse() -> None:
    """The tangents of the gradients 4 u x w and 2 u x^2 of a variable and of an argument."""
    w, x, upstream = tf.Variable(3.0), tf.constant([1.0, 2.0]), tf.constant([10.0, 100.0])
    with tf.autodiff.ForwardAccumulator(w, tf.constant(1.0)) as accumulator:
        (of_x,), (of_w,) = op_vjp(lambda x: x * x * w * w, x, variables=[w])[1](upstream)
    np.testing.assert_allclose(accumulator.jvp(of_x), 4 * upstream * x * w)
    np.testing.assert_allclose(accumulator.jvp(of_w), tf.reduce_sum(2 * upstream * x * x))
