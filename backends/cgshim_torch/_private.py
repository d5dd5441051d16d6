"""Undocumented names of PyTorch, each with its reason. Seen in 2.6 to 2.15."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad as _forward_ad

functorch: Any = torch._C._functorch
"""the levels of torch.func: `autograd.Function` has a second, slower form for them, and an op's
outputs must have each batch that an argument has
"""
forward_ad: Any = _forward_ad
"""documented, except `_current_level`, which is -1 without dual numbers, and
`_set_fwd_grad_enabled`, without which a `jvp` static method computes no outer tangents
"""
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""the public function needs a device type, and costs as much as an operation"""


def is_transformed() -> bool:
    """Return True if a transformation of torch.func, or a level of dual numbers, is active."""
    return bool(functorch.maybe_current_level() is not None or forward_ad._current_level >= 0)


def is_wrapped(t: torch.Tensor) -> bool:
    """Return True for a tensor of a level of torch.func."""
    return bool(functorch.maybe_get_level(t) != -1)


def is_batched(t: torch.Tensor) -> bool:
    """Return True for a batch of the innermost vmap that a tensor belongs to."""
    return bool(functorch.maybe_get_bdim(t) >= 0)


def is_dead(t: torch.Tensor) -> bool:
    """Return True for a tensor of a level of torch.func that has ended."""
    return bool(functorch.maybe_get_level(t) == -2)


def unwrapped(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the levels of torch.func that have ended."""
    while is_dead(t):
        t = functorch.get_unwrapped(t)
    return t


def primal_of(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its tangent; `unpack_dual` has no batching rule (torch 2.13)."""
    if is_batched(t):
        inner = primal_of(functorch.get_unwrapped(t))
        dim, level = functorch.maybe_get_bdim(t), functorch.maybe_get_level(t)
        return functorch._add_batch_dim(inner, dim, level)
    return _forward_ad.unpack_dual(t).primal


def batches_of(t: torch.Tensor) -> set[int]:
    """Return the vmap levels whose batch a tensor has."""
    levels = set()
    while is_wrapped(t):
        if is_batched(t):
            levels.add(functorch.maybe_get_level(t))
        t = functorch.get_unwrapped(t)
    return levels


def skip_as_outermost_frame(functions: Sequence[Callable[..., Any]]) -> None:
    """Let Dynamo trace functions only where a traced function calls them.

    Dynamo has no public setting for that: `torch.compiler.disable` ends a caller's graph too.
    """
    from torch._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    skip = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    for function in functions:
        set_code_exec_strategy(function.__code__, skip)


def skip_packages(*names: str) -> None:
    """Make Dynamo break the graph at calls of these packages, instead of tracing into them."""
    from torch._dynamo import trace_rules

    for name in names:
        trace_rules.add(name)


def differentiates_other_graph() -> bool:
    """Return True if the traced backward graph calls a pullback of another graph.

    Dynamo passes its tensors without their graph, so the gradients would be zero (torch 2.13).
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator  # slow to import
    from torch._functorch.eager_transforms import _autograd_grad

    graph = InstructionTranslator.current_tx().output.current_tracer.graph
    calls = [node for node in graph.nodes if node.target is _autograd_grad]
    return any(x.op == "placeholder" for call in calls for x in (*call.args[0], *call.args[1]))
