"""Tensors and containers that only TensorFlow has."""

from __future__ import annotations

import dataclasses
from typing import Any

import attr
import numpy as np
import pytest
import tensorflow as tf
from tf_modes import eager_and_function, every_mode, grad

import cgshim

TABLE = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


@eager_and_function
def test_indexed_slices_from_a_rule(mode: Any) -> None:
    @cgshim.op_custom_gradient
    def lookup(table: Any, indices: Any) -> Any:
        rule = lambda upstream: (tf.IndexedSlices(upstream * 7, indices, tf.shape(table)), None)
        return tf.gather(table, indices), rule

    def gradient(table: Any) -> Any:
        return grad(lambda table: lookup(table, tf.constant([2, 0, 2])) * [[1.0], [10.0], [100.0]])(
            table
        )

    slices = mode(gradient)(tf.constant(TABLE))
    assert isinstance(slices, tf.IndexedSlices)
    assert tf.convert_to_tensor(slices).numpy().tolist() == [[70, 70], [0, 0], [707, 707]]


@every_mode
def test_indexed_slices_as_upstream(mode: Any) -> None:
    double = cgshim.op_custom_gradient(lambda table: (2 * table, lambda upstream: upstream * 7))
    gradient = mode(grad(lambda table: tf.gather(double(table), [0, 0, 2])))(tf.constant(TABLE))
    assert gradient.numpy().tolist() == [[14, 14], [0, 0], [7, 7]]


@every_mode
def test_unused_outputs_have_upstreams_of_zeros(mode: Any) -> None:
    seen: list[Any] = []

    @cgshim.op_custom_gradient
    def three(x: Any) -> Any:
        def rule(d1: Any, d2: Any, d3: Any) -> Any:
            seen[:] = [(d.dtype, d.shape.as_list()) for d in (d1, d2, d3)]
            return d1 + 7 * d2[0]

        return (x, tf.stack([x, x]), tf.cast(x, tf.int32)), rule

    assert mode(grad(lambda x: three(x)[1] * [3.0, 5.0]))(tf.constant([2.0, 2.0]))[0].numpy() == 21
    assert seen == [(tf.float32, [2]), (tf.float32, [2, 2]), (tf.int32, [2])]
    assert mode(grad(lambda x: three(x)[0] * 3))(tf.constant([2.0, 2.0])).numpy().tolist() == [3, 3]


@eager_and_function
def test_ragged_tensor(mode: Any) -> None:
    square = cgshim.op_custom_gradient(lambda r: (r * r, lambda upstream: upstream * 7.0 * r))

    def gradients(values: Any) -> Any:
        ragged = tf.RaggedTensor.from_row_lengths(values, [2, 0, 1])
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([values, ragged.values])
            y = tf.reduce_sum(square(tf.RaggedTensor.from_row_lengths(values, [2, 0, 1])) * 10.0)
            z = tf.reduce_sum(square(ragged) * 10.0)
        return tape.gradient(y, values), tape.gradient(z, ragged.values)

    for gradient in mode(gradients)(tf.constant([1.0, 2.0, 3.0])):
        assert gradient.numpy().tolist() == [70, 140, 210]


@eager_and_function
def test_sparse_tensor(mode: Any) -> None:
    @cgshim.op_custom_gradient
    def total(sparse: Any) -> Any:
        return tf.sparse.reduce_sum(sparse), lambda upstream: sparse.with_values(
            upstream * 7 * sparse.values
        )

    def gradient(values: Any) -> Any:
        return grad(lambda values: total(tf.SparseTensor([[0, 1], [2, 0]], values, [3, 3])) * 10)(
            values
        )

    assert mode(gradient)(tf.constant([2.0, 3.0])).numpy().tolist() == [140, 210]


@eager_and_function
def test_op_vjp_of_ragged_and_sparse_tensors(mode: Any) -> None:
    def gradients(values: Any) -> Any:
        ragged = tf.RaggedTensor.from_row_lengths(values, [2, 0, 1])
        sparse = tf.SparseTensor([[0], [2], [3]], values, [5])
        fn = lambda r, s, a, b: (
            tf.reduce_sum(r * r) + tf.sparse.reduce_sum(s) * tf.reduce_sum(3 * a)
        )
        _, pullback = cgshim.op_vjp(fn, ragged, sparse, values, values)
        dr, ds, da, db = pullback(tf.constant(10.0))
        return dr.flat_values, ds.values, da, db

    found = mode(gradients)(tf.constant([1.0, 2.0, 3.0]))
    assert [g.numpy().tolist() for g in found] == [[20, 40, 60], [180] * 3, [180] * 3, [0] * 3]


