"""The names of PyTorch that are not documented, each with its reason. Seen in 2.6 to 2.15."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad as _forward_ad

functorch: Any = torch._C._functorch
"""the levels of torch.func: `autograd.Function` has a second, slower form for them, and the outputs
of an op must have each batch that an argument has"""
forward_ad: Any = _forward_ad
"""documented, except `_current_level`, which is -1 if no dual numbers are in use, and
`_set_fwd_grad_enabled`, without which a `jvp` static method computes no tangents further out"""
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""the public function takes a device type, and costs as much as an operation"""


def is_transformed() -> bool:
    """Return True if a transformation of torch.func, or a level of dual numbers, is active."""
    return functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def is_wrapped(t: torch.Tensor) -> bool:
    """Return True for a tensor of a level of torch.func."""
    return functorch.is_functorch_wrapped_tensor(t)  # type: ignore[no-any-return]


def primal_of(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its tangent; `unpack_dual` has no batching rule (torch 2.13)."""
    if functorch.is_batchedtensor(t):
        inner = primal_of(functorch.get_unwrapped(t))
        dim, level = functorch.maybe_get_bdim(t), functorch.maybe_get_level(t)
        return functorch._add_batch_dim(inner, dim, level)  # type: ignore[no-any-return]
    return _forward_ad.unpack_dual(t).primal  # type: ignore[no-any-return]


def tangent_of(t: torch.Tensor) -> torch.Tensor | None:
    """Return the tangent of a tensor, or of the tensor in a batch; None if it has none."""
    while functorch.is_batchedtensor(t):
        t = functorch.get_unwrapped(t)
    return _forward_ad.unpack_dual(t).tangent  # type: ignore[no-any-return]


def batches_of(t: torch.Tensor) -> set[int]:
    """Return the levels of the vmaps whose batch a tensor has."""
    levels = set()
    while is_wrapped(t):
        if functorch.is_batchedtensor(t):
            levels.add(functorch.maybe_get_level(t))
        t = functorch.get_unwrapped(t)
    return levels
