"""PyTorch: a call that Dynamo traces for torch.compile; the first one imports this, because Dynamo
takes a second.

Dynamo can trace a rule that ctx holds, and itself saves what the rule's closure holds. What it
cannot trace leaves the graph: it would drop a custom backward under the transformations of
torch.func (PyTorch issues 186303, 192985 and 193279), it cannot name the variables that f reads,
and it silently loses the error for a refused derivative if the backward pass reads none of the
inputs (181581).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from cgshim.backend import (
    Call,
    CustomGradient,
    Tensor,
    output_without_rule,
)
from cgshim_torch._compile.dynamo import (
    assume_constant_result,
    differentiates_other_graph,
    disabled,
    has_symbols,
    run_whole,
)
from cgshim_torch._compile.guards import forget_our_own
from cgshim_torch._compile.staged import without_gradient
from cgshim_torch._eager.attach import Outputs, differentiable
from cgshim_torch._eager.run import Autocast, Run, autocast_state, device_types, under_autocast
from cgshim_torch._graph.levels import is_transformed

untraced: Callable[..., Any] = disabled(
    lambda function, *args: function(*args), "Dynamo has left the graph already"
)
"""calls a function of which Dynamo sees nothing"""
_transformed = disabled(
    differentiable,
    "torch.compile would drop the rule of an op under torch.func; compile inside of it",
)
_with_variables = disabled(
    differentiable, "torch.compile cannot name the variables that f reads; pass them as arguments"
)
_once = disabled(differentiable, "torch.compile would lose that a gradient is once_differentiable")
_in_forward_mode = disabled(
    output_without_rule, "torch.compile would drop the tangents of what runs on the host"
)
_with_pullback: Callable[[], None] = disabled(
    lambda: None, "torch.compile would lose a pullback that f has made; call op_vjp in the rule"
)
_is_transformed = assume_constant_result(is_transformed)


def _run_calls_whole() -> bool:
    """Let Dynamo trace a call in the graph of its caller or not at all: then it runs as in eager
    mode.

    Otherwise Dynamo would compile it up to the place that it cannot trace, when f has already run.
    The same is true of a backward pass. torch._dynamo.reset() may undo this, so each traced call
    does it again.
    """
    for function in (CustomGradient.__call__, CustomGradient.__get__, Run.gradients):
        run_whole(function.__code__)
    return True


_run_calls_whole()
calls_run_whole = assume_constant_result(_run_calls_whole)


def traced(call: Call, inputs: Sequence[Tensor], without_rule: bool) -> Any:
    """Return f's output, with the rule for its gradient if it has one, in the graph that is being
    traced if possible.
    """
    calls_run_whole()
    if not without_rule:
        outputs, spec = _in_graph_if_possible(call, inputs)
        output = spec.combine(outputs)
    elif forward_ad._current_level >= 0:
        output = _in_forward_mode(call, inputs)
    else:
        output = output_without_rule(call, inputs)
    forget_our_own()
    return output


def _in_graph_if_possible(call: Call, inputs: Sequence[Tensor]) -> Outputs:
    # Dynamo compiles anew where a level that it read changes
    if forward_ad._current_level >= 0 or _is_transformed():
        return _transformed(call, inputs)
    if not torch.is_grad_enabled():
        outputs, rule = call.with_needs_input_grad([False] * len(inputs))(inputs)
        return outputs, rule.output
    if torch.compiler.is_exporting():
        return without_gradient(call, inputs)
    differentiated = any(x.requires_grad for x in inputs)
    if differentiated and call.once_differentiable:
        return _once(call, inputs)
    detached = [x.detach() for x in inputs] if differentiated else inputs
    outputs, rule = call.with_needs_input_grad([x.requires_grad for x in inputs])(detached)
    if any(y.requires_grad for y in outputs):
        return _with_variables(call, inputs)
    if differentiated:
        # an output in an argument's memory is no view for Dynamo: a change in place would reach the
        # argument
        outputs = [
            y.clone() if any(y is x or y._base is x for x in detached) else y for y in outputs
        ]
        autocast = tuple([state for state in autocast_state(_DEVICE_TYPES) if state[2]])
        outputs = _Compiled.apply(rule, autocast, len(inputs), *inputs, *detached, *outputs)
    return outputs, rule.output


class _Compiled(torch.autograd.Function):  # type: ignore[misc]
    """Returns aliases of outputs, whose gradients come from the rule on ctx."""

    @staticmethod
    def forward(
        ctx: Any, rule: Any, autocast: Autocast, inputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.rule = rule
        ctx.autocast = autocast
        ctx.inputs = inputs
        ctx.save_for_backward(*tensors)
        return tuple([y.detach() for y in tensors[2 * inputs :]])

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[: ctx.inputs]
        if has_symbols():
            # Dynamo knows a size in the graph of a backward pass if a tensor in it has the size
            for x in inputs:
                x.detach()
        gradients, _ = under_autocast(
            ctx.autocast, ctx.rule, inputs, upstreams, (), ctx.needs_input_grad[3 : 3 + len(inputs)]
        )
        if differentiates_other_graph():
            _with_pullback()
        return None, None, None, *gradients, *[None for _ in (*inputs, *upstreams)]


_DEVICE_TYPES = device_types()
