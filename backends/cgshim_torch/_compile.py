"""torch.compile: Dynamo traces f and its rule into the caller's graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cgshim._op import CustomGradient
from cgshim.backend import Call, Tensor, has_no_derivative, output_without_rule
from cgshim_torch._export import exported
from cgshim_torch._function import Run, attach
from cgshim_torch._functorch import Transformed, transformed
from cgshim_torch._private import (
    differentiates_other_graph,
    forward_ad,
    is_transformed,
    skip_as_outermost_frame,
)

_attached = torch.compiler.disable(
    attach, reason="cgshim: f reads variables, or its gradient is once_differentiable"
)
_transformed = torch.compiler.disable(
    transformed, reason="cgshim: torch.compile drops rules under torch.func"
)
_differentiates_other_graph = torch.compiler.assume_constant_result(differentiates_other_graph)
_break_graph = torch.compiler.disable(
    lambda: None, reason="cgshim: torch.compile loses a pullback that f has made"
)
_is_transformed = torch.compiler.assume_constant_result(is_transformed)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def run_calls_whole() -> bool:
    """Let Dynamo trace a call with its caller or not at all; then f and its rule run eagerly.

    Otherwise Dynamo would compile a call up to its first untraceable part, and run f twice. A reset
    of Dynamo undoes this, so each traced call does it again.
    """
    of_ops = (CustomGradient.__call__, CustomGradient.__get__)
    skip_as_outermost_frame([*of_ops, Run.gradients, Transformed.backward, Transformed.jvp])
    return True


def traced(call: Call, inputs: Sequence[Tensor]) -> Any:
    """Return f's output with its rule, if possible in the graph that Dynamo traces."""
    run_calls_whole()
    if has_no_derivative(call.f):
        return output_without_rule(call, inputs)
    # Dynamo guards the level that is read here
    if forward_ad._current_level >= 0 or _is_transformed():
        return _transformed(call, inputs)
    if not torch.is_grad_enabled():
        return call.output_of(inputs)
    if torch.compiler.is_exporting():
        return exported(call, inputs)
    if call.once_differentiable:
        return _attached(call, inputs)
    detached = [x.detach() for x in inputs]
    outputs, rule = call.with_needs_input_grad([x.requires_grad for x in inputs])(detached)
    variables = call.variables
    if not variables and any(y.requires_grad for y in outputs):
        return _attached(call, inputs)  # the op reads undeclared state
    call.require_variables(rule, variables)
    if any(x.requires_grad for x in (*inputs, *variables)):
        outputs = [
            y.clone() if any(y is x or y._base is x for x in detached) else y for y in outputs
        ]
        autocast, counts = _autocast(inputs[0].device.type), (len(inputs), len(variables))
        outputs = Traced.apply(rule, autocast, counts, *inputs, *variables, *detached, *outputs)
    return rule.output.combine(outputs)


class Traced(torch.autograd.Function):  # type: ignore[misc]
    """Return outputs with gradients from the rule on ctx; Dynamo saves the rule's residuals."""

    @staticmethod
    def forward(
        ctx: Any, rule: Any, autocast: Any, counts: tuple[int, int], *tensors: Tensor
    ) -> Any:
        ctx.rule, ctx.autocast, ctx.counts = rule, autocast, counts
        ctx.save_for_backward(*tensors)
        return tuple([y.detach() for y in tensors[2 * counts[0] + counts[1] :]])

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        count, more = ctx.counts
        inputs, variables = ctx.saved_tensors[:count], ctx.saved_tensors[count : count + more]
        for x in inputs:
            x.detach()  # a backward graph needs a tensor of that size to know a symbolic size
        device, dtype, enabled = ctx.autocast
        with torch.autocast(device, dtype, enabled):
            gradients, of_variables = ctx.rule(
                inputs, upstreams, variables, ctx.needs_input_grad[3 : 3 + len(inputs)]
            )
        if _differentiates_other_graph():
            _break_graph()
        return None, None, None, *gradients, *of_variables, *[None for _ in (*inputs, *upstreams)]


def _autocast(device: str) -> tuple[str, torch.dtype, bool]:
    return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
