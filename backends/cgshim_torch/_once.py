"""PyTorch: gradients whose own derivative raises an error as soon as it is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from cgshim_torch._private import custom_function_call, functorch
from cgshim_torch._single import SingleLevelFunction

Tensor = Any
Refuse = Callable[[str], NoReturn]


def without_derivative(
    refuse: Refuse, gradients: Sequence[Tensor | None], connected: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients as functions of the connected tensors; differentiating them raises an error."""
    given = [gradient for gradient in gradients if gradient is not None]
    if any(map(functorch.is_legacy_batchedtensor, given)):  # the batch would not record a Function
        refuse("create_graph with is_grads_batched")
    aliases = iter(_WithoutDerivative.apply(refuse, len(given), *given, *connected) if given else ())
    return [None if gradient is None else next(aliases) for gradient in gradients]


class _WithoutDerivative(torch.autograd.Function):  # type: ignore[misc]
    generate_vmap_rule = True

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Do Function.apply without its look at forward's signature."""
        if functorch.maybe_current_level() is None:
            return super(torch.autograd.Function, cls).apply(*args)
        return custom_function_call(cls, *args)

    @staticmethod
    def forward(refuse: Refuse, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([tensor.view_as(tensor) for tensor in tensors[:count]])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.refuse = inputs[0]

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> NoReturn:
        refuse: Refuse = ctx.refuse
        refuse("reverse mode over its gradient")

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        refuse: Refuse = ctx.refuse
        refuse("forward mode over its gradient")


def anchor(tensors: Sequence[Tensor]) -> Tensor:
    """Return an empty tensor that is a function of tensors and keeps none of them."""
    empty: Tensor = _Anchor.apply(*tensors)
    return empty


class _Anchor(SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> NoReturn:
        raise AssertionError("an anchor connects what is never differentiated")
