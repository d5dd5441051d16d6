"""The axes of a reduction, as NumPy's functions take them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from cgshim._protocol import Tensor

Axis = Any
"""None for all axes, one axis, or a tuple of axes"""


def axes_of(x: Tensor, axis: Axis) -> tuple[int, ...]:
    """Return the axes, none of them negative."""
    ndim = len(x.shape)
    if axis is None:
        return tuple(range(ndim))
    return tuple([checked_axis(ndim, at) for at in (axis if isinstance(axis, Iterable) else (axis,))])


def checked_axis(ndim: int, axis: int) -> int:
    """Return one of ndim axes, not negative."""
    if not -ndim <= axis < ndim:
        raise np.exceptions.AxisError(axis, ndim)
    return int(axis) % ndim
