"""What the definitions of NumPy's functions share: the axes of a reduction, and floats."""

from __future__ import annotations

import math
from typing import Any

from cgshim.backend import Axis as Axis
from cgshim.backend import Tensor as Tensor
from cgshim.backend import axes_of as axes_of
from cgshim.ops._numpy import ops
from cgshim.ops._tensors import cast, dtype

INEXACT = ("float", "bfloat", "complex")
"""the beginnings of the names of dtypes that have fractions"""


def count_of(x: Tensor, axis: Axis) -> Any:
    """Return how many elements a reduction over these axes combines."""
    sizes = [x.shape[at] for at in axes_of(x, axis)]
    if None in sizes:  # a graph does not know it yet
        return ops.sum(ops.ones_like(as_float(x)), axis=axis, keepdims=True)
    return math.prod(sizes)


def as_float(x: Tensor) -> Tensor:
    """Return x; if it holds integers or booleans, in the dtype of the framework's division."""
    return x if dtype(x).startswith(INEXACT) else ops.true_divide(cast(x, "int64"), 1)


def as_last(x: Tensor, axis: Axis) -> Tensor:
    """Return x with these axes moved to the end and joined into one."""
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
