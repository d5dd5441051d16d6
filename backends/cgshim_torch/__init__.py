"""PyTorch: the members of the backend protocol, and the choice of the way for a call.

`cgshim_torch._eager` (eager mode), `cgshim_torch._func` (the transformations of torch.func) and
`cgshim_torch._compiled` (torch.compile) make a gradient from a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import optree
import torch
from torch.utils import _pytree as pytree

from cgshim.backend import output_on_host, runs_on_host, tensor_of_call
from cgshim_torch import _trees
from cgshim_torch._eager import differentiable
from cgshim_torch._host import host_function as host_function
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
from cgshim_torch._versions import STAYS_IN_GRAPH
from cgshim_torch._versions import version_limits as version_limits
from cgshim_torch._vjp import vjp as vjp
from cgshim_torch._vjp import vjp_with_variables as vjp_with_variables

if TYPE_CHECKING:
    from cgshim.backend import Call

if not STAYS_IN_GRAPH:
    import cgshim_torch._dynamo  # noqa: F401  # it must skip the package before it meets an op

Tensor = Any


_TENSORS = (torch.Tensor, torch.fx.Proxy)


def is_tensor(x: object, /) -> bool:
    return isinstance(x, _TENSORS)  # while Dynamo traces, torch.is_tensor is True for a NumPy array


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    if torch.compiler.is_dynamo_compiling():
        return _trees.flatten(tree)
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True, namespace=_NAMESPACE)
    nodes = [kind for kind in set(map(type, leaves)) if kind in pytree.SUPPORTED_NODES]
    if not nodes:
        return leaves, structure
    for kind in nodes:
        _register(kind)
    return tree_flatten(tree)


def tree_unflatten(structure: Any, leaves: Sequence[Any], /) -> Any:
    if not isinstance(structure, optree.PyTreeSpec):
        return _trees.unflatten(structure, leaves)
    return optree.tree_unflatten(structure, leaves)


_NAMESPACE = "cgshim_torch"  # in optree's own namespace "torch" the order of a dict's keys would matter


def _register(kind: type) -> None:
    """Let optree take apart a type that is registered with torch's pytree."""
    node = pytree.SUPPORTED_NODES[kind]
    if optree.register_pytree_node.get(kind, namespace=_NAMESPACE) is None:
        optree.register_pytree_node(
            kind, node.flatten_fn, lambda context, children: node.unflatten_fn(list(children), context),
            namespace=_NAMESPACE,
        )  # fmt: skip


def convert_to_tensor(x: Any, /, dtype: Any = None) -> Tensor:
    if isinstance(dtype, str):
        if not hasattr(torch, dtype):
            raise TypeError(f"PyTorch has no dtype {dtype}")
        dtype = getattr(torch, dtype)
    if isinstance(x, (np.ndarray, np.generic)):
        tensor = from_numpy(np.array(x))  # a copy: NumPy's memory may change, or be locked
        if not torch.compiler.is_dynamo_compiling() and (reads := reads_now()) is not None:
            reads.knows(tensor)  # no operation of the rule has made it: it is a constant
        return tensor.to(device_of_call(), dtype)
    return torch.as_tensor(x, dtype=dtype, device=None if isinstance(x, torch.Tensor) else device_of_call())


def device_of_call() -> torch.device | None:
    """Return the device of the running op's first tensor, for what f and grad_fn make; None for torch's default."""
    tensor: Any = tensor_of_call()
    return tensor.device if isinstance(tensor, torch.Tensor) else None


def from_numpy(array: Any) -> Tensor:
    """Return a tensor that shares the memory of an array."""
    if array.dtype.kind == "V" and array.dtype.name == "bfloat16":  # an extension of NumPy, which torch does not know
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def convert_to_numpy(x: Tensor, /) -> Any:
    if x.layout is not torch.strided:
        x = x.to_dense()
    if x.dtype is torch.bfloat16:  # float32 holds each value, and NumPy has no bfloat16 of its own
        x = x.float()
    return x.numpy(force=True)


def stop_gradient(x: Tensor, /) -> Tensor:
    return x.detach()


def numpy_function(name: str, /) -> Callable[..., Any] | None:
    from cgshim_torch._numpy import numpy_function

    return numpy_function(name)


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
        from cgshim_torch._host_compiled import traced as output_of
    elif frame_callback() is not None:
        from cgshim_torch._host_compiled import untraced as output_of
    else:
        output_of = output_on_host
    return output_of(call, inputs)
