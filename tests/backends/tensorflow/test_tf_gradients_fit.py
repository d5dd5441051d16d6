"""A gradient must fit what it is the gradient of: at the same places of a composite tensor, with
the sizes of the run.

TensorFlow matches values by position and broadcasts what is too small, and so does
`tf.custom_gradient`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import eager_and_function, function, grad, jvp, vectorized

import cgshim

VALUES = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def sparse(values: Any, places: Any = ((0, 1), (2, 0), (2, 2))) -> Any:
    return tf.SparseTensor(places, values[:, 0], [3, 3])


def ragged(values: Any, lengths: Any = (2, 0, 1)) -> Any:
    return tf.RaggedTensor.from_row_lengths(values, lengths)


def slices(values: Any, indices: Any = (2, 0, 2)) -> Any:
    return tf.IndexedSlices(values, tf.constant(indices), tf.constant([3, 2]))


def dense(x: Any) -> Any:
    if isinstance(x, tf.RaggedTensor):
        return x.to_tensor()
    return tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else tf.convert_to_tensor(x)


def values_of(x: Any) -> Any:
    return x.flat_values if isinstance(x, tf.RaggedTensor) else x.values


def gradient(
    make: Callable[..., Any], rule: Callable[..., Any], define: Any = cgshim.op_custom_gradient
) -> Any:
    """The gradient, with respect to its values, of a sum over what `make` makes of them, by a rule."""

    def total(x: Any) -> Any:
        return tf.reduce_sum(values_of(x)), lambda upstream: rule(x, upstream)

    op = define(total)
    return grad(lambda values: op(make(values)) * 10)


def seven_times(make: Callable[..., Any], *places: Any) -> Callable[..., Any]:
    """A rule that gives 7 times the values, at other places where these are given."""

    def rule(x: Any, upstream: Any) -> Any:
        values = upstream * 7 * values_of(x)
        return make(values[:, None] if values.shape.rank == 1 else values, *places)

    return rule


@eager_and_function
@pytest.mark.parametrize("make", [sparse, ragged, slices])
def test_the_same_places(make: Any, mode: Any) -> None:
    x, rule = tf.constant(VALUES), seven_times(make)
    expected = 70 * np.array(VALUES) * ([1, 0] if make is sparse else [1, 1])
    np.testing.assert_array_equal(mode(gradient(make, rule))(x), expected)
    if make is ragged:  # the only one of them that tf.custom_gradient takes
        np.testing.assert_array_equal(mode(gradient(make, rule, tf.custom_gradient))(x), expected)


EXPECTED = {sparse: "SparseTensor", ragged: "RaggedTensor", slices: "IndexedSlices"}
OTHER_PLACES: dict[str, Any] = {
    "sparse, another order": (sparse, ((2, 0), (0, 1), (2, 2))),
    "sparse, other places": (sparse, ((0, 0), (1, 1), (2, 2))),
    "ragged": (ragged, (1, 1, 1)),
    "slices, duplicates elsewhere": (slices, (2, 2, 0)),
    "slices, none twice": (slices, (0, 1, 2)),
}


@pytest.mark.parametrize(("make", "places"), OTHER_PLACES.values(), ids=OTHER_PLACES)
def test_other_places_are_refused(make: Any, places: Any) -> None:
    message = f"^total: the gradient of x must be a {EXPECTED[make]} at the same places "
    with pytest.raises(cgshim.CustomGradientValueError, match=message):
        gradient(make, seven_times(make, places))(tf.constant(VALUES))


@eager_and_function
@pytest.mark.parametrize("make", EXPECTED)
def test_another_kind_or_another_count_is_refused(make: Any, mode: Any) -> None:
    fewer = {sparse: ((0, 1), (2, 0)), ragged: (1, 0, 1), slices: (2, 0)}[make]

    def shorter(x: Any, upstream: Any) -> Any:
        return make(tf.ones([2, 2]) * upstream, fewer)

    kinds = {
        "a tensor": lambda x, upstream: dense(x) * upstream,
        "one with the values": shorter,
        "a SparseTensor": lambda x, upstream: tf.sparse.from_dense(dense(x) * upstream),
    }
    for got, rule in kinds.items():
        if (make, got) == (sparse, "a SparseTensor"):
            continue
        message = f"^total: the gradient of x must be a {EXPECTED[make]} at the same places "
        with pytest.raises(cgshim.CustomGradientValueError, match=message):
            mode(gradient(make, rule))(tf.constant(VALUES))


@eager_and_function
def test_a_composite_gradient_of_a_dense_tensor(mode: Any) -> None:
    message = "total: the gradient of x must have its shape f32[3,2], got {} f32[3,2]; "
    kinds = {
        "a SparseTensor": lambda x, upstream: tf.sparse.from_dense(x * upstream),
        "a RaggedTensor": lambda x, upstream: tf.RaggedTensor.from_tensor(
            x * upstream, ragged_rank=1
        ),
    }
    for got, rule in kinds.items():
        op = cgshim.op_custom_gradient(
            lambda x, rule=rule: (x * x, lambda u: rule(x, u)), name="total"
        )
        with pytest.raises(cgshim.CustomGradientValueError) as error:
            mode(grad(lambda x, op=op: op(x)))(tf.constant(VALUES))
        found = re.sub(r"f32\[[3?],\?\]", "f32[3,2]", str(error.value))
        assert found.startswith(message.format(got))


@eager_and_function
@pytest.mark.parametrize("dense_shape", [[3, 2], None])
def test_slices_of_a_dense_gradient(dense_shape: Any, mode: Any) -> None:
    def by(width: int) -> Any:
        def op(x: Any) -> Any:
            shape = None if dense_shape is None else tf.constant(dense_shape)
            return x * x, lambda u: tf.IndexedSlices(
                u[:2, :1] * tf.ones([2, width]), tf.constant([2, 2]), shape
            )

        return mode(grad(cgshim.op_custom_gradient(op, name="total"), of=lambda y: y * 5))

    assert by(2)(tf.constant(VALUES)).values.numpy().tolist() == [[5, 5], [5, 5]]
    with pytest.raises(cgshim.CustomGradientValueError) as error:
        by(3)(tf.constant(VALUES))
    assert str(error.value) == (
        "total: the gradient of x must have its shape f32[3,2], got IndexedSlices with the values f32[2,3]; "
        "sum over what was broadcast (op_sum_to_shape), or broadcast it in the rule"
    )


def test_upstream_of_op_vjp_must_fit_too() -> None:
    def pulled_back(values: Any, places: Any) -> Any:
        _, pullback = cgshim.op_vjp(lambda values: ragged(values * values), values)
        return pullback(ragged(tf.constant(VALUES), places))[0]

    x = tf.constant(VALUES)
    np.testing.assert_array_equal(pulled_back(x, (2, 0, 1)), 2 * np.square(VALUES))
    with pytest.raises(cgshim.CustomGradientValueError, match="op_vjp: the gradient"):
        pulled_back(x, (1, 1, 1))


# --- Sizes that only the run knows ----------------------------------------------------------------

RULES: dict[str, Callable[[Any, Any], Any]] = {
    "fits": lambda x, u: u * 7 * x,
    "summed": lambda x, u: tf.reduce_sum(u * 7 * x, 0, keepdims=True),
    "one row": lambda x, u: tf.reduce_sum(u) * tf.ones(tf.concat([[1], tf.shape(x)[1:]], 0)),
    "transposed": lambda x, u: tf.reshape(u * 7 * x, tf.reverse(tf.shape(x), [0])),
    "twice as many": lambda x, u: tf.concat([u, u], 0),
}
PLACES: dict[str, Callable[[Any], Any]] = {
    "gradient": grad,
    "gradient of a gradient": lambda op: grad(grad(lambda x: op(x * 1.0) * x)),
    "loop": lambda op: grad(
        lambda x: tf.while_loop(
            lambda i, _: i < 2, lambda i, y: (i + 1, op(y)), (0, x), maximum_iterations=2
        )[1]
    ),
    "tf.function": lambda op: grad(function(lambda x: op(x * 1.0))),
    "branch": lambda op: grad(lambda x: tf.cond(tf.size(x) > 0, lambda: op(x), lambda: x)),
}
X = tf.constant([[1.0, 2.0, 4.0], [3.0, 5.0, 7.0]])


RUNS = [(place, False, [None, None]) for place in PLACES]
RUNS += [("gradient", False, None), ("loop", True, [None, None])]
RUNS += [("gradient", True, shape) for shape in (None, [None, None], [None, 3])]
RUNS += [("branch", True, [None, None])]


@pytest.mark.parametrize(("place", "jit_compile", "shape"), RUNS)
@pytest.mark.parametrize("rule", RULES)
def test_sizes_that_only_the_run_knows(
    rule: str, place: str, jit_compile: bool, shape: Any
) -> None:
    def differentiate(define: Any) -> Any:
        op = define(lambda x: (x * x, lambda u: RULES[rule](x, u)))
        signature = [tf.TensorSpec(shape, tf.float32)]
        return function(
            PLACES[place](op), input_signature=signature, jit_compile=jit_compile, autograph=False
        )(X)

    if rule == "fits":
        np.testing.assert_array_equal(
            differentiate(cgshim.op_custom_gradient), differentiate(tf.custom_gradient)
        )
    elif not jit_compile:
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="the gradient of x must have its shape"
        ):
            differentiate(cgshim.op_custom_gradient)
    elif rule != "transposed":  # XLA leaves assertions out, and reshapes what has as many numbers
        with pytest.raises(tf.errors.InvalidArgumentError):
            differentiate(cgshim.op_custom_gradient)


def test_xla_does_not_broadcast_to_another_rank() -> None:
    """A gradient of [3, 3] has the size of the 3 in each of its dimensions."""
    square = lambda x: (x * x, lambda u: u[:, None] * tf.ones_like(x))
    differentiate = function(
        grad(cgshim.op_custom_gradient(square)),
        input_signature=[tf.TensorSpec(None)],
        jit_compile=True,
    )
    with pytest.raises(tf.errors.InvalidArgumentError):
        differentiate(tf.ones(3))


@pytest.mark.parametrize("shape", [None, [None, None]])
@pytest.mark.parametrize(
    "derivative",
    [
        lambda op: jvp(grad(op), np.array([[3.0, 1.0, 2.0]] * 2)),
        lambda op: grad(jvp(op, np.array([[3.0, 1.0, 2.0]] * 2))),
        lambda op: grad(grad(grad(op))),
    ],
    ids=["forward over reverse", "reverse over forward", "third order"],
)
def test_xla_checks_sizes_in_all_orders(derivative: Any, shape: Any) -> None:
    op = cgshim.op_custom_gradient(lambda x: (x**4, lambda u: u * 7 * x**3), forward_mode=True)
    compiled = function(
        derivative(op), input_signature=[tf.TensorSpec(shape, tf.float32)], jit_compile=True
    )
    np.testing.assert_allclose(compiled(X), derivative(op)(X), rtol=1e-6)


def test_the_sentence_of_a_run() -> None:
    op = cgshim.op_custom_gradient(lambda pair: (pair[0] * 2, lambda u: [[u[:1], None]]), name="op")
    differentiate = function(grad(lambda x: op([x, x])), input_signature=[tf.TensorSpec([None, 3])])
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        differentiate(X)
    assert (
        "op: the gradient of pair[0] must have its shape f32[?,3], got another one when it runs; "
        "sum over what was broadcast (op_sum_to_shape), or broadcast it in the rule"
    ) in str(error.value)
    assert differentiate(X[:1]).numpy().tolist() == [[1, 1, 1]]


def test_sizes_that_a_vectorized_map_does_not_know() -> None:
    for rule, fits in ((lambda x, u: u * 7 * x, True), (lambda x, u: tf.concat([u, u], 0), False)):
        op = cgshim.op_custom_gradient(lambda x, rule=rule: (x * x, lambda u: rule(x, u)))
        differentiate = function(
            grad(vectorized(op)), input_signature=[tf.TensorSpec([None, None])]
        )
        if fits:
            np.testing.assert_array_equal(tf.convert_to_tensor(differentiate(X)), 7 * X)
        else:
            with pytest.raises(
                tf.errors.InvalidArgumentError, match="the gradient of x must have its shape"
            ):
                differentiate(X)


@eager_and_function
def test_a_variable_whose_shape_may_change(mode: Any) -> None:
    w = tf.Variable(tf.ones([2, 3]), shape=tf.TensorShape(None))

    def by(rows: int) -> Any:
        def op(x: Any) -> Any:
            return x * tf.reduce_sum(w), lambda u, variables: (u, [u * tf.ones([rows, 3])])

        def gradient(x: Any) -> Any:
            with tf.GradientTape() as tape:
                y = cgshim.op_custom_gradient(op)(x) * 5
            return tape.gradient(y, w)

        return mode(gradient)

    assert by(2)(tf.constant(2.0)).numpy().tolist() == [[5, 5, 5], [5, 5, 5]]
    message = re.escape("op: the gradient of variables[0] must have its shape ")
    with pytest.raises(
        (cgshim.CustomGradientValueError, tf.errors.InvalidArgumentError), match=message
    ):
        by(1)(tf.constant(2.0))
