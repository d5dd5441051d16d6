"""PyTorch: NumPy's linear algebra and Fourier transforms, and SciPy's special functions, if PyTorch's differ.

What they share with the other functions by NumPy's names comes first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from cgshim.backend import Axis, Tensor, axes_of


def dtype_of(dtype: Any) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    found: torch.dtype = getattr(torch, name)
    return found


def as_float(x: Tensor, dtype: Any = None) -> Tensor:
    """Return x in the dtype; without one, integers in the default float dtype, as torch divides."""
    if dtype is not None:
        return x.to(dtype_of(dtype))
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())


# --- Linear algebra ---------------------------------------------------------------------------------------------


def _in_one_dtype(*tensors: Tensor) -> list[Tensor]:
    """Promote tensors as NumPy does; torch's products need one dtype."""
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    return [tensor.to(dtype) for tensor in tensors]


def np_matmul(x1: Tensor, x2: Tensor, /) -> Tensor:
    return torch.matmul(*_in_one_dtype(x1, x2))


def np_inner(a: Tensor, b: Tensor) -> Tensor:
    return torch.inner(*_in_one_dtype(a, b))


def np_einsum(subscripts: str, /, *operands: Tensor) -> Tensor:
    return torch.einsum(subscripts, *_in_one_dtype(*operands))


def np_tensordot(a: Tensor, b: Tensor, axes: Any = 2) -> Tensor:
    a, b = _in_one_dtype(a, b)
    return torch.tensordot(a, b, axes if isinstance(axes, int) else [_as_list(axis) for axis in axes])


def _as_list(axis: Axis) -> list[int]:
    return list(axis) if isinstance(axis, Iterable) else [axis]


def np_linalg_solve(a: Tensor, b: Tensor) -> Tensor:
    a, b = _in_one_dtype(as_float(a), as_float(b))
    return torch.linalg.solve(a, b) if b.ndim > 1 else torch.linalg.solve(a, b.unsqueeze(-1)).squeeze(-1)


def np_linalg_svd(a: Tensor, full_matrices: bool = True, compute_uv: bool = True) -> Any:
    return tuple(torch.linalg.svd(a, full_matrices)) if compute_uv else torch.linalg.svdvals(a)


def np_linalg_norm(x: Tensor, ord: Any = None, axis: Axis = None, keepdims: bool = False) -> Tensor:
    return torch.linalg.norm(as_float(x), ord, axis, keepdims)


def np_linalg_vector_norm(x: Tensor, /, *, axis: Axis = None, keepdims: bool = False, ord: Any = 2) -> Tensor:
    return torch.linalg.vector_norm(as_float(x), ord, axis, keepdims)


def np_linalg_matrix_norm(x: Tensor, /, *, keepdims: bool = False, ord: Any = "fro") -> Tensor:
    return torch.linalg.matrix_norm(as_float(x), ord, keepdim=keepdims)


# --- Fourier transforms: torch says dim for axis ----------------------------------------------------------------


def _along_axis(name: str) -> Callable[..., Tensor]:
    of = getattr(torch.fft, name)
    return lambda a, n=None, axis=-1, norm=None: of(a, n, axis, norm)


def _alongaxes_of(name: str, default: tuple[int, int] | None) -> Callable[..., Tensor]:
    of = getattr(torch.fft, name)
    return lambda a, s=None, axes=default, norm=None: of(a, s, axes, norm)


for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    globals()[f"np_fft_{_name}"] = _along_axis(_name)
for _name in ("fft2", "ifft2", "rfft2", "irfft2"):
    globals()[f"np_fft_{_name}"] = _alongaxes_of(_name, (-2, -1))
for _name in ("fftn", "ifftn", "rfftn", "irfftn"):
    globals()[f"np_fft_{_name}"] = _alongaxes_of(_name, None)


def np_fft_fftshift(x: Tensor, axes: Axis = None) -> Tensor:
    return torch.fft.fftshift(x, axes)


def np_fft_ifftshift(x: Tensor, axes: Axis = None) -> Tensor:
    return torch.fft.ifftshift(x, axes)


# --- Functions by SciPy's names ---------------------------------------------------------------------------------


def np_special_logsumexp(a: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    return torch.logsumexp(a, axes_of(a, axis), keepdim=keepdims)


def np_special_softmax(x: Tensor, axis: int | None = None) -> Tensor:
    return torch.softmax(x, axis) if axis is not None else torch.softmax(x.reshape(-1), 0).reshape(x.shape)


def np_special_log_softmax(x: Tensor, axis: int | None = None) -> Tensor:
    return torch.log_softmax(x, axis) if axis is not None else torch.log_softmax(x.reshape(-1), 0).reshape(x.shape)


def np_special_gamma(z: Tensor) -> Tensor:
    sign = torch.where((z < 0) & (torch.floor(z) % 2 != 0), -1.0, 1.0).to(z.dtype)
    return sign * torch.exp(torch.lgamma(z))


np_special_psi = torch.special.digamma
