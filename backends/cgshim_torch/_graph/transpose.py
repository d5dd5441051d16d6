"""PyTorch: the transpose of a linear function, which is seen to be linear: forward mode by a rule,
and reverse mode by a jvp_fn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from cgshim.backend import Tensor
from cgshim_torch._graph.levels import is_batch_of_none, levels
from cgshim_torch._graph.walk import has_values, is_captured
from cgshim_torch._versions.private import disable_proxy_modes_tracing, functorch, get_proxy_mode

_PLAIN = (torch.Tensor, torch.nn.Parameter)
FACTOR = -256.0
"""a power of two, by which what is linear is larger to the last bit, as far as it multiplies and adds"""


def transposed_by(
    vjp: Callable[..., Any], fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor],
    upstreams: Sequence[Tensor], output: Tensor, refuse: Callable[[str], NoReturn], what: str,
) -> Sequence[Tensor]:  # fmt: skip
    """Return the transpose of a linear function of tensors like the inputs, at upstreams; refuse
    one that is not linear, as what it is shows. output has the dtype of an output of the op.

    The transpose of a linear function is the same everywhere: it is taken at a small point. It must
    be the same at another; the values at both, and at FACTOR times the first, must fit it (they do
    not, where NumPy computes one). A graph of torch.compile has no values, nor has a batch of none,
    whose tensors torch does not compare with numbers.
    """
    points = [ramp(x, at) for at, x in enumerate(inputs)]
    small, pullback = vjp(fn, points)
    transpose: Sequence[Tensor] = pullback(tuple(upstreams))
    if torch.compiler.is_dynamo_compiling() or any(map(is_batch_of_none, (*transpose, *small))):
        return transpose
    checked = transpose
    # of torch.autograd.functional: they cannot be looked at
    if any(map(functorch.is_legacy_batchedtensor, upstreams)):
        upstreams = list(map(ramp, small))
        checked = pullback(tuple(upstreams))
    _, elsewhere = vjp(fn, [across(x, at) for at, x in enumerate(points)])
    there = elsewhere(tuple([u.detach() for u in upstreams]))
    with torch.no_grad():
        large = fn(*[FACTOR * x for x in points])
    if not (
        all(map(is_multiple, small, large))
        and all(map(is_same, checked, there))
        and is_transpose(checked, points, small, upstreams, output)
    ):
        refuse(f"one that is not, as its {what} show")
    return transpose


def ramp(like: Tensor, place: int = 0) -> Tensor:
    """Return small, different upstreams, and different ones at each place: they show a rule that
    sorts or rounds them, or adds something.
    """
    first = (1 + place / 4) / 128
    dtype = like.real.dtype if like.is_complex() else like.dtype
    raw = like if torch.compiler.is_dynamo_compiling() else levels(like)[-1]
    if type(raw) in _PLAIN:
        ramp = torch.arange(like.numel(), dtype=dtype, device=like.device)
    else:
        ramp = torch.ones_like(like, dtype=dtype, requires_grad=False).reshape(-1).cumsum(0)
    ramp.mul_(first / max(like.numel(), 1))
    ramp = ramp.add_(first).reshape(like.shape)
    return torch.complex(ramp, ramp / 2) if like.is_complex() else ramp


def across(point: Tensor, place: int) -> Tensor:
    """Return upstreams that are no multiple of those of ramp, of other signs: what is linear has the
    same derivative there. A length has not, though it is a multiple where its vector is.
    """
    flipped = point if point.numel() == 1 else point.reshape(-1).flip(0).reshape(point.shape)
    return -flipped if place % 2 else flipped


def is_multiple(small: Tensor, large: Tensor) -> bool:
    """Return True if the gradients at the larger upstreams are larger by the same factor."""
    return is_same(FACTOR * small.detach(), large)


def is_same(here: Tensor, there: Tensor) -> bool:
    """Return True if derivatives at two points are the same, or are no numbers in both."""
    here, there = _dense(here), _dense(there)
    if not here.numel():
        return True
    difference, size = (here - there).abs(), here.abs().amax() + there.abs().amax()
    is_missing = here.isnan() != there.isnan()
    return not _is_true(is_missing | (difference > _tolerance(here) * size))


def is_transpose(
    gradients: Sequence[Tensor],
    tangents: Sequence[Tensor],
    pushed: Sequence[Tensor],
    upstreams: Sequence[Tensor],
    output: Tensor,
) -> bool:
    """Return True if gradients times tangents equal pushed tangents times upstreams, as far as the
    dtype of an output allows.
    """
    products = [
        *[_product(g, t) for g, t in zip(gradients, tangents, strict=True)],
        *[-_product(p, u) for p, u in zip(pushed, upstreams, strict=True)],
    ]
    total, size = sum(p.sum() for p in products), sum(p.abs().sum() for p in products)
    difference = abs(total.real)
    return not _is_true(difference > _tolerance(output) * size)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return products of whose sum the real part is the real inner product."""
    return _dense(a) * _dense(b).conj()


def _dense(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor, without derivatives."""
    return tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()


def _tolerance(tensor: Tensor) -> float:
    """Return what may be wrong relative to what is compared: a linear rule may be a solver that
    stops early.
    """
    return 0.01 if tensor.dtype.itemsize > 2 else 0.1


def _is_true(condition: Tensor) -> bool:
    """Return True if a condition holds for any element of a batch; False if it has no values."""
    condition = levels(condition)[-1]
    if not has_values(condition) or torch.compiler.is_compiling() or is_captured(condition):
        return False
    # torch.func.linearize
    with disable_proxy_modes_tracing() if get_proxy_mode() else contextlib.nullcontext():
        return bool(condition.any())
