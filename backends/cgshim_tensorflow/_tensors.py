"""Tensors whose values are differentiated: dense ones, and composite ones (ragged, sparse, slices)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from cgshim.backend import CustomGradientValueError, Tensor, describe, describe_spec, refusal

_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)


def is_composite(x: object) -> bool:
    return not isinstance(x, (tf.Tensor, tf.Variable)) and isinstance(x, _COMPOSITE)


def plain(x: Tensor) -> Tensor:
    """Return the value of a variable, and any other tensor as it is."""
    return tf.convert_to_tensor(x) if isinstance(x, tf.Variable) else x


def values_of(x: Tensor) -> Tensor:
    """Return the part of a tensor that is differentiated: all of a dense one."""
    if not is_composite(x):
        return x
    return x.flat_values if isinstance(x, tf.RaggedTensor) else x.values


def with_values(x: Tensor, values: Tensor) -> Tensor:
    """Return a tensor like x with other values."""
    if not is_composite(x):
        return values
    if isinstance(x, tf.IndexedSlices):
        return tf.IndexedSlices(values, x.indices, x.dense_shape)
    return x.with_flat_values(values) if isinstance(x, tf.RaggedTensor) else x.with_values(values)


def dense(x: Tensor) -> Tensor:
    """Return slices as a dense tensor, and anything else as it is."""
    return tf.convert_to_tensor(x) if isinstance(x, tf.IndexedSlices) else x


# --- Gradients ------------------------------------------------------------------------------------


def fitting(gradient: Tensor | None, x: Tensor, op: str, name: Callable[[], str]) -> Tensor | None:
    """Return the values of the gradient of x; raise an error if they do not fit those of x.

    The front end has compared the shapes that are known statically. A gradient of a dense tensor
    may be slices.
    """
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices) and not is_composite(x):
        if not gradient.values.shape[1:].is_compatible_with(x.shape[1:]):
            raise _misfit(op, name, x, f"IndexedSlices with the values {describe(gradient.values)}")
        return gradient
    if (is_composite(x) or is_composite(gradient)) and not _has_places_of(gradient, x):
        raise _misfit(op, name, x, f"a {type(gradient).__name__} {describe(gradient)}")
    values, like = values_of(gradient), values_of(x)
    if not values.shape.is_compatible_with(like.shape):
        raise _misfit(op, name, x, describe(values))
    if values.shape.is_fully_defined() and like.shape.is_fully_defined():
        return values
    message = str(_misfit(op, name, x, "another one when it runs"))
    check = tf.debugging.assert_equal(tf.shape(values), tf.shape(like), message)
    with tf.control_dependencies([check]):
        return tf.reshape(values, tf.shape(like))


def _has_places_of(gradient: Tensor, x: Tensor) -> bool:
    """Return False if a gradient is another kind of tensor than x, or has its values elsewhere.

    In a graph the places are not compared.
    """
    if type(gradient) is not type(x):
        return False
    pairs = zip(_places_of(gradient), _places_of(x), strict=False)
    return all(
        a is b
        or not tf.executing_eagerly()
        or (a.shape == b.shape and bool(tf.reduce_all(tf.equal(a, tf.cast(b, a.dtype)))))
        for a, b in pairs
    )


def _places_of(x: Tensor) -> Sequence[Tensor]:
    return x.nested_row_splits if isinstance(x, tf.RaggedTensor) else [x.indices]


def _misfit(op: str, name: Callable[[], str], x: Any, got: str) -> CustomGradientValueError:
    kind = f"be a {type(x).__name__} at the same places" if is_composite(x) else "have its shape"
    must = f"the gradient of {name()} must {kind} {describe_spec(values_of(x).shape, x.dtype)}"
    instead = "sum over what was broadcast (op_sum_to_shape), or broadcast it in the rule"
    return refusal(CustomGradientValueError, op, must=must, got=got, do=instead)
