"""Checks that a gradient fits its tensor, beyond what static shapes tell.

A composite tensor (ragged, sparse, slices) has its values at places, and the gradient must have its
own at the same ones. Sizes that are known only when a graph runs are checked there: TensorFlow
would broadcast what does not fit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from cgshim.backend import CustomGradientValueError, Tensor, describe, describe_spec, refusal
from cgshim_tensorflow._private import is_compiled_by_xla, record
from cgshim_tensorflow._record import identity, stand_ins
from cgshim_tensorflow._values import DENSE, SLICES, Kind, is_eager, kind_of, values_of

Name = Callable[[], str]
"""what messages call the tensor whose gradient is checked"""


class Fit(NamedTuple):
    """What the gradient of a tensor must look like. It does not keep the values alive."""

    shape: Any
    dtype: Any
    kind: Kind
    places: Sequence[Tensor]
    sizes: Callable[[], Any]
    """returns the shape as numbers, or as a tensor"""

    def values(self, gradient: Tensor | None, op: str, name: Name) -> Tensor | None:
        """Return the gradient of the tensor's values, or slices of it, checked to fit."""
        if gradient is None:
            return None
        if is_eager(gradient) and self.kind is DENSE and gradient.shape == self.shape:
            return gradient  # as nearly all
        kind, values = kind_of(gradient), values_of(gradient)
        # each must have the size of a slice of the tensor
        if kind is SLICES and self.kind is DENSE:
            if self.shape.rank is not None and not values.shape[1:].is_compatible_with(
                self.shape[1:]
            ):
                raise self._other_shape(
                    op, name, f"IndexedSlices with the values {describe(values)}"
                )
            return gradient
        if kind is not self.kind:
            raise self._other_kind(op, name, f"{kind.name} {describe(gradient)}")
        if not values.shape.is_compatible_with(self.shape):
            if self.places:
                raise self._other_kind(op, name, f"one with the values {describe(values)}")
            raise self._other_shape(op, name, describe(values))
        if not (values.shape.is_fully_defined() and self.shape.is_fully_defined()):
            values = self._checked_in_the_run(values, self.sizes(), op, name)
        return (
            self._at_its_places(values, kind.places(gradient), op, name) if self.places else values
        )

    def dense(self, gradient: Tensor | None) -> Tensor | None:
        """Return a checked gradient of the values; what was slices of them, as a tensor."""
        if gradient is None or kind_of(gradient) is not SLICES:
            return gradient
        return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, self.sizes()[0])

    def _checked_in_the_run(self, values: Tensor, expected: Any, op: str, name: Name) -> Tensor:
        message = str(self._other_shape(op, name, "another one when it runs"))
        with tf.name_scope(
            re.sub(r"\W", "_", f"the gradient of {name()} must have its shape", flags=re.ASCII)
        ):
            sizes = tf.shape(values)
            # The slice fails if the assertion does: XLA leaves assertions out, and so does Grappler
            # if an AddN makes it believe them. Nothing is copied; a slice has an unknown size, which
            # is not taken for x's.
            if _is_compiled():
                return _slice_for_xla(values, expected - sizes, expected)
            with _asserting(equal(sizes, expected), message):
                return tf.slice(values, expected - sizes, expected)

    def _at_its_places(
        self, values: Tensor, places: Sequence[Tensor], op: str, name: Name
    ) -> Tensor:
        mismatch = self._other_kind(op, name, "others")
        if len(places) != len(self.places):
            raise mismatch
        for mine, expected in zip(places, self.places, strict=True):
            if not {x._id for x in stand_ins(mine)}.isdisjoint(x._id for x in stand_ins(expected)):
                continue  # they are one, in the graphs around theirs too
            agree = equal(mine, expected)
            if is_eager(agree):
                if not agree:
                    raise mismatch
            elif _is_compiled():
                values = tf.where(agree, values, tf.constant(float("nan"), values.dtype))
            else:
                with _asserting(agree, str(mismatch)):
                    values = tf.identity(values)
        return values

    def _other_shape(self, op: str, name: Name, got: str) -> CustomGradientValueError:
        must = (
            f"the gradient of {name()} must have its shape {describe_spec(self.shape, self.dtype)}"
        )
        instead = "sum over what was broadcast (op_sum_to_shape), or broadcast it in the rule"
        return refusal(CustomGradientValueError, op, must=must, got=got, do=instead)

    def _other_kind(self, op: str, name: Name, got: str) -> CustomGradientValueError:
        must = f"the gradient of {name()} must be {self.kind.expected}"
        return refusal(CustomGradientValueError, op, must=must, got=got, do=self.kind.instead)


def fit_of(x: Tensor) -> Fit:
    """Return what the gradient of x must look like."""
    kind, values = kind_of(x), values_of(x)
    shape = values.shape
    sizes: Callable[[], Any] = lambda: shape
    if not is_eager(values) and not shape.is_fully_defined():
        known = tf.shape(values)  # made now, so that x need not be retained until then
        # XLA knows them, if asked where they are needed
        sizes = functools.partial(tf.shape, values) if _is_compiled() else lambda: known
    return Fit(shape, values.dtype, kind, kind.places(x), sizes)


def _slice_for_xla(values: Tensor, begin: Tensor, size: Tensor) -> Tensor:
    """Return all of the values, with a gradient that is upstream: that of a slice is an operation
    for XLA that has none itself.
    """
    graph = tf.compat.v1.get_default_graph()
    with record.stop_recording(), graph.gradient_override_map({"IdentityN": _OF_ALL}):
        whole, _ = tf.identity_n([tf.slice(values, begin, size), values])
    record.record_operation("Identity", [whole], [values], identity)
    return whole


_OF_ALL = "cgshim-slice-of-all"
tf.RegisterGradient(_OF_ALL)(lambda _, upstream, __: [None, upstream])


def _is_compiled() -> bool:
    return not tf.executing_eagerly() and is_compiled_by_xla(tf.compat.v1.get_default_graph())


def equal(a: Tensor, b: Tensor) -> Tensor:
    """Return a boolean tensor: are two tensors of the same rank equal, in shape too?"""
    a, b = tf.convert_to_tensor(a), tf.convert_to_tensor(b)
    values = tf.reduce_all(
        tf.raw_ops.Equal(x=a, y=tf.cast(b, a.dtype), incompatible_shape_error=False)
    )
    if a.shape.is_fully_defined() and b.shape.is_fully_defined():
        return values if a.shape == b.shape else tf.constant(False)
    return tf.logical_and(values, tf.reduce_all(tf.equal(tf.shape(a), tf.shape(b))))


def _asserting(condition: Tensor, message: str) -> Any:
    """Let what is computed within wait until the condition has been checked."""
    return tf.control_dependencies([tf.debugging.Assert(condition, [message])])
