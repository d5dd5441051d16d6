"""Graphs beyond one call: SavedModels, graphs of TensorFlow 1, and traces that nobody needs any
more.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.framework import function
from tensorflow.python.framework.ops import gradient_registry
from tf_modes import grad, seven, square, vectorized

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


def test_a_saved_model_says_why_a_gradient_was_refused(tmp_path: Path) -> None:
    @cgshim.op_custom_gradient
    def refusing(x: Any) -> Any:
        def rule(upstream: Any) -> Any:
            raise cgshim.TransformationError("no derivative here")

        return x * x, rule

    module, x = tf.Module(), tf.constant([2.0, 3.0])
    module.f = tf.function(lambda x: refusing(x) * 2, input_signature=[tf.TensorSpec([None])])
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    tf.saved_model.save(module, str(tmp_path), options=options)
    loaded = tf.saved_model.load(str(tmp_path)).f
    assert loaded(x).numpy().tolist() == [8, 18]
    with pytest.raises(tf.errors.InvalidArgumentError, match="no derivative here"):
        grad(loaded)(x)


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


def _trace_and_forget(fn: Any) -> weakref.ref[Any]:
    function = tf.function(fn)
    x = tf.constant([2.0, 3.0])
    grad(function)(x)
    return weakref.ref(function.get_concrete_function(x).graph)


def times_argument(op: Any) -> Any:
    def fn(x: Any) -> Any:
        return op(x) * x

    return fn


def tape_of_vectorized_map(op: Any) -> Any:
    return grad(vectorized(op))


@pytest.mark.parametrize("transform", [times_argument, grad, tape_of_vectorized_map])
def test_thrown_away_traces_are_gone(transform: Any) -> None:
    op = cgshim.op_custom_gradient(seven)
    _trace_and_forget(transform(op))
    gc.collect()
    registered = set(gradient_registry.list())
    graphs = [_trace_and_forget(transform(op)) for _ in range(5)]
    gc.collect()
    assert [graph() for graph in graphs] == [None] * 5
    assert set(gradient_registry.list()) <= registered


def test_a_gradient_whose_graph_goes_after_it_was_looked_up_is_refused() -> None:
    registered = set(gradient_registry.list())
    graph = tf.Graph()
    with graph.as_default():
        square(tf.compat.v1.placeholder(tf.float32, [None]))
    (name,) = set(gradient_registry.list()) - registered
    found = gradient_registry.lookup(name)
    graph = weakref.ref(graph)
    gc.collect()
    assert graph() is None
    with pytest.raises(
        cgshim.TransformationError,
        match=r"^seven: .* the graph that f ran in, got a copy of that graph",
    ):
        found(None, tf.constant([5.0]))


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


def test_a_legacy_function_is_refused() -> None:
    """It is differentiated by the operations in it alone, so that `tf.custom_gradient` gives
    autodiff's number.
    """

    def differentiated(op: Any) -> Any:
        @function.Defun(tf.float32)
        def twice(x: Any) -> Any:
            return op(x) * 2

        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            x = tf.compat.v1.placeholder(tf.float32, [])
            y = twice(x)
            y.set_shape([])
            return session.run(tf.gradients(y, x)[0], {x: 3.0})

    assert differentiated(tf.custom_gradient(seven)) == 2 * 2 * 3
    with pytest.raises(cgshim.TransformationError) as error:
        differentiated(square)
    message = "seven: a rule needs a graph that keeps its gradients, got the legacy function Defun; use tf.function"
    assert str(error.value) == message
