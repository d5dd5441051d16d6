"""PyTorch: what this backend asks of Dynamo, in the words of each version. Importing Dynamo takes a
second.

Versions that cannot trace an op are made to skip these packages: they look at none of their frames,
and leave the graph at each call of their functions.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch._dynamo
from torch._dynamo import eval_frame, trace_rules
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._functorch.eager_transforms import _autograd_grad
from torch._guards import TracingContext

from cgshim_torch._versions.limits import STAYS_IN_GRAPH

F = TypeVar("F", bound=Callable[..., Any])

assume_constant_result: Any = torch._dynamo.assume_constant_result
"""lets a function run while Dynamo traces a call of it; the result is a constant of the graph"""


def _has_symbols() -> bool:
    fake_mode = TracingContext.get().fake_mode
    return (
        fake_mode is not None
        and fake_mode.shape_env is not None
        and bool(fake_mode.shape_env.backed_var_to_val)
    )


has_symbols = assume_constant_result(_has_symbols)
"""returns True if sizes are symbolic in the function that is being traced"""


def _differentiates_other_graph() -> bool:
    graph = InstructionTranslator.current_tx().output.current_tracer.graph
    calls = [node for node in graph.nodes if node.target is _autograd_grad]
    return any(x.op == "placeholder" for call in calls for x in (*call.args[0], *call.args[1]))


differentiates_other_graph = assume_constant_result(_differentiates_other_graph)
"""returns True if the graph that is being traced, of a backward pass, calls a pullback of torch.func.vjp that
another graph has made: Dynamo hands over the tensors alone, and the gradients would be zero"""

if not STAYS_IN_GRAPH:
    for _package in ("cgshim", "cgshim_torch", "optree"):
        trace_rules.add(_package)


def disabled(function: F, why: str) -> F:
    """Return a function that leaves the graph where it is called; Dynamo's error for a whole graph
    says why.
    """
    reason = {"reason": f"cgshim: {why}"} if STAYS_IN_GRAPH else {}  # which 2.6 does not take
    return torch._dynamo.disable(function, **reason)  # type: ignore[no-any-return]


def run_whole(code: CodeType) -> None:
    """Let frames of this code, and all that they call, run as in eager mode, unless Dynamo traces
    their caller.
    """
    if STAYS_IN_GRAPH:  # else this code is in a package that is skipped
        from torch._dynamo.types import FrameAction, FrameExecStrategy

        eval_frame.set_code_exec_strategy(
            code, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
        )


_BY_VARIABLES = "torch.compile cannot trace a derivative by variables; pass them as arguments"


def _outside(vjp: Callable[..., Any], *args: Any) -> Any:
    outputs, pullback = vjp(*args)
    return outputs, disabled(pullback, _BY_VARIABLES)


vjp_outside_of_the_graph = disabled(_outside, _BY_VARIABLES)
"""returns the outputs and the pullback of a vjp, which Dynamo cannot trace: by tensors that are no arguments"""
