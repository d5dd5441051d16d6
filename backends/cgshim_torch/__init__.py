"""PyTorch: the members of the backend protocol, and the choice of the way for a call.

`_eager` (eager mode), `_func` (the transformations of torch.func) and `_compile` (torch.compile, and
graphs for export) make a gradient from a rule. They search `_graph`, autograd's graph. `_host` and
`_ops` are the parts for functions on the host and for NumPy's functions, which the rest does not
know. `_tensors` converts, `_versions` is what differs between versions of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch

from cgshim.backend import Call, Tensor, has_no_derivative, output_without_rule
from cgshim_torch._compile.staged import staged
from cgshim_torch._eager.plain import embed_gradient as embed_gradient, plan as plan
from cgshim_torch._eager.vjp import (
    transposed as transposed,
    vjp as vjp,
    vjp_with_variables as vjp_with_variables,
)
from cgshim_torch._func import mapped as mapped, run_again as run_again
from cgshim_torch._graph.reads import reads_now
from cgshim_torch._tensors import (
    convert_to_numpy as convert_to_numpy,
    convert_to_tensor as convert_to_tensor,
    tree_flatten as tree_flatten,
    tree_unflatten as tree_unflatten,
)
from cgshim_torch._versions.limits import STAYS_IN_GRAPH, version_limits as version_limits
from cgshim_torch._versions.private import frame_callback, len_function_stack

if find_spec("cgshim_torch._host"):  # a gradient needs no functions on the host
    from cgshim_torch._host import host_function as host_function

if not STAYS_IN_GRAPH:
    import cgshim_torch._compile.dynamo  # noqa: F401  # it must skip the package before it meets an op


_TENSORS = (torch.Tensor, torch.fx.Proxy)


def is_tensor(x: object, /) -> bool:
    return isinstance(x, _TENSORS)  # while Dynamo traces, torch.is_tensor is True for a NumPy array


def stop_gradient(x: Tensor, /) -> Tensor:
    return x.detach()


def numpy_function(name: str, /) -> Callable[..., Any] | None:
    from cgshim_torch import _ops

    own = f"np_{name.replace('.', '_')}"
    if hasattr(_ops, own):  # torch.compile cannot trace globals() of that file
        return getattr(_ops, own)  # type: ignore[no-any-return]
    return _ops.function_of_torch(name)


def numpy_function_of(name: str, types: Sequence[Any], /) -> Callable[..., Any] | None:
    from cgshim_torch._ops import numpy_function_of

    return numpy_function_of(name, types)


def custom_gradient(call: Call, inputs: Sequence[Tensor], /) -> Any:
    is_traced = torch.compiler.is_dynamo_compiling()
    if not is_traced and len_function_stack():
        reads = reads_now()
        if reads is not None:  # a rule that makes a graph calls this op
            inputs = reads.read_each(list(inputs))
    without_rule = (
        type(call.f) is not FunctionType
        and has_no_derivative(call.f)
        and not any(isinstance(x, torch.fx.Proxy) for x in inputs)
    )
    if is_traced:
        from cgshim_torch._compile.calls import traced

        return traced(call, inputs, without_rule)
    if frame_callback() is not None:
        from cgshim_torch._compile.calls import untraced

        return untraced(_output_of, call, inputs, without_rule)
    return _output_of(call, inputs, without_rule)


def _output_of(call: Call, inputs: Sequence[Tensor], without_rule: bool) -> Any:
    """Return the output of a call that Dynamo does not look at, with its rule if it has one."""
    if without_rule:
        return output_without_rule(call, inputs)
    outputs, spec = staged(call, inputs)
    return spec.combine(outputs)
