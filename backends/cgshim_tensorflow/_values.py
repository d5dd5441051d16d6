"""What of a tensor is differentiated: all of it, or of a composite one (ragged, sparse, slices) its values alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

Tensor = Any


def is_composite(x: object) -> bool:
    return isinstance(x, (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices))


def values_of(x: Tensor) -> Tensor:
    """What of x is differentiated."""
    if isinstance(x, tf.RaggedTensor):
        return x.flat_values
    return x.values if is_composite(x) else x


def with_values(x: Tensor, values: Tensor) -> Tensor:
    """A tensor like x around other values."""
    if isinstance(x, tf.RaggedTensor):
        return x.with_flat_values(values)
    if isinstance(x, tf.SparseTensor):
        return x.with_values(values)
    if isinstance(x, tf.IndexedSlices):
        return tf.IndexedSlices(values, x.indices, x.dense_shape)
    return values


def parts_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The plain tensors that tensors are made of."""
    return [part for tensor in tensors for part in tf.nest.flatten(tensor, expand_composites=True)]


def is_eager(tensor: Tensor) -> bool:
    return isinstance(tensor, tf.__internal__.EagerTensor)


def is_differentiable(tensor: Tensor) -> bool:
    """Whether the tensor has a gradient: the floats and the complex numbers."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)
