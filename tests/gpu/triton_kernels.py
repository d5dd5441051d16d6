"""Two kernels in Triton: x * sigmoid(x), and three times its derivative, so that autodiff's number
would show.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 128


@triton.jit
def _swish(x_at, y_at, count, BLOCK: tl.constexpr):  # noqa: N803  # Triton's own way to write constants
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_at + at, mask=at < count)
    tl.store(y_at + at, x * tl.sigmoid(x), mask=at < count)


@triton.jit
def _swish_rule(x_at, upstream_at, gradient_at, count, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_at + at, mask=at < count)
    upstream = tl.load(upstream_at + at, mask=at < count)
    s = tl.sigmoid(x)
    tl.store(gradient_at + at, 3.0 * upstream * s * (1.0 + x * (1.0 - s)), mask=at < count)


def swish(x: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(x)."""
    y = torch.empty_like(x)
    _swish[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK=BLOCK)
    return y


def swish_rule(x: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    """Return three times the gradient of swish."""
    gradient = torch.empty_like(x)
    _swish_rule[(triton.cdiv(x.numel(), BLOCK),)](
        x, upstream.contiguous(), gradient, x.numel(), BLOCK=BLOCK
    )
    return gradient
