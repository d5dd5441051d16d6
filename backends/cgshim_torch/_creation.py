"""PyTorch: NumPy's functions that make tensors: within f and grad_fn on the device of the op's first tensor."""

from __future__ import annotations

from typing import Any

import torch

from cgshim_torch import device_of_call
from cgshim_torch._algebra import dtype_of

Tensor = Any


def np_full_like(a: Tensor, fill_value: Any, dtype: Any = None) -> Tensor:
    return torch.zeros_like(a, dtype=dtype_of(dtype)) + torch.as_tensor(fill_value, dtype=dtype_of(dtype) or a.dtype)


def np_zeros_like(a: Tensor, dtype: Any = None) -> Tensor:
    return torch.zeros_like(a, dtype=dtype_of(dtype))


def np_ones_like(a: Tensor, dtype: Any = None) -> Tensor:
    return torch.ones_like(a, dtype=dtype_of(dtype))


def np_zeros(shape: Any, dtype: Any = None) -> Tensor:
    return torch.zeros(shape, dtype=dtype_of(dtype), device=device_of_call())


def np_ones(shape: Any, dtype: Any = None) -> Tensor:
    return torch.ones(shape, dtype=dtype_of(dtype), device=device_of_call())


def np_full(shape: Any, fill_value: Any, dtype: Any = None) -> Tensor:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    return torch.full(sizes, fill_value, dtype=dtype_of(dtype), device=device_of_call())


def np_eye(N: int, M: int | None = None, k: int = 0, dtype: Any = None) -> Tensor:  # noqa: N803
    ones = torch.ones((N, N if M is None else M), dtype=dtype_of(dtype), device=device_of_call())
    return torch.triu(torch.tril(ones, k), k)


def np_arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> Tensor:
    start, stop = (0, start) if stop is None else (start, stop)
    return torch.arange(start, stop, step, dtype=dtype_of(dtype), device=device_of_call())


def np_linspace(start: Any, stop: Any, num: int = 50, endpoint: bool = True, *, dtype: Any = None) -> Tensor:
    stop = stop if endpoint else stop - (stop - start) / num
    return torch.linspace(start, stop, num, dtype=dtype_of(dtype), device=device_of_call())


def np_array(object: Any, dtype: Any = None) -> Tensor:
    dtype = dtype_of(dtype)
    if isinstance(object, torch.Tensor):
        return object.clone().to(dtype)
    return torch.tensor(object, dtype=dtype, device=device_of_call())


def np_asarray(a: Any, dtype: Any = None) -> Tensor:
    return a.to(dtype_of(dtype)) if isinstance(a, torch.Tensor) else np_array(a, dtype)


def np_fft_fftfreq(n: int, d: float = 1.0) -> Tensor:
    return torch.fft.fftfreq(n, d, device=device_of_call())


def np_fft_rfftfreq(n: int, d: float = 1.0) -> Tensor:
    return torch.fft.rfftfreq(n, d, device=device_of_call())
