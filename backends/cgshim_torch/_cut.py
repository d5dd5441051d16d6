"""Detach tensors from their graph, for one derivative."""

from __future__ import annotations

from typing import Any

import torch

from cgshim.backend import Tensor
from cgshim_torch._tensors import alias


class Cut:
    """Detaches tensors from their graph while it is entered.

    An argument may depend on a variable: the variable's own gradient must exclude the part through
    the argument.
    """

    def __init__(self) -> None:
        self.is_closed = False

    def __call__(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return Cuttable.apply(self, x) if x.requires_grad else x

    def __enter__(self) -> None:
        self.is_closed = True

    def __exit__(self, *_: object) -> None:
        self.is_closed = False


class Cuttable(torch.autograd.Function):  # type: ignore[misc]
    """Return an alias of a tensor."""

    @staticmethod
    def forward(ctx: Any, cut: Cut, x: Tensor) -> Tensor:
        ctx.cut = cut
        return alias(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor | None]:
        return None, None if ctx.cut.is_closed else upstream
