"""The part of a tensor that is differentiated: all of it, or the values of a composite one (ragged,
sparse, slices).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from cgshim.backend import Tensor
from cgshim_tensorflow._private import EagerTensor, context, record, same_memory


class Kind(NamedTuple):
    """What tensors of a class are called, and where they have their values."""

    type: Any
    name: str
    expected: str
    instead: str
    values: Callable[[Tensor], Tensor]
    with_values: Callable[[Tensor, Tensor], Tensor]
    places: Callable[[Tensor], Sequence[Tensor]]


SLICES = Kind(
    tf.IndexedSlices, "IndexedSlices", "IndexedSlices with its indices",
    "make them of the indices and the dense_shape of the argument", lambda x: x.values,
    lambda x, values: tf.IndexedSlices(values, x.indices, x.dense_shape), lambda x: (x.indices,),
)  # fmt: skip
_COMPOSITE = (
    Kind(tf.RaggedTensor, "a RaggedTensor", "a RaggedTensor with its row splits",
         "make it by with_flat_values of the argument", lambda x: x.flat_values,
         lambda x, values: x.with_flat_values(values), lambda x: x.nested_row_splits),
    Kind(tf.SparseTensor, "a SparseTensor", "a SparseTensor with its indices",
         "make it by with_values of the argument", lambda x: x.values,
         lambda x, values: x.with_values(values), lambda x: (x.indices,)),
    SLICES,
)  # fmt: skip
DENSE = Kind(
    tf.Tensor, "a tensor", "a tensor or IndexedSlices", "make it dense in the rule", lambda x: x,
    lambda x, values: values, lambda x: (),
)  # fmt: skip
"""a variable counts as one, too"""


def kind_of(x: object) -> Kind:
    # nearly always so; the classes of the others have a slow __instancecheck__
    if isinstance(x, tf.Tensor):
        return DENSE
    return next((kind for kind in _COMPOSITE if isinstance(x, kind.type)), DENSE)


def is_composite(x: object) -> bool:
    """Return True if x is a ragged or a sparse tensor, or slices of one."""
    return kind_of(x) is not DENSE


def values_of(x: Tensor) -> Tensor:
    """Return what is differentiated in x."""
    return kind_of(x).values(x)


def with_values(x: Tensor, values: Tensor) -> Tensor:
    """Return a tensor like x with other values."""
    return kind_of(x).with_values(x, values)


def detached(x: Tensor) -> Tensor:
    """Return an eager tensor in the memory of x that no tape and no accumulator follows; in a
    graph, x itself.
    """
    if not tf.executing_eagerly():
        return x
    values = values_of(x)
    # a listener sees the operation that makes the new tensor; a handle is more than its value
    if not context.context().op_callbacks and is_eager(values) and values._handle_data is None:
        with contextlib.suppress(Exception):  # of a custom device, which may not copy to itself
            return with_values(x, same_memory(values))
    with record.stop_recording():
        return with_values(x, tf.identity(values))


def parts_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the plain tensors of which tensors are made."""
    if all(isinstance(tensor, tf.Tensor) for tensor in tensors):
        return list(tensors)
    return tf.nest.flatten(list(tensors), expand_composites=True)  # type: ignore[no-any-return]


def is_eager(tensor: Tensor) -> bool:
    """Return True if the tensor belongs to no graph."""
    return isinstance(tensor, EagerTensor)
