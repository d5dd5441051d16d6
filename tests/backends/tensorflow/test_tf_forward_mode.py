"""ForwardAccumulator: J v is the transpose of the rule where the rule is linear, and refused where
it may not be.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import MODES, eager_and_autograph, eager_and_function, every_mode, grad, jvp, square

import cgshim

REFUSED = (
    "{}: forward mode needs a rule that is linear in upstream, got tf.autodiff.ForwardAccumulator; "
    "if it is, say so with op_custom_gradient(forward_mode=True)"
)


@every_mode
def test_arguments_outputs_trees_and_static_leaves(mode: Any) -> None:
    @cgshim.op_custom_gradient(forward_mode=True)
    def mixed(pair: Any, b: Any, *, power: int) -> Any:
        a, _ = pair
        rule = lambda u: (
            (u["p"] * 3 + u["s"] * 5, None),
            tf.reduce_sum(u["p"] * 11) * tf.ones_like(b),
        )
        return {
            "p": a**power + tf.reduce_sum(b),
            "s": tf.reduce_sum(a) * a,
            "n": tf.cast(a, tf.int32),
        }, rule

    def derivatives(a: Any, b: Any) -> Any:
        tangents = [tf.constant([1.0, 10.0]), tf.constant([[1.0, 2.0, 4.0]])]
        with tf.autodiff.ForwardAccumulator([a, b], tangents) as accumulator:
            y = mixed((a, "static"), b, power=2)
        return accumulator.jvp(y["p"]), accumulator.jvp(y["s"])

    p, s = mode(derivatives)(tf.constant([2.0, 3.0]), tf.constant([[5.0, 6.0, 7.0]]))
    assert p.numpy().tolist() == [3 + 11 * 7, 30 + 11 * 7]
    assert s.numpy().tolist() == [5, 50]


def clip(x: Any) -> Any:
    return x * x, lambda upstream: tf.clip_by_value(upstream, -1.0, 1.0)


def by_value(x: Any) -> Any:
    return x * x, lambda upstream: upstream * 7 if upstream > 0 else upstream * 6


def quadratic(x: Any) -> Any:
    return x * x, lambda upstream: upstream * upstream


@eager_and_autograph  # which makes a branch of the graph of by_value's
@pytest.mark.parametrize("f", [clip, by_value, quadratic])
def test_a_rule_that_may_not_be_linear_is_refused(f: Any, mode: Any) -> None:
    with pytest.raises(cgshim.TransformationError) as error:
        mode(jvp(cgshim.op_custom_gradient(f), 3.0))(tf.constant(2.0))
    assert str(error.value) == REFUSED.format(f.__name__)


def function_in_function(op: Any) -> Any:
    return lambda x: tf.function(op)(x) * 2


def in_vectorized_map(op: Any) -> Any:
    return lambda x: tf.vectorized_map(op, tf.stack([x, x]))[1] * 2


def in_while_loop(op: Any) -> Any:
    return lambda x: tf.while_loop(lambda i, _: i < 1, lambda i, c: (i + 1, op(c)), (0, x))[1] * 2


@pytest.mark.parametrize("place", [function_in_function, in_vectorized_map, in_while_loop])
def test_an_accumulator_around_a_function(place: Any) -> None:
    assert jvp(tf.function(place(square)), 3.0)(tf.constant(2.0)).numpy() == 2 * 7 * 2 * 3


def test_a_rule_that_may_not_be_linear_is_refused_in_a_function() -> None:
    for place in (function_in_function, in_vectorized_map, in_while_loop):
        for mode in (tf.function, lambda fn: fn):
            derivative = mode(jvp(tf.function(place(cgshim.op_custom_gradient(clip))), 3.0))
            with pytest.raises(cgshim.TransformationError):
                derivative(tf.constant(2.0))


@eager_and_function
@pytest.mark.parametrize("f", [clip, quadratic])
@pytest.mark.parametrize("place", [function_in_function, in_while_loop])
def test_a_rule_in_a_function_is_transposed_as_by_hand(place: Any, f: Any, mode: Any) -> None:
    tangents = [
        mode(jvp(tf.function(place(make(f))), 3.0))(tf.constant(2.0)).numpy()
        for make in (cgshim.op_custom_gradient, tf.custom_gradient)
    ]
    assert tangents[0] == tangents[1]


@eager_and_function
def test_ops_within_an_op(mode: Any) -> None:
    @cgshim.op_custom_gradient(forward_mode=True)
    def outer(x: Any) -> Any:
        return square(x), lambda upstream: upstream * square(x)

    assert mode(jvp(outer, 3.0))(tf.constant(2.0)).numpy() == 4 * 3


@eager_and_function
def test_forward_over_forward_of_an_op_in_a_rule(mode: Any) -> None:
    """The backend's own tape, which follows the inner f, is none of the rule's."""

    @cgshim.op_custom_gradient(forward_mode=True)
    def outer(x: Any) -> Any:
        return x, lambda upstream: upstream * square(x)

    assert mode(jvp(jvp(outer, 3.0), 5.0))(tf.constant(2.0)).numpy() == 7 * 2 * 3 * 5


def test_a_branch_on_upstream_raises_despite_the_promise() -> None:
    promised = cgshim.op_custom_gradient(by_value, forward_mode=True)
    with pytest.raises(cgshim.TransformationError, match="whose derivative is not the"):
        jvp(promised, 3.0)(tf.constant(2.0))


TAKES_A_DERIVATIVE = (
    "by_vjp: forward mode needs a rule that takes no derivative itself, got op_vjp in it; "
    "use reverse mode"
)


@eager_and_function
def test_a_derivative_within_a_rule(mode: Any) -> None:
    def by_vjp(x: Any) -> Any:
        return x * x, lambda u: cgshim.op_vjp(tf.square, x)[1](7.0 * u)

    op, x = cgshim.op_custom_gradient(by_vjp, forward_mode=True), tf.constant(2.0)
    with pytest.raises(cgshim.TransformationError) as caught:
        mode(jvp(op, 3.0))(x)
    assert str(caught.value) == TAKES_A_DERIVATIVE
    assert mode(grad(op))(x).numpy() == 28


@eager_and_function
def test_a_tape_within_a_rule(mode: Any) -> None:
    """An accumulator lets it record nothing: its gradient would be None, and taken for zero."""

    def by_vjp(x: Any) -> Any:
        def rule(u: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x * x
            return tape.gradient(y, x, output_gradients=7.0 * u)

        return x * x, rule

    op, x = cgshim.op_custom_gradient(by_vjp, forward_mode=True), tf.constant(2.0)
    with pytest.raises(cgshim.CustomGradientError):
        mode(jvp(op, 3.0))(x)
    assert mode(grad(op))(x).numpy() == 28
    assert jvp(tf.function(op), 3.0)(x).numpy() == 3 * 28


@eager_and_function
def test_a_tape_within_f(mode: Any) -> None:
    @cgshim.op_custom_gradient(forward_mode=True)
    def op(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x * x
        slope = tape.gradient(y, x)
        return y, lambda u: 7.0 * u * slope

    assert mode(jvp(op, 3.0))(tf.constant(2.0)).numpy() == 3 * 28


@eager_and_function
def test_a_tape_within_jvp_fn(mode: Any) -> None:
    """Reverse mode transposes it, which compares two runs of it."""

    @cgshim.op_custom_jvp
    def by_vjp(x: Any) -> Any:
        def rule(dx: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x * x
            return 7.0 * dx * tape.gradient(y, x)

        return x * x, rule

    x = tf.constant(2.0)
    assert mode(grad(by_vjp))(x).numpy() == 28
    assert mode(grad(grad(by_vjp)))(x).numpy() == 14
    with pytest.raises(ValueError, match="None"):  # TensorFlow's own
        mode(jvp(by_vjp, 3.0))(x)


@eager_and_function
def test_slices_in_forward_mode(mode: Any) -> None:
    at = tf.constant([2, 0, 2])

    @cgshim.op_custom_gradient(forward_mode=True)
    def rows(x: Any) -> Any:
        return tf.gather(x, at), lambda u: tf.IndexedSlices(7.0 * u, at)

    tangents = mode(jvp(rows, [1.0, 10.0, 100.0]))(tf.constant([2.0, 3.0, 5.0]))
    np.testing.assert_array_equal(tangents, [700.0, 7.0, 700.0])


def test_a_derivative_within_the_rule_of_a_function() -> None:
    def by_vjp(x: Any) -> Any:
        return x * x, lambda u: cgshim.op_vjp(tf.square, x)[1](7.0 * u)

    op, x = cgshim.op_custom_gradient(by_vjp, forward_mode=True), tf.constant(2.0)
    assert jvp(tf.function(op), 3.0)(x).numpy() == 3 * 28
    with pytest.raises(cgshim.TransformationError, match="a rule that takes no derivative itself"):
        tf.function(jvp(tf.function(op), 3.0))(x)


@every_mode
def test_forward_over_forward(mode: Any) -> None:
    x = tf.constant(2.0)
    fourth = lambda x: tf.square(square(x))
    assert mode(jvp(jvp(fourth, 3.0), 1.0))(x).numpy() == 3 * (2 * 14 * 14 + 2 * 4 * 7)


@eager_and_function
def test_forward_mode_over_a_tape_that_is_asked_twice(mode: Any) -> None:
    @cgshim.op_custom_gradient(forward_mode=True)
    def op(x: Any) -> Any:
        z = x * x
        return z * x, lambda upstream: upstream * 5 * z

    def twice(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = op(x)
        return tf.stack([tape.gradient(y, x), tape.gradient(y, x, output_gradients=10.0)])

    assert mode(jvp(twice, 3.0))(tf.constant(2.0)).numpy().tolist() == [3 * 20, 3 * 200]


@every_mode
def test_reverse_over_forward(mode: Any) -> None:
    fourth = lambda x: tf.square(square(x))
    assert mode(grad(jvp(fourth, 3.0)))(tf.constant(2.0)).numpy() == 3 * (2 * 14 * 14 + 2 * 4 * 7)


@eager_and_function
def test_a_captured_tensor_with_a_tangent_is_refused(mode: Any) -> None:
    def captures(c: Any) -> Any:
        return cgshim.op_custom_gradient(
            lambda x: (x * c, lambda u: u * c), name="scale", forward_mode=True
        )(tf.constant(2.0))

    with pytest.raises(cgshim.CustomGradientTypeError, match="as an argument"):
        mode(jvp(captures, 1.0))(tf.constant(3.0))


def test_variables_have_tangents() -> None:
    w = tf.Variable(3.0)

    @cgshim.op_custom_gradient(forward_mode=True)
    def scale(x: Any) -> Any:
        return x * w, lambda upstream, variables: (upstream * 7, [upstream * 11])

    with tf.autodiff.ForwardAccumulator(w, tf.constant(2.0)) as accumulator:
        y = scale(tf.constant(5.0))
    assert np.isclose(accumulator.jvp(y), 22)


# --- A tf.function that f or its rule calls --------------------------------------------------------

sine = functools.partial(tf.function, autograph=False)(lambda x: tf.sin(x) * x)
scaled_sine = functools.partial(tf.function, autograph=False)(lambda u, x: 7 * u * tf.sin(x) * x)
CALLING = {
    "f": lambda x: (lambda a: (tf.cos(a), lambda u: 7 * u * a))(sine(x)),
    "its rule": lambda x: (tf.cos(x), lambda u: scaled_sine(u, x)),
}
FIRST = 7 * 2 * np.sin(2.0)
"""the gradient at 2, and its derivatives"""
SECOND = 7 * (np.sin(2.0) + 2 * np.cos(2.0))
THIRD = 7 * (2 * np.cos(2.0) - 2 * np.sin(2.0))


def by_three(fn: Any) -> Any:
    return jvp(fn, 3.0)


ORDERS = {
    "jvp": (by_three, 3 * FIRST),
    "jvp of grad": (lambda op: by_three(grad(op)), 3 * SECOND),
    "jvp of jvp": (lambda op: by_three(by_three(op)), 9 * SECOND),
    "jvp of grad of grad": (lambda op: by_three(grad(grad(op))), 3 * THIRD),
    "jvp of jvp of grad": (lambda op: by_three(by_three(grad(op))), 9 * THIRD),
    "jvp of jvp of jvp": (lambda op: by_three(by_three(by_three(op))), 27 * THIRD),
}


LOST = ("jvp of jvp", "jvp of jvp of grad", "jvp of jvp of jvp")
"""what TensorFlow loses in eager mode, or may lose"""


@eager_and_function
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("caller", CALLING)
def test_f_or_its_rule_calls_a_function(mode: Any, caller: str, order: str) -> None:
    transform, expected = ORDERS[order]
    derivative = mode(transform(cgshim.op_custom_gradient(CALLING[caller], forward_mode=True)))
    x = tf.constant(2.0)
    if caller == "its rule" and order in LOST and mode is MODES["eager"]:
        with pytest.raises(cgshim.TransformationError, match="needs a rule without a function"):
            derivative(x)
        return
    np.testing.assert_allclose(derivative(x), expected, rtol=1e-5)


def test_forward_mode_of_a_jacobian_with_an_intermediate() -> None:
    """TensorFlow takes the jacobian in a graph: tangents that were made there are of eager tensors."""

    @cgshim.op_custom_gradient(forward_mode=True)
    def op(x: Any) -> Any:
        s = tf.sin(x)
        return s * x, lambda u: u * (s * s + 7 * x)

    def jacobian(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = op(x)
        return tape.jacobian(y, x)

    x = np.array([0.5, 2.0])
    expected = np.diag((2 * np.sin(x) * np.cos(x) + 7) * [3.0, 5.0])
    np.testing.assert_allclose(
        jvp(jacobian, [3.0, 5.0])(tf.constant(x, tf.float32)), expected, rtol=1e-5
    )
