"""Checks that a gradient fits its tensor, beyond what static shapes tell.

A composite tensor (ragged, sparse, slices) has its values at places, and the gradient must have its own at the same
ones. Sizes that are known only when a graph runs are checked there: TensorFlow would broadcast what does not fit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from cgshim.backend import CustomGradientValueError, describe, describe_spec, sentence
from cgshim_tensorflow._origins import stand_ins
from cgshim_tensorflow._private import is_compiled_by_xla
from cgshim_tensorflow._values import is_composite, is_eager, values_of

Tensor = Any
Sizes = Callable[[], Tensor]
Name = Callable[[], str]
"""what messages call the tensor whose gradient is checked"""


class Fit:
    """What the gradient of a tensor must look like. It does not keep the tensor's values alive."""

    def __init__(
        self, kind: str, shape: Any, dtype: Any, places: Sequence[Tensor] = (), sizes: Sizes | None = None
    ) -> None:
        self._kind = kind
        self._shape, self._dtype = shape, dtype
        self._places = places
        self._sizes = sizes

    def values(self, gradient: Tensor | None, op: str, name: Name) -> Tensor | None:
        """Return the gradient of the tensor's values, or slices of it, checked to fit."""
        if gradient is None:
            return None
        found = _kind_of(gradient)
        if (found, self._kind) == (_SLICES, _DENSE):
            return self._check_slices(gradient, op, name)
        if found != self._kind:
            self._refuse_kind(op, name, f"{_named(found)} {describe(gradient)}")
        values = self._check_sizes(values_of(gradient), op, name)
        return self._check_places(values, _places_of(gradient), op, name) if self._places else values

    def _check_slices(self, gradient: tf.IndexedSlices, op: str, name: Name) -> tf.IndexedSlices:
        """Check slices of a dense gradient: each must have the size of a slice of the tensor."""
        if self._shape.rank is not None and not gradient.values.shape[1:].is_compatible_with(self._shape[1:]):
            self._refuse_shape(op, name, f"IndexedSlices with the values {describe(gradient.values)}")
        return gradient

    def _check_sizes(self, values: Tensor, op: str, name: Name) -> Tensor:
        if not values.shape.is_compatible_with(self._shape):
            refuse = self._refuse_kind if self._places else self._refuse_shape
            refuse(op, name, f"one with the values {describe(values)}" if self._places else describe(values))
        if self._sizes is None or (values.shape.is_fully_defined() and self._shape.is_fully_defined()):
            return values
        expected = self._sizes()
        message = self._shape_message(op, name, "another one when it runs")
        with tf.name_scope(_as_name(f"the gradient of {name()} must have its shape")):
            sizes = tf.shape(values)
            with contextlib.nullcontext() if _is_compiled() else _asserting(_equal(sizes, expected), message):
                # The slice fails if the assertion does: XLA leaves assertions out, and so does Grappler if an AddN
                # makes it believe them. Nothing is copied; a slice has an unknown size, which is not taken for x's.
                return tf.slice(values, expected - sizes, expected)

    def _check_places(self, values: Tensor, places: Sequence[Tensor], op: str, name: Name) -> Tensor:
        if len(places) != len(self._places):
            self._refuse_kind(op, name, _OTHERS)
        for mine, expected in zip(places, self._places, strict=True):
            if _are_the_same(mine, expected):
                continue
            agree = _equal(mine, expected)
            if is_eager(agree):
                if not agree:
                    self._refuse_kind(op, name, _OTHERS)
            elif _is_compiled():
                values = tf.where(agree, values, tf.constant(float("nan"), values.dtype))
            else:
                with _asserting(agree, self._kind_message(op, name, _OTHERS)):
                    values = tf.identity(values)
        return values

    def _refuse_shape(self, op: str, name: Name, got: str) -> NoReturn:
        raise CustomGradientValueError(self._shape_message(op, name, got))

    def _shape_message(self, op: str, name: Name, got: str) -> str:
        rule = f"the gradient of {name()} must have its shape {describe_spec(self._shape, self._dtype)}"
        return sentence(
            op, must=rule, got=got, do="sum over what was broadcast (op_sum_to_shape), or broadcast it in the rule"
        )

    def _refuse_kind(self, op: str, name: Name, got: str) -> NoReturn:
        raise CustomGradientValueError(self._kind_message(op, name, got))

    def _kind_message(self, op: str, name: Name, got: str) -> str:
        expected, instead = _EXPECTED[self._kind]
        return sentence(op, must=f"the gradient of {name()} must be {expected}", got=got, do=instead)


