"""PyTorch: the way of a call to the host.

Constants go to NumPy and back. All else (a graph that is being made, torch.func, what has no values) sees the operation
of `cgshim_torch._host_operation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

import cgshim_torch._host_program  # noqa: F401  # whose operations a program may name that another process has compiled
from cgshim_torch._graph import is_transformed, requires_grad
from cgshim_torch._host_names import lent, name_of
from cgshim_torch._host_operation import run
from cgshim_torch._private import fx_is_tracing, jit_is_tracing, len_dispatch_stack
from cgshim_torch._reads import reads_now

if TYPE_CHECKING:
    from cgshim.backend import HostCall, Spec

Tensor = Any


def host_function(call: HostCall, inputs: Sequence[Tensor], declared: Sequence[Spec]) -> Sequence[Tensor]:
    """Return the results of a call, on the device of its first input."""
    results: Sequence[Tensor]
    if torch.compiler.is_dynamo_compiling():
        from cgshim_torch._host_compiled import name_of_traced

        results = torch.ops.cgshim.host(list(inputs), name_of_traced(call, declared))
    elif _in_a_graph() or not all(map(_is_concrete, inputs)):
        results = torch.ops.cgshim.host(list(inputs), name_of(call))
    elif is_transformed() or (torch.is_grad_enabled() and any(map(requires_grad, inputs))):
        with lent(call) as name:
            results = torch.ops.cgshim.host(list(inputs), name)
    elif (reads := reads_now()) is not None:  # a rule that makes a graph: this is NumPy's, of constants
        with torch._C.DisableTorchFunction():
            results = run(call, inputs)
        reads.knows(*results)
    else:
        results = run(call, inputs)
    return results


def _in_a_graph() -> bool:
    """Return True if a graph may be in the making; make_fx before dispatch shows itself only as torch.fx."""
    return bool(len_dispatch_stack() or fx_is_tracing()) or jit_is_tracing()


def _is_concrete(x: Tensor) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_meta
