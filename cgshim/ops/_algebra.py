"""NumPy's statistics, products, linear algebra and Fourier transforms.

They are defined in terms of other functions, for frameworks that lack them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cgshim._dispatch import backend_or_numpy
from cgshim.backend import Axis, Tensor, axes_of
from cgshim.ops._elementwise import ndim, pad, unstack
from cgshim.ops._numpy import fft, linalg, ops, own_function
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


# --- Products -------------------------------------------------------------------------------------


def dot(a: Tensor, b: Tensor) -> Tensor:
    if not ndim(a) or not ndim(b):
        return ops.multiply(a, b)
    return ops.matmul(a, b) if len(b.shape) == 1 else ops.tensordot(a, b, axes=((-1,), (-2,)))


def vdot(a: Tensor, b: Tensor, /) -> Tensor:
    return ops.sum(ops.conj(ops.ravel(a)) * ops.ravel(b))


def vecdot(x1: Tensor, x2: Tensor, /, *, axis: int = -1) -> Tensor:
    return ops.sum(ops.conj(x1) * x2, axis=axis)


def matvec(x1: Tensor, x2: Tensor, /) -> Tensor:
    return ops.matmul(x1, x2[..., None])[..., 0]


def outer(a: Tensor, b: Tensor) -> Tensor:
    return ops.ravel(a)[:, None] * ops.ravel(b)[None, :]


def trace(a: Tensor, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    return ops.sum(ops.diagonal(a, offset=offset, axis1=axis1, axis2=axis2), axis=-1)


def polyval(p: Tensor, x: Tensor) -> Tensor:
    value = ops.zeros_like(x)
    for coefficient in unstack(p):
        value = value * x + coefficient
    return value


def convolve(a: Tensor, v: Tensor, mode: str = "full") -> Tensor:
    if v.shape[0] > a.shape[0]:
        a, v = v, a
    n, m = a.shape[0], v.shape[0]
    padded = pad(a, (m - 1, m - 1))
    full: Tensor = sum(v[at] * padded[m - 1 - at : m - 1 - at + n + m - 1] for at in range(m))
    cut = {"full": (0, n + m - 1), "same": ((m - 1) // 2, (m - 1) // 2 + n), "valid": (m - 1, n)}
    return full[slice(*cut[mode])]


def correlate(a: Tensor, v: Tensor, mode: str = "valid") -> Tensor:
    return convolve(a, ops.flip(ops.conj(v)), mode)


def cov(m: Tensor, *, rowvar: bool = True, bias: bool = False, ddof: int | None = None) -> Tensor:
    x = m if rowvar else ops.transpose(m)
    x = x - ops.mean(x, axis=-1, keepdims=True)
    free = free_of(x.shape[-1], (0 if bias else 1) if ddof is None else ddof)
    return ops.matmul(x, ops.conj(ops.transpose(x))) / free


def corrcoef(x: Tensor, *, rowvar: bool = True) -> Tensor:
    covariances = cov(x, rowvar=rowvar)
    if not ndim(covariances):
        return covariances / covariances
    sizes = ops.sqrt(ops.real(ops.diagonal(covariances)))
    return covariances / sizes[:, None] / sizes


# --- Linear algebra -------------------------------------------------------------------------------


def linalg_norm(x: Tensor, ord: Any = None, axis: Axis = None, keepdims: bool = False) -> Tensor:
    x = as_float(x)
    axes = axes_of(x, axis)
    if ord is None or len(axes) == 1:
        ord = 2 if ord is None else ord
        return linalg_vector_norm(x, axis=axes, keepdims=keepdims, ord=ord)
    moved = ops.moveaxis(x, axes, (-2, -1))  # moveaxis raises ValueError unless there are two axes
    return with_axes(linalg_matrix_norm(moved, ord=ord), x, axes, keepdims)


def linalg_vector_norm(
    x: Tensor, /, *, axis: Axis = None, keepdims: bool = False, ord: Any = 2
) -> Tensor:
    size = ops.absolute(x)
    if ord in (math.inf, -math.inf):
        return (ops.max if ord > 0 else ops.min)(size, axis=axis, keepdims=keepdims)
    if ord == 0:
        return ops.sum(cast(size != 0, dtype(size)), axis=axis, keepdims=keepdims)
    if ord == 2:
        return ops.sqrt(ops.sum(size * size, axis=axis, keepdims=keepdims))
    return ops.power(ops.sum(ops.power(size, float(ord)), axis=axis, keepdims=keepdims), 1.0 / ord)


def linalg_matrix_norm(x: Tensor, /, *, keepdims: bool = False, ord: Any = "fro") -> Tensor:
    if ord == "fro":
        norm = linalg_vector_norm(x, axis=(-2, -1))
    elif ord in ("nuc", 2, -2):
        values = linalg.svdvals(x)
        norm = {"nuc": ops.sum, 2: ops.max, -2: ops.min}[ord](values, axis=-1)
    elif ord in (1, -1, math.inf, -math.inf):
        sums = ops.sum(ops.absolute(x), axis=-2 if abs(ord) == 1 else -1)
        norm = (ops.max if ord > 0 else ops.min)(sums, axis=-1)
    else:
        raise ValueError("Invalid norm order for matrices.")
    return norm[..., None, None] if keepdims else norm


def linalg_matrix_power(a: Tensor, n: int) -> Tensor:
    if n < 0:
        return linalg_matrix_power(linalg.inv(a), -n)
    if n == 0:
        return cast(ops.eye(a.shape[-1]), dtype(a)) + ops.zeros_like(a)
    half = linalg_matrix_power(a, n // 2) if n > 1 else a
    return (
        a if n == 1 else ops.matmul(half, ops.matmul(half, a)) if n % 2 else ops.matmul(half, half)
    )


def linalg_multi_dot(arrays: Sequence[Tensor]) -> Tensor:
    return functools.reduce(ops.matmul, arrays)


def linalg_solve_triangular(
    a: Tensor, b: Tensor, trans: Any = 0, lower: bool = False, unit_diagonal: bool = False
) -> Tensor:
    """Solve with one triangle of a, with SciPy's parameters."""
    if trans in (2, "C"):
        a = ops.conj(a)
    if trans not in (0, "N"):
        a, lower = ops.swapaxes(a, -1, -2), not lower
    if unit_diagonal:
        one = ops.tril(ops.triu(ops.ones_like(a)))
        a = ops.where(one == 1, one, a)
    own = own_function(backend_or_numpy([a, b]), "linalg.solve_triangle")
    if own is None:
        return linalg.solve(ops.tril(a) if lower else ops.triu(a), b)
    return own(a, b[:, None], lower)[:, 0] if len(b.shape) == 1 else own(a, b, lower)