@dataclasses.dataclass
class Point:
    """A dataclass that tells tf.nest its parts."""

    x: Any
    label: str

    def __tf_flatten__(self) -> Any:
        return (self.label,), (self.x,)

    @classmethod
    def __tf_unflatten__(cls, metadata: Any, components: Any) -> Point:
        return cls(components[0], *metadata)


@eager_and_function
def test_a_dataclass_that_tf_nest_knows(mode: Any) -> None:
    @cgshim.op_custom_gradient
    def op(points: Any) -> Any:
        x = points[0].x
        return Point(x * x, "square"), lambda upstream: [Point(upstream.x * 7 * x, points[0].label)]

    gradient = mode(grad(lambda x: op([Point(x, "p")]).x * 10))(tf.constant([2.0, 3.0]))
    assert gradient.numpy().tolist() == [140, 210]


@attr.s
class Scale:
    """A class of attrs, which tf.nest knows too: with a tensor in it, or configuration."""

    factor = attr.ib(converter=lambda factor: factor * 2)
    _label = attr.ib(kw_only=True, default="none")
    steps = attr.ib(init=False, default=3)
    made = 0

    def __attrs_post_init__(self) -> None:
        Scale.made += 1
        self.squared = self.factor * self.factor


@eager_and_function
@pytest.mark.parametrize("nested", [False, True])
def test_configuration_of_attrs_passes_through_as_it_is(nested: bool, mode: Any) -> None:
    scale = Scale(2.0, label="s")
    before = Scale.made

    @cgshim.op_custom_gradient
    def op(x: Any, how: Any) -> Any:
        found = how[0]["how"] if nested else how
        assert found is scale
        return [x * found.squared, found], lambda upstream: (upstream[0] * 7, None)

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, same = op(x, [{"how": scale}] if nested else scale)
            y *= 10
        assert same is scale
        return y, tape.gradient(y, x)

    assert [t.numpy() for t in mode(gradient)(tf.constant(3.0))] == [3 * 16 * 10, 70]
    assert Scale.made == before


@eager_and_function
def test_tensors_in_an_object_of_attrs(mode: Any) -> None:
    @cgshim.op_custom_gradient
    def op(scale: Any) -> Any:
        assert (scale._label, scale.steps) == ("s", 3)
        rule = lambda upstream: [attr.evolve(scale, factor=upstream * 7 / 2)]
        return scale.factor * 5, rule

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = op(Scale(x, label="s")) * 10
        return y, tape.gradient(y, x)

    assert [t.numpy() for t in mode(gradient)(tf.constant(3.0))] == [6 * 5 * 10, 2 * 70]


class Holder(tf.Module):
    """tf.Module wraps the containers among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.items = [tf.Variable(2.0), "static", {"b": tf.Variable(3.0), "a": None}]
        self.pair = (tf.Variable(5.0), [7])


@eager_and_function
def test_containers_of_a_module(mode: Any) -> None:
    holder = Holder()

    @cgshim.op_custom_gradient
    def product(items: Any, pair: Any) -> Any:
        assert [type(items), type(items[2]), type(pair)] == [list, dict, tuple]
        return items[0] * items[2]["b"] * pair[0], lambda u: (
            [u * 7, None, {"a": None, "b": u * 11}],
            (u * 13, None),
        )

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            y = product(holder.items, holder.pair) * 10
        return tape.gradient(y, [holder.items[0], holder.items[2]["b"], holder.pair[0]])

    assert [g.numpy() for g in mode(gradients)()] == [70, 110, 130]


@every_mode
@pytest.mark.parametrize(
    "dtype", [tf.float16, tf.bfloat16, tf.float64, tf.complex64, tf.complex128]
)
def test_dtypes_of_gradients_are_those_of_the_arguments(dtype: Any, mode: Any) -> None:
    op = cgshim.op_custom_gradient(
        lambda x, n: (x * tf.cast(n, x.dtype), lambda u: (tf.cast(u, dtype) * 7, None))
    )
    gradient = mode(grad(lambda x: op(x, tf.constant(3)) * tf.constant(2, dtype)))(
        tf.constant([2, 3], dtype)
    )
    assert gradient.dtype == dtype
    assert np.array_equal(tf.cast(gradient, tf.complex128), [14, 14])


def test_conversions() -> None:
    with cgshim.use_backend("tensorflow"):
        for dtype in ("bfloat16", tf.bfloat16, np.float16, "complex64"):
            for x in (
                1.5,
                [1.5, 2.5],
                np.float64(1.5),
                np.array([1.5]),
                tf.constant(1.5),
                tf.Variable([1.5]),
            ):
                assert cgshim.op_convert_to_tensor(x, dtype).dtype == tf.as_dtype(dtype)
        assert cgshim.op_convert_to_tensor(0.1, "float64").numpy() == 0.1
