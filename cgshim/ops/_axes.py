"""What the definitions of NumPy's functions share: which axes a reduction goes over, and floats."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from cgshim.ops._numpy import ops
from cgshim.ops._tensors import cast, dtype

Tensor = Any
Axis = Any
"""None for all of them, one axis, or a tuple of them"""
INEXACT = ("float", "bfloat", "complex")
"""how the names of dtypes begin that have fractions"""


def axes_of(x: Tensor, axis: Axis) -> tuple[int, ...]:
    """The axes, none of them negative."""
    ndim = len(x.shape)
    if axis is None:
        return tuple(range(ndim))
    return tuple([checked(ndim, at) for at in (axis if isinstance(axis, Iterable) else (axis,))])


def checked(ndim: int, axis: int) -> int:
    """One of so many axes, not negative."""
    if not -ndim <= axis < ndim:
        raise np.exceptions.AxisError(axis, ndim)
    return int(axis) % ndim


def count_of(x: Tensor, axis: Axis) -> Any:
    """How many elements a reduction over these axes takes together."""
    sizes = [x.shape[at] for at in axes_of(x, axis)]
    if None in sizes:  # a graph does not know it yet
        return ops.sum(ops.ones_like(as_float(x)), axis=axis, keepdims=True)
    return math.prod(sizes)


def as_float(x: Tensor) -> Tensor:
    """x, if it is of integers or booleans, as the framework divides them."""
    return x if dtype(x).startswith(INEXACT) else ops.true_divide(cast(x, "int64"), 1)


def as_last(x: Tensor, axis: Axis) -> Tensor:
    """x with these axes moved to the end and made one."""
    axes = axes_of(x, axis)
    if not axes:
        return ops.reshape(x, (-1,))
    if len(axes) == 1:
        return ops.moveaxis(x, axes[0], -1)
    others = [at for at in range(len(x.shape)) if at not in axes]
    return ops.reshape(ops.transpose(x, (*others, *axes)), (*[x.shape[at] for at in others], -1))


def kept(reduced: Tensor, x: Tensor, axis: Axis, keepdims: bool) -> Tensor:
    for at in sorted(axes_of(x, axis)) if keepdims else ():
        reduced = ops.expand_dims(reduced, at)
    return reduced