# --- Fourier transforms of real numbers, and along several axes -----------------------------------


def fft_rfft(a: Tensor, n: int | None = None, axis: int = -1, norm: str | None = None) -> Tensor:
    """Return half of a transform of real numbers; the other half is its conjugate."""
    transformed = fft.fft(a, n, axis, norm)
    return ops.take(transformed, np.arange(transformed.shape[axis] // 2 + 1), axis=axis)


def fft_irfft(a: Tensor, n: int | None = None, axis: int = -1, norm: str | None = None) -> Tensor:
    """Return the real part of the waves; each counts twice, unless it is its own conjugate."""
    size = 2 * (a.shape[axis] - 1) if n is None else n
    waves = np.arange(min(size // 2 + 1, a.shape[axis]))
    waves_first = ops.moveaxis(ops.take(a, waves, axis=axis), axis, -1)
    weights = cast(np.where(2 * waves % size, 2.0, 1.0), dtype(a))
    return ops.moveaxis(ops.real(fft.ifft(waves_first * weights, size, -1, norm)), -1, axis)


def _over_axes(
    of_last: Callable[..., Tensor],
    of_others: Callable[..., Tensor],
    a: Tensor,
    s: Any = None,
    axes: Any = None,
    norm: str | None = None,
) -> Tensor:
    """Transform along each of the axes."""
    axes = range(-len(a.shape if s is None else s), 0) if axes is None else axes
    sizes = [None] * len(axes) if s is None else s
    for axis, n in zip(axes[:-1], sizes[:-1], strict=True):
        a = of_others(a, n, axis, norm)
    return of_last(a, sizes[-1], axes[-1], norm)


WITH_PARAMETERS = {
    "nansum": _of_the_rest("sum", 0.0),
    "nanprod": _of_the_rest("prod", 1.0),
    "nancumsum": _of_the_rest("cumsum", 0.0),
    "nanargmax": _of_the_rest("argmax", -math.inf),
    "nanargmin": _of_the_rest("argmin", math.inf),
    # an empty input gives inf, not NumPy's NaN with a warning
    "nanmax": _of_the_rest("max", -math.inf),
    "nanmin": _of_the_rest("min", math.inf),
    "matrix_transpose": functools.partial(ops.swapaxes, axis1=-1, axis2=-2),
    "linalg.diagonal": functools.partial(ops.diagonal, axis1=-2, axis2=-1),
    "linalg.trace": functools.partial(ops.trace, axis1=-2, axis2=-1),
    "linalg.svdvals": functools.partial(linalg.svd, compute_uv=False),
    "fft.fftn": functools.partial(_over_axes, fft.fft, fft.fft),
    "fft.ifftn": functools.partial(_over_axes, fft.ifft, fft.ifft),
    "fft.rfftn": functools.partial(_over_axes, fft.rfft, fft.fft),
    "fft.irfftn": functools.partial(_over_axes, fft.irfft, fft.ifft),
    "fft.fft2": functools.partial(fft.fftn, axes=(-2, -1)),
    "fft.ifft2": functools.partial(fft.ifftn, axes=(-2, -1)),
    "fft.rfft2": functools.partial(fft.rfftn, axes=(-2, -1)),
    "fft.irfft2": functools.partial(fft.irfftn, axes=(-2, -1)),
}
"""functions that are another function with fixed parameters"""
