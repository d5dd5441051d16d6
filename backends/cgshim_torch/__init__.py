"""PyTorch: the members of the backend protocol, and the choice of the way for a call.

`cgshim_torch._eager` (eager mode), `cgshim_torch._func` (the transformations of torch.func) and
`cgshim_torch._compiled` (torch.compile) make a gradient from a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from cgshim.backend import output_on_host, runs_on_host
from cgshim_torch._eager import differentiable
from cgshim_torch._graph import is_transformed, requires_grad
from cgshim_torch._host import OnHost, run
from cgshim_torch._host_names import name_of
from cgshim_torch._plain import plan as plan
from cgshim_torch._private import (
    frame_callback,
    fx_is_tracing,
    jit_is_tracing,
    len_dispatch_stack,
    len_function_stack,
)
from cgshim_torch._reads import reads_now
from cgshim_torch._staged import staged
from cgshim_torch._tensors import convert_to_numpy as convert_to_numpy
from cgshim_torch._tensors import convert_to_tensor as convert_to_tensor
from cgshim_torch._tensors import tree_flatten as tree_flatten
from cgshim_torch._tensors import tree_unflatten as tree_unflatten
from cgshim_torch._versions import STAYS_IN_GRAPH
from cgshim_torch._versions import version_limits as version_limits
from cgshim_torch._vjp import transposed as transposed
from cgshim_torch._vjp import vjp as vjp
from cgshim_torch._vjp import vjp_with_variables as vjp_with_variables

if TYPE_CHECKING:
    from cgshim.backend import Call, HostCall, Spec

if not STAYS_IN_GRAPH:
    import cgshim_torch._dynamo  # noqa: F401  # it must skip the package before it meets an op

Tensor = Any


_TENSORS = (torch.Tensor, torch.fx.Proxy)


def is_tensor(x: object, /) -> bool:
    return isinstance(x, _TENSORS)  # while Dynamo traces, torch.is_tensor is True for a NumPy array


def stop_gradient(x: Tensor, /) -> Tensor:
    return x.detach()


def numpy_function(name: str, /) -> Callable[..., Any] | None:
    from cgshim_torch import _numpy

    own = f"np_{name.replace('.', '_')}"
    if hasattr(_numpy, own):  # torch.compile cannot trace globals() of that file
        return getattr(_numpy, own)  # type: ignore[no-any-return]
    return _numpy.function_of_torch(name)


def custom_gradient(call: Call, inputs: Sequence[Tensor], /) -> Any:
    if not torch.compiler.is_dynamo_compiling() and len_function_stack():
        reads = reads_now()
        if reads is not None:  # a rule that makes a graph calls this op
            inputs = reads.read_each(list(inputs))
    if (
        type(call.f) is not FunctionType
        and runs_on_host(call.f)
        and not any(isinstance(x, torch.fx.Proxy) for x in inputs)
    ):
        return _on_host(call, inputs)
    if torch.compiler.is_dynamo_compiling():
        from cgshim_torch._compiled import traced as outputs_of
    elif frame_callback() is not None:
        from cgshim_torch._compiled import untraced as outputs_of
    elif len_function_stack() or len_dispatch_stack() or jit_is_tracing() or fx_is_tracing():
        outputs_of = staged
    else:
        outputs_of = differentiable
    outputs, spec = outputs_of(call, inputs)
    return spec.combine(outputs)


def _on_host(call: Call, inputs: Sequence[Tensor]) -> Any:
    if torch.compiler.is_dynamo_compiling():
        from cgshim_torch._compiled import traced_on_host as output_of
    elif frame_callback() is not None:
        from cgshim_torch._compiled import untraced_on_host as output_of
    else:
        output_of = output_on_host
    return output_of(call, inputs)


def host_function(
    call: HostCall, inputs: Sequence[Tensor], declared: Sequence[Spec]
) -> Sequence[Tensor]:
    """Return the results of a call, on the device of its first input."""
    results: Sequence[Tensor]
    if torch.compiler.is_dynamo_compiling():
        from cgshim_torch._compiled import name_of_traced

        results = torch.ops.cgshim.host(list(inputs), name_of_traced(call, declared))
    elif (
        len_dispatch_stack()
        or jit_is_tracing()
        or fx_is_tracing()
        or not all(map(_is_concrete, inputs))
    ):
        # a graph may be in the making: make_fx before dispatch shows itself as torch.fx alone
        results = torch.ops.cgshim.host(list(inputs), name_of(call))
    else:
        is_differentiated = is_transformed() or (
            torch.is_grad_enabled() and any(map(requires_grad, inputs))
        )
        with torch._C.DisableTorchFunction():
            results = (
                OnHost.apply(call, call.name, *inputs) if is_differentiated else run(call, inputs)
            )
        reads = reads_now()
        if reads is not None:  # a rule that makes a graph cannot see that this is no unknown tensor
            reads.knows(*results)
    return results


def _is_concrete(x: Tensor) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_meta
