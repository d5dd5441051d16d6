"""PyTorch: the transformations of torch.func, and dual numbers.

f runs on the inputs as they are, so its residuals are already functions of them at every level. The outputs that the
rule keeps are saved as the Function's own, so that their derivative is the rule's at every level.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from cgshim.backend import refuse_hidden, refuse_host_derivative
from cgshim_torch._graph import (
    is_wrapped_or_requires_grad,
    levels,
    now,
    refuse_captured_tangents,
    requires_grad_at_a_level,
    since,
)
from cgshim_torch._host_tangents import constants_of_host
from cgshim_torch._kept import Gradients, Kept, Saved, called, examined, named, rules
from cgshim_torch._linear import push_forward
from cgshim_torch._once import without_derivative
from cgshim_torch._private import custom_function_call, forward_ad, functorch

if TYPE_CHECKING:
    from cgshim.backend import Call, TreeSpec

Tensor = Any


def transformed(call: Call, inputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], TreeSpec]:
    """Return f's outputs with the rule for their gradient, at every level of the active transformations.

    A detached output has no gradient but the rule's, so a transformation that loses the rule cannot return
    autodiff's.
    """
    if call.takes_needed and forward_ad._current_level < 0:  # forward mode asks the rule for all gradients
        call = call.with_needed([torch.is_grad_enabled() and requires_grad_at_a_level(x) for x in inputs])
    start, before = now(), list(map(_versions, inputs))
    with constants_of_host() as constants:
        outputs, rule = called(call, inputs)
    during = since(start)
    if any(requires_grad_at_a_level(x) and _versions(x) != was for x, was in zip(inputs, before, strict=True)):
        call.refuse_writing()
    kept, others, variables = examined(call, inputs, inputs, during, outputs, rule, is_wrapped_or_requires_grad)
    kept.constants = list(constants.values())
    if call.once_differentiable:  # the gradients must be connected with all of them
        kept.inputs = range(len(inputs))
    _refuse_hidden_batches(kept)
    if forward_ad._current_level >= 0 and not rules.current:
        refuse_captured_tangents(call, outputs, [*inputs, *variables])
    return named(_Transformed, call.name)(kept, *inputs, *others, *[y.detach() for y in outputs]), rule.output


def _versions(tensor: Tensor) -> list[int]:
    """Return how often a tensor was changed in place, at each level of torch.func."""
    return [0 if level.is_inference() else level._version for level in levels(tensor)]


def _refuse_hidden_batches(kept: Kept) -> None:
    """Raise an error if an object holds a tensor of a batch: vmap misses it, and runs the rule at another level."""
    for tensor in kept.hidden():
        if torch.is_tensor(tensor) and any(map(functorch.is_batchedtensor, levels(tensor))):
            refuse_hidden(kept.call, tensor)


def _refuse_constants(kept: Kept, beside: int) -> None:
    """Raise an error if a tangent is missing in what the rule keeps, at more levels than those `beside` it."""
    if len(kept.constants) > beside and (kept.differentiable or kept.hidden()):
        refuse_host_derivative(kept.constants[0])


class _Transformed(torch.autograd.Function):  # type: ignore[misc]
    """Returns aliases of outputs, whose gradients come from a rule, inside the transformations of torch.func."""

    generate_vmap_rule = True

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Do Function.apply without its look at forward's signature, which takes 15 us per call and level."""
        if functorch.maybe_current_level() is None:  # only dual numbers
            return super(torch.autograd.Function, cls).apply(*args)
        return custom_function_call(cls, *args)

    @staticmethod
    def forward(kept: Kept, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([y.detach() for y in tensors[len(tensors) - kept.outputs :]])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        kept, *tensors = inputs
        others = tensors[len(kept.devices) : len(tensors) - kept.outputs]
        saved = [
            *[tensors[at] for at in kept.inputs], *[output[at] for at in kept.residuals.outputs], *others
        ]  # fmt: skip
        ctx.kept = kept
        ctx.others = len(others)
        ctx.save_for_backward(*saved)
        if forward_ad._current_level >= 0:
            ctx.zeros = [functools.partial(torch.zeros, y.shape, dtype=y.dtype, device=y.device) for y in output]
            ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        kept, saved = ctx.kept, ctx.kept.apart(ctx.saved_tensors)
        if forward_ad._current_level >= 0:
            _refuse_constants(kept, beside=0)
        gradients = kept.gradients(saved, upstreams, ctx.needs_input_grad[1 : 1 + len(kept.devices)])
        if kept.call.once_differentiable and (torch.is_grad_enabled() or forward_ad._current_level >= 0):
            gradients = _once(kept, saved, upstreams, gradients)
        return None, *in_place(kept, gradients, ctx.others), *[None] * kept.outputs

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = ctx.kept
        if not kept.call.forward_mode:
            kept.call.refuse_forward_mode("jvp, jacfwd or a dual number")
        _refuse_constants(kept, beside=1)  # the level whose tangents these are
        with forward_ad._set_fwd_grad_enabled(True):  # torch turned it off, also for the outer levels
            here = [_primal(tensor) for tensor in ctx.saved_tensors]
            rule = functools.partial(_rule, kept, kept.apart(here), ctx.others)
            constants = kept.apart([tensor.detach() for tensor in here])
            of_constants = functools.partial(_rule, kept, constants, ctx.others)
            return push_forward(kept.call, rule, of_constants, [zeros() for zeros in ctx.zeros], tangents)


def _once(kept: Kept, saved: Saved, upstreams: Sequence[Tensor], gradients: Gradients) -> Gradients:
    """Return the gradients of a once_differentiable rule; their derivative raises an error."""
    of_inputs, of_variables = gradients
    both = without_derivative(
        kept.call.refuse_second_order, [*of_inputs, *of_variables], [*saved.inputs, *saved.variables, *upstreams]
    )
    return both[: len(of_inputs)], both[len(of_inputs) :]


def _rule(kept: Kept, saved: Saved, others: int, *upstreams: Tensor) -> list[Tensor | None]:
    return in_place(kept, kept.gradients(saved, upstreams), others)


def in_place(kept: Kept, gradients: Gradients, others: int) -> list[Tensor | None]:
    """Return each gradient at the place of its tensor; residuals have none of their own."""
    of_inputs, of_variables = gradients
    of_others: list[Tensor | None] = [None] * others
    for at, gradient in zip(kept.variables, of_variables, strict=True):
        of_others[at] = gradient
    return [*of_inputs, *of_others]


def _primal(tensor: Tensor) -> Tensor:
    """Return tensor without its tangent at this level; torch 2.13 has no batching rule for that."""
    if functorch.is_batchedtensor(tensor):
        batched_at, level = functorch.maybe_get_bdim(tensor), functorch.maybe_get_level(tensor)
        return functorch._add_batch_dim(_primal(functorch.get_unwrapped(tensor)), batched_at, level)
    return forward_ad.unpack_dual(tensor).primal