def fit_of(x: Tensor) -> Fit | None:
    """Return what the gradient of x must look like; None if the front end has nothing left to check."""
    if is_eager(x):
        return None
    values = values_of(x)
    return Fit(_kind_of(x), values.shape, values.dtype, _places_of(x), _sizes_of(values))


def fit_of_dense(shape: Any, dtype: Any) -> Fit:
    """Return what the gradient of a dense tensor of known sizes must look like."""
    return Fit(_DENSE, shape, dtype)


# --- Kinds of tensors -----------------------------------------------------------------------------------------------

_DENSE, _RAGGED, _SPARSE, _SLICES = "tensor", "RaggedTensor", "SparseTensor", "IndexedSlices"
_EXPECTED = {
    _DENSE: ("a tensor or IndexedSlices", "make it dense in the rule"),
    _RAGGED: ("a RaggedTensor with its row splits", "make it by with_flat_values of the argument"),
    _SPARSE: ("a SparseTensor with its indices", "make it by with_values of the argument"),
    _SLICES: ("IndexedSlices with its indices", "make them of the indices and the dense_shape of the argument"),
}
_OTHERS = "others"


def _kind_of(x: Tensor) -> str:
    for kind, name in ((tf.RaggedTensor, _RAGGED), (tf.SparseTensor, _SPARSE), (tf.IndexedSlices, _SLICES)):
        if isinstance(x, kind):
            return name
    return _DENSE


def _named(kind: str) -> str:
    return kind if kind == _SLICES else f"a {kind}"


def _places_of(x: Tensor) -> Sequence[Tensor]:
    """Return the tensors that say where a composite tensor has its values."""
    if isinstance(x, tf.RaggedTensor):
        return tuple(x.nested_row_splits)
    return (x.indices,) if is_composite(x) else ()


# --- What only the run of a graph knows -----------------------------------------------------------------------------


def _sizes_of(x: Tensor) -> Sizes:
    """Return a function that makes the sizes of x. XLA knows them as it compiles, if asked where they are needed."""
    if _is_compiled() or x.shape.is_fully_defined():
        return functools.partial(tf.shape, x)
    sizes = tf.shape(x)  # made now, so that x need not be kept until then
    return lambda: sizes


def _is_compiled() -> bool:
    return not tf.executing_eagerly() and is_compiled_by_xla(tf.compat.v1.get_default_graph())


def _are_the_same(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors are one, in the graphs around theirs too."""
    return a is b or not {x._id for x in stand_ins(a)}.isdisjoint(x._id for x in stand_ins(b))


def _equal(a: Tensor, b: Tensor) -> Tensor:
    """Return a boolean tensor: are two tensors of the same rank equal, in shape too?"""
    a, b = tf.convert_to_tensor(a), tf.convert_to_tensor(b)
    values = tf.reduce_all(tf.raw_ops.Equal(x=a, y=tf.cast(b, a.dtype), incompatible_shape_error=False))
    if a.shape.is_fully_defined() and b.shape.is_fully_defined():
        return values if a.shape == b.shape else tf.constant(False)
    return tf.logical_and(values, tf.reduce_all(tf.equal(tf.shape(a), tf.shape(b))))


def _asserting(condition: Tensor, message: str) -> contextlib.AbstractContextManager[Any]:
    """Let what is computed within wait until the condition has been checked."""
    context: contextlib.AbstractContextManager[Any] = tf.control_dependencies(
        [tf.debugging.Assert(condition, [message])]
    )
    return context


def _as_name(text: str) -> str:
    """Return a text in letters that TensorFlow allows in the name of an operation."""
    return "".join([letter if letter.isalnum() else "_" for letter in text])
