"""Fourier transforms of real numbers, and along several axes, in terms of those along one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from cgshim.backend import Tensor
from cgshim.ops._numpy import fft, ops
from cgshim.ops._tensors import cast, dtype


def fft_rfft(a: Tensor, n: int | None = None, axis: int = -1, norm: str | None = None) -> Tensor:
    return _half(fft.fft(a, n, axis, norm), axis)


def fft_rfftn(a: Tensor, s: Any = None, axes: Any = None, norm: str | None = None) -> Tensor:
    return _half(fft.fftn(a, s, axes, norm), -1 if axes is None else axes[-1])


def _half(transformed: Tensor, axis: int) -> Tensor:
    """Return what a transform of real numbers has beside its conjugates."""
    return ops.take(transformed, np.arange(transformed.shape[axis] // 2 + 1), axis=axis)


def fft_irfft(a: Tensor, n: int | None = None, axis: int = -1, norm: str | None = None) -> Tensor:
    """Return the real part of the waves; each stands for two but those that have no conjugate."""
    n = 2 * (a.shape[axis] - 1) if n is None else n
    waves = np.arange(min(n // 2 + 1, a.shape[axis]))
    waves_first = ops.moveaxis(ops.take(a, waves, axis=axis), axis, -1)
    weights = cast(np.where(2 * waves % n, 2.0, 1.0), dtype(a))
    return ops.moveaxis(ops.real(fft.ifft(waves_first * weights, n, -1, norm)), -1, axis)


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


OF_SEVERAL_AXES = {
    "fft.fftn": functools.partial(_over_axes, fft.fft, fft.fft),
    "fft.ifftn": functools.partial(_over_axes, fft.ifft, fft.ifft),
    "fft.irfftn": functools.partial(_over_axes, fft.irfft, fft.ifft),
    "fft.fft2": functools.partial(fft.fftn, axes=(-2, -1)),
    "fft.ifft2": functools.partial(fft.ifftn, axes=(-2, -1)),
    "fft.rfft2": functools.partial(fft.rfftn, axes=(-2, -1)),
    "fft.irfft2": functools.partial(fft.irfftn, axes=(-2, -1)),
}
