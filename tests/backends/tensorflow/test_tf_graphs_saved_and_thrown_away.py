"""Graphs beyond one call: SavedModels, graphs of TensorFlow 1, and traces that are thrown away."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import tensorflow as tf
from tf_modes import grad, square

import cgshim


@cgshim.op_custom_gradient
def triple(x: Any) -> Any:
    return x * 3, lambda upstream: upstream * 11


class Model(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None])])
    def __call__(self, x: Any) -> Any:
        return square(x) * triple(x)


def test_saved_model_keeps_the_rules(tmp_path: Path) -> None:
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    tf.saved_model.save(Model(), str(tmp_path), options=options)
    loaded = tf.saved_model.load(str(tmp_path))
    x = tf.constant([2.0, 3.0])
    assert loaded(x).numpy().tolist() == [24, 81]
    # 7x * 3x + 11 * x * x
    assert grad(loaded)(x).numpy().tolist() == grad(Model())(x).numpy().tolist() == [32 * 4, 32 * 9]


def test_graphs_of_tensorflow_1() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, [None])
        w = tf.compat.v1.get_variable("w", initializer=3.0, use_resource=True)

        @cgshim.op_custom_gradient
        def scale(x: Any) -> Any:
            return x * w, lambda upstream, variables: (upstream * 7, [tf.reduce_sum(upstream * 11)])

        y = scale(square(x)) * 10
        gradients = tf.gradients(y, [x, w])
        (second,) = tf.gradients(gradients[0], x)
        session.run(tf.compat.v1.global_variables_initializer())
        dx, dw, d2x = session.run([*gradients, second], {x: [1.0, 2.0]})
    assert dx.tolist() == [490, 980]  # 10 * 7 * 7x
    assert dw == 220
    assert d2x.tolist() == [490, 490]


def test_v1_session_as_default_graph_is_a_graph_too() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.constant(2.0)
        assert session.run(tf.gradients(square(x) * 3, x)) == [42]


def test_thrown_away_tapes_keep_nothing_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        x = tf.constant([2.0, 3.0])
        residuals = []

        @cgshim.op_custom_gradient
        def op(x: Any) -> Any:
            y = x * x
            residuals.append(weakref.ref(y))
            return y, lambda upstream: upstream * y

        for _ in range(3):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = op(x)
            tape.gradient(loss, x)
            del tape, loss
        assert [residual() for residual in residuals] == [None] * 3
    finally:
        gc.enable()
