"""PyTorch: functions on the host: their runs, their `names` in graphs, and where Dynamo traces them
(`compiled`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cgshim.backend import Tensor
from cgshim.host.backend import HostCall, Spec
from cgshim_torch._graph.levels import is_transformed, requires_grad
from cgshim_torch._graph.reads import reads_now
from cgshim_torch._host.names import name_of
from cgshim_torch._host.run import OnHost, run
from cgshim_torch._versions.private import fx_is_tracing, jit_is_tracing, len_dispatch_stack

_CONCRETE = (torch.Tensor, torch.nn.Parameter)


def host_function(
    call: HostCall, inputs: Sequence[Tensor], declared: Sequence[Spec]
) -> Sequence[Tensor]:
    """Return the results of a call, on the device of its first input."""
    if torch.compiler.is_dynamo_compiling():
        from cgshim_torch._host.compiled import name_of_traced

        return torch.ops.cgshim.host(list(inputs), name_of_traced(call, declared))  # type: ignore[no-any-return]
    if (
        len_dispatch_stack()
        or jit_is_tracing()
        or fx_is_tracing()
        or any(type(x) not in _CONCRETE or x.is_meta for x in inputs)
    ):
        # a graph may be in the making: make_fx before dispatch shows itself as torch.fx alone
        return torch.ops.cgshim.host(list(inputs), name_of(call))  # type: ignore[no-any-return]
    is_differentiated = is_transformed() or (
        torch.is_grad_enabled() and any(map(requires_grad, inputs))
    )
    with torch._C.DisableTorchFunction():
        results: Sequence[Tensor] = (
            OnHost.apply(call, call.name, *inputs) if is_differentiated else run(call, inputs)
        )
    reads = reads_now()
    if reads is not None:  # a rule that makes a graph cannot see that this is no unknown tensor
        reads.knows(*results)
    return results
