"""NumPy's statistics in terms of its other functions, for frameworks that lack them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from cgshim.backend import Axis, Tensor, axes_of
from cgshim.ops._elementwise import ndim
from cgshim.ops._numpy import ops
from cgshim.ops._tensors import (
    INEXACT,
    as_float,
    as_last,
    cast,
    count_of,
    dtype,
    free_of,
    with_axes,
)


def var(
    a: Tensor,
    axis: Axis = None,
    *,
    ddof: float = 0,
    keepdims: bool = False,
    correction: float | None = None,
) -> Tensor:
    a = as_float(a)
    deviation = ops.absolute(a - ops.mean(a, axis=axis, keepdims=True))
    free = free_of(count_of(a, axis, keepdims), ddof if correction is None else correction)
    return ops.sum(deviation * deviation, axis=axis, keepdims=keepdims) / free


def std(
    a: Tensor,
    axis: Axis = None,
    *,
    ddof: float = 0,
    keepdims: bool = False,
    correction: float | None = None,
) -> Tensor:
    return ops.sqrt(var(a, axis, ddof=ddof, keepdims=keepdims, correction=correction))


def average(
    a: Tensor, axis: Axis = None, weights: Tensor | None = None, *, keepdims: bool = False
) -> Tensor:
    a = as_float(a)
    if weights is None:
        return ops.mean(a, axis=axis, keepdims=keepdims)
    if tuple(weights.shape) != tuple(a.shape):
        (at,) = axes_of(a, axis)
        weights = ops.moveaxis(weights * ops.ones_like(ops.moveaxis(a, at, -1)), -1, at)
    return ops.sum(a * weights, axis=axis, keepdims=keepdims) / ops.sum(
        weights, axis=axis, keepdims=keepdims
    )


def ptp(a: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    return ops.max(a, axis=axis, keepdims=keepdims) - ops.min(a, axis=axis, keepdims=keepdims)


def count_nonzero(a: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    return ops.sum(cast(a != 0, "int64"), axis=axis, keepdims=keepdims)


def quantile(a: Tensor, q: Any, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    """Return quantiles by linear interpolation, NumPy's default."""
    return _quantiles(a, q, 1.0, axis, keepdims)


def _quantiles(a: Tensor, q: Any, whole: float, axis: Axis, keepdims: bool) -> Tensor:
    if ndim(q):
        return ops.stack([_quantiles(a, each, whole, axis, keepdims) for each in q])
    return _quantile(a, float(q) / whole, axis, keepdims)


def _quantile(a: Tensor, q: float, axis: Axis, keepdims: bool) -> Tensor:
    if not 0 <= q <= 1:
        raise ValueError("quantiles must be in the range [0, 1]")
    ordered = ops.sort(as_last(as_float(a), axis), axis=-1)
    place = q * (ordered.shape[-1] - 1)
    below, above = math.floor(place), math.ceil(place)
    low, high = ordered[..., below], ordered[..., above]
    part = place - below  # the difference of infinities is NaN
    between = low * (1 - part) + high * part if part else low
    missing = ops.any(ops.isnan(ordered), axis=-1)  # with a NaN the order means nothing
    return with_axes(
        ops.where(missing, ops.full_like(between, math.nan), between), a, axis, keepdims
    )


def percentile(a: Tensor, q: Any, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    return _quantiles(a, q, 100.0, axis, keepdims)


def median(a: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    return _quantile(a, 0.5, axis, keepdims)


def _without_nan(a: Tensor, instead: float) -> Tensor:
    return (
        ops.where(ops.isnan(a), ops.full_like(a, instead), a) if dtype(a).startswith(INEXACT) else a
    )


def _of_the_rest(name: str, instead: float) -> Callable[..., Tensor]:
    """Return NumPy's function of this name, with NaN replaced by another number."""
    return lambda a, axis=None, **options: getattr(ops, name)(
        _without_nan(a, instead), axis=axis, **options
    )


nansum, nanprod = _of_the_rest("sum", 0.0), _of_the_rest("prod", 1.0)
nancumsum = _of_the_rest("cumsum", 0.0)
nanargmax, nanargmin = _of_the_rest("argmax", -math.inf), _of_the_rest("argmin", math.inf)
# an empty input gives inf, not NumPy's NaN with a warning
nanmax, nanmin = _of_the_rest("max", -math.inf), _of_the_rest("min", math.inf)


def nanmean(a: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    a = as_float(a)
    weights = ops.where(ops.isnan(a), ops.zeros_like(a), ops.ones_like(a))
    return average(_without_nan(a, 0.0), axis, weights, keepdims=keepdims)


def diff(a: Tensor, n: int = 1, axis: int = -1) -> Tensor:
    a = ops.moveaxis(a, axis, -1)
    for _ in range(n):
        a = a[..., 1:] - a[..., :-1]
    return ops.moveaxis(a, -1, axis)


def trapezoid(y: Tensor, x: Tensor | None = None, dx: float = 1.0, axis: int = -1) -> Tensor:
    y = ops.moveaxis(y, axis, -1)
    widths = dx if x is None else diff(x if len(x.shape) == 1 else ops.moveaxis(x, axis, -1))
    return ops.sum(widths * (y[..., 1:] + y[..., :-1]) / 2.0, axis=-1)
