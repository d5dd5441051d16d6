"""The part of a tensor that is differentiated: all of it, or the values of a composite one (ragged,
sparse, slices).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from cgshim_tensorflow._private import EagerTensor, context, record, same_memory

Tensor = Any


def is_composite(x: object) -> bool:
    """Return True if x is a ragged or a sparse tensor, or slices of one."""
    # nearly always so; the classes below have a slow __instancecheck__
    if isinstance(x, tf.Tensor):
        return False
    return isinstance(x, (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices))


def values_of(x: Tensor) -> Tensor:
    """Return what is differentiated in x."""
    if isinstance(x, tf.Tensor):
        return x
    if isinstance(x, tf.RaggedTensor):
        return x.flat_values
    return x.values if is_composite(x) else x


def with_values(x: Tensor, values: Tensor) -> Tensor:
    """Return a tensor like x with other values."""
    if isinstance(x, tf.Tensor):
        return values
    if isinstance(x, tf.RaggedTensor):
        return x.with_flat_values(values)
    if isinstance(x, tf.SparseTensor):
        return x.with_values(values)
    if isinstance(x, tf.IndexedSlices):
        return tf.IndexedSlices(values, x.indices, x.dense_shape)
    return values


def detached(x: Tensor) -> Tensor:
    """Return an eager tensor in the memory of x that no tape and no accumulator follows; in a
    graph, x itself.
    """
    if not tf.executing_eagerly():
        return x
    values = values_of(x)
    # a listener is told of an operation that makes the new tensor
    nobody_listens = not context.context().op_callbacks
    # a handle is more than its value
    if nobody_listens and is_eager(values) and values._handle_data is None:
        with contextlib.suppress(Exception):  # of a custom device, which may not copy to itself
            return with_values(x, same_memory(values))
    with record.stop_recording():
        return with_values(x, tf.identity(values))


def parts_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the plain tensors of which tensors are made."""
    if all(isinstance(tensor, tf.Tensor) for tensor in tensors):
        return list(tensors)
    return [part for tensor in tensors for part in tf.nest.flatten(tensor, expand_composites=True)]


def is_eager(tensor: Tensor) -> bool:
    """Return True if the tensor belongs to no graph."""
    return isinstance(tensor, EagerTensor)


def is_differentiable(tensor: Tensor) -> bool:
    """Return True if the tensor has a gradient: the floats and the complex numbers."""
    dtype = tensor.dtype
    return bool(dtype.is_floating or dtype.is_complex)
