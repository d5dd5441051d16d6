"""PyTorch as a backend of cgshim: the members of its protocol.

A rule becomes the backward pass of a torch.autograd.Function: in `_function` for eager mode, in
`_functorch` for torch.func and dual numbers, in `_compile` for torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from cgshim.backend import Call, Tensor, has_no_derivative, output_without_rule
from cgshim_torch._export import exported, is_exporting, recorded
from cgshim_torch._fast_path import PlainCalls
from cgshim_torch._function import attach
from cgshim_torch._functorch import mapped as mapped, transformed
from cgshim_torch._private import is_transformed, skip_packages
from cgshim_torch._tensors import (
    convert_to_numpy as convert_to_numpy,
    convert_to_tensor as convert_to_tensor,
    tree_flatten as tree_flatten,
    tree_unflatten as tree_unflatten,
)
from cgshim_torch._versions import STAYS_IN_GRAPH, version_limits as version_limits
from cgshim_torch._vjp import (
    jvp as jvp,
    transposed as transposed,
    vjp as vjp,
    vjp_with_variables as vjp_with_variables,
)

if find_spec("cgshim_torch._host"):  # a gradient needs no functions on the host
    from cgshim_torch._host import host_function as host_function

if not STAYS_IN_GRAPH:
    # else Dynamo compiles a call up to the first untraceable part
    skip_packages("cgshim", "cgshim_torch", "optree")

supports_variables = True
_TENSORS = (torch.Tensor, torch.fx.Proxy)


def is_tensor(x: object, /) -> bool:
    return isinstance(x, _TENSORS)


def stop_gradient(x: Tensor, /) -> Tensor:
    return x.detach()


def custom_gradient(call: Call, inputs: Sequence[Tensor], /) -> Any:
    if torch.compiler.is_dynamo_compiling():
        from cgshim_torch._compile import traced

        return traced(call, inputs)
    if any(isinstance(x, torch.fx.Proxy) for x in inputs):
        return recorded(call, inputs)
    if has_no_derivative(call.f):
        return output_without_rule(call, inputs)
    if is_exporting():
        return exported(call, inputs)
    return transformed(call, inputs) if is_transformed() else attach(call, inputs)


def plan(call: Call, types: Sequence[type], /) -> Callable[..., Any] | None:
    """Return the fast path for tensors, or a plan that goes straight to `custom_gradient`."""
    if has_no_derivative(call.f) or not all(issubclass(kind, torch.Tensor) for kind in types):
        return None

    if not (
        call.takes_needs_input_grad or call.once_differentiable or call.kind_of_rule.is_transpose
    ):
        return PlainCalls(call)
    return lambda f, args, options: custom_gradient(call.with_f(f, options), args)


def numpy_function(name: str, /) -> Callable[..., Any] | None:
    from cgshim_torch import _ops

    own = f"np_{name.replace('.', '_')}"
    if hasattr(_ops, own):  # torch.compile cannot trace globals() of that module
        return getattr(_ops, own)  # type: ignore[no-any-return]
    return _ops.function_of_torch(name)


def numpy_function_of(name: str, types: Sequence[Any], /) -> Callable[..., Any] | None:
    from cgshim_torch._ops import numpy_function_of

    return numpy_function_of(name, types)
