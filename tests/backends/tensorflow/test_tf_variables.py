"""Variables that f reads, returns or assigns: whoever watches one that is not trainable gets the
rule's gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import eager_and_function, every_mode, function, grad

import cgshim


def scale_by(w: Any, swapped: bool = False) -> Any:
    def scale(x: Any) -> Any:
        # TensorFlow reads the variable in Python where it comes first, and in C++ where it comes
        # second
        return w * x if swapped else x * w, lambda u, variables=None: (
            u * 7,
            [u * 11 for _ in variables or ()],
        )

    return cgshim.op_custom_gradient(scale, forward_mode=True)


TAPES: dict[str, Any] = {
    "": {},
    "persistent": {"persistent": True},
    "watching": {"watch_accessed_variables": False},
}


@every_mode
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("options", TAPES.values(), ids=TAPES)
def test_a_variable_that_is_watched_and_not_trainable(
    options: Any, swapped: bool, mode: Any
) -> None:
    """TensorFlow does not tell that it is read, and so `tf.custom_gradient` gives it no gradient."""
    w = tf.Variable(3.0, trainable=False)
    op = scale_by(w, swapped)

    def gradients(x: Any) -> Any:
        with tf.GradientTape(**options) as tape:
            tape.watch([x, w])
            y = op(x) * 2
        return tape.gradient(y, [x, w])

    assert [g.numpy() for g in mode(gradients)(tf.constant(5.0))] == [14, 22]


@every_mode
@pytest.mark.parametrize("swapped", [False, True])
def test_an_accumulator_over_it(swapped: bool, mode: Any) -> None:
    w = tf.Variable(3.0, trainable=False)
    op = scale_by(w, swapped)

    def derivative(x: Any) -> Any:
        with tf.autodiff.ForwardAccumulator([w], [tf.constant(2.0)]) as accumulator:
            y = op(x)
        return accumulator.jvp(y)

    assert mode(derivative)(tf.constant(5.0)).numpy() == 22


def test_it_is_watched_in_a_branch() -> None:
    w = tf.Variable(3.0, trainable=False)
    op = scale_by(w)

    @tf.function
    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(w)
            y = tf.cond(x > 0, lambda: op(x) * 1.0, lambda: x) * 2
        return tape.gradient(y, w)

    assert gradient(tf.constant(5.0)).numpy() == 22


def test_a_variable_watched_only_outside_of_a_trace_is_nan() -> None:
    w = tf.Variable(3.0, trainable=False)
    op, table = scale_by(w), tf.Variable([2.0, 3.0], trainable=False)
    look_up = cgshim.op_custom_gradient(lambda x: (x * tf.gather(table, 1), lambda u: u * 7))
    traced = function(lambda x: op(x) * look_up(x))
    x = tf.constant(5.0)
    traced(x)
    with tf.GradientTape() as tape:
        tape.watch([x, w, table])
        y = traced(x)
    dx, dw, dtable = tape.gradient(y, [x, w, table])
    assert dx.numpy() == 2 * 15 * 7
    assert np.isnan(dw)
    assert np.all(np.isnan(tf.convert_to_tensor(dtable)[1]))
    for variable, tangent, expected in ((w, 2.0, np.nan), (x, 2.0, 2 * 2 * 15 * 7)):
        with tf.autodiff.ForwardAccumulator([variable], [tf.constant(tangent)]) as accumulator:
            y = traced(x)
        np.testing.assert_equal(accumulator.jvp(y).numpy(), np.float32(expected))


# --- Returned, and assigned -----------------------------------------------------------------------


def _assigned(w: Any, x: Any) -> Any:
    return w.assign(x)


def _returned(w: Any, x: Any) -> Any:
    w.assign(x)
    return w


@eager_and_function
@pytest.mark.parametrize("define", [cgshim.op_custom_gradient, tf.custom_gradient])
@pytest.mark.parametrize("output", [_assigned, _returned])
def test_a_variable_as_the_output(output: Any, define: Any, mode: Any) -> None:
    w = tf.Variable(1.0)
    op = define(lambda x: (output(w, x), lambda u, variables=None: (u * 7, [u * 11])))

    def gradients(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = op(x)
            y = y * y
        return y, *tape.gradient(y, [x, w])

    assert [t.numpy() for t in mode(gradients)(tf.constant(5.0))] == [25, 70, 110]
    assert w.numpy() == 5


@eager_and_function
def test_a_constant_beside_a_variable_among_the_outputs(mode: Any) -> None:
    w = tf.Variable(1.0, trainable=False)

    @cgshim.op_custom_gradient
    def op(x: Any) -> Any:
        factor = tf.constant(3.0)
        y = w.assign(tf.stop_gradient(tf.exp(x)))
        return [y, 2 * x], lambda upstreams: 3 * factor * upstreams[0] + upstreams[1]

    first = grad(lambda x: 5 * op(x)[0])
    assert mode(grad(lambda x: first(x) * x))(tf.constant(0.5)) == 45.0


@eager_and_function
def test_a_variable_as_the_output_where_nothing_is_recorded(mode: Any) -> None:
    w = tf.Variable(1.0)
    op = cgshim.op_custom_gradient(lambda x: (w.assign(x), lambda u, variables: (u, [None])))
    assert mode(lambda x: op(x) * 3)(tf.constant(5.0)).numpy() == 15
