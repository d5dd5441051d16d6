"""NumPy's products, linear algebra and Fourier transforms in terms of its other functions."""

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
from cgshim.ops._tensors import as_float, cast, dtype, free_of, with_axes


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
    return _half(fft.fft(a, n, axis, norm), axis)


def fft_rfftn(a: Tensor, s: Any = None, axes: Any = None, norm: str | None = None) -> Tensor:
    return _half(fft.fftn(a, s, axes, norm), -1 if axes is None else axes[-1])


def _half(transformed: Tensor, axis: int) -> Tensor:
    """Return half of a transform of real numbers; the other half is its conjugate."""
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
    """Transform along each of the axes, in their order."""
    axes = range(-len(a.shape if s is None else s), 0) if axes is None else axes
    sizes = [None] * len(axes) if s is None else s
    for axis, n in zip(axes[:-1], sizes[:-1], strict=True):
        a = of_others(a, n, axis, norm)
    return of_last(a, sizes[-1], axes[-1], norm)


WITH_PARAMETERS = {
    "matrix_transpose": functools.partial(ops.swapaxes, axis1=-1, axis2=-2),
    "linalg.diagonal": functools.partial(ops.diagonal, axis1=-2, axis2=-1),
    "linalg.trace": functools.partial(ops.trace, axis1=-2, axis2=-1),
    "linalg.svdvals": functools.partial(linalg.svd, compute_uv=False),
    "fft.fftn": functools.partial(_over_axes, fft.fft, fft.fft),
    "fft.ifftn": functools.partial(_over_axes, fft.ifft, fft.ifft),
    "fft.irfftn": functools.partial(_over_axes, fft.irfft, fft.ifft),
    "fft.fft2": functools.partial(fft.fftn, axes=(-2, -1)),
    "fft.ifft2": functools.partial(fft.ifftn, axes=(-2, -1)),
    "fft.rfft2": functools.partial(fft.rfftn, axes=(-2, -1)),
    "fft.irfft2": functools.partial(fft.irfftn, axes=(-2, -1)),
}
"""functions that are another function with fixed parameters"""
