"""PyTorch: check if two runs of a function made the same tensor."""

from __future__ import annotations

from typing import Any

import torch

from cgshim_torch._graph import has_values

Tensor = Any

ULPS = 8
"""how many units in the last place the order of sums may change"""


def agree(a: Tensor, b: Tensor) -> bool:
    """Return True if tensors are equal except for the order of sums, or hold no values; False if not comparable."""
    a, b = a.detach(), b.detach()
    if type(a) is not type(b) or any(getattr(a, name) != getattr(b, name) for name in ("dtype", "layout", "device")):
        return False
    if not a.is_nested and a.shape != b.shape:
        return False
    if not has_values(a):
        return True
    try:
        return _agree(a, b)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False


def _agree(a: Tensor, b: Tensor) -> bool:
    mine, others = _taken_apart(a), _taken_apart(b)
    if mine is None or others is None:
        return _close(a, b)
    (parts, around), (other_parts, other_around) = mine, others
    return len(parts) == len(other_parts) and bool(around == other_around) and all(map(agree, parts, other_parts))


def _taken_apart(tensor: Tensor) -> tuple[list[Tensor], Any] | None:
    """Return the tensors that a tensor is made of, and what is around them; None for a plain tensor in memory."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, around = tensor.__tensor_flatten__()
        return [getattr(tensor, name) for name in names], (names, around)
    if type(tensor) is not torch.Tensor:
        return [tensor.as_subclass(torch.Tensor)], None
    if tensor.is_nested:
        return list(tensor.unbind()), None
    if tensor.is_quantized:
        return [tensor.int_repr(), tensor.dequantize()], None
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        return [whole.indices(), whole.values()], None
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()], None
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()], None
    if tensor.layout is not torch.strided:
        return [tensor.to_dense()], None
    return None


def _close(a: Tensor, b: Tensor) -> bool:
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    tolerance = min(ULPS * torch.finfo(a.dtype).eps, 0.05)  # none if one ulp is more than that
    if a.is_floating_point() and a.dtype.itemsize <= 2:
        a, b = a.float(), b.float()
    return bool(torch.isclose(a, b, rtol=tolerance, atol=0.0, equal_nan=True).all())
