"""Functions on the host: the run of a call, its derivative, and the operation in graphs.

Constants go to NumPy and back. Taking a derivative raises an error at every level. A traced graph,
and tensors without values, use the operation cgshim::host, which finds the call by its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from cgshim.backend import (
    CustomGradientTypeError,
    Tensor,
    TransformationError,
    is_differentiable,
    refusal,
)
from cgshim.host.backend import HostCall, Spec, refuse_host_derivative
from cgshim_torch import _tensors, _trees as trees
from cgshim_torch._functorch import take_as_constant
from cgshim_torch._host._private import below_autograd, len_dispatch_stack, tags_of_host
from cgshim_torch._host.names import call_of, over
from cgshim_torch._private import forward_ad, functorch, is_transformed

_CPU = torch.device("cpu")
trees.leaf_types |= {Spec}
_BACKEND: Any = _tensors  # a declaration needs only the backend's pytree functions


def run(call: HostCall, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the results for tensors that have values, on the device of the first one."""
    device = inputs[0].device if inputs else _CPU
    try:
        arrays = [_tensors.convert_to_numpy(x) for x in inputs]
    except RuntimeError:
        if any(map(functorch.is_legacy_batchedtensor, inputs)):
            raise refusal(TransformationError, call.name,
                          must="what runs on the host must be given tensors that have values",
                          got="a batch of is_grads_batched, or of vectorize=True",
                          do="use torch.func.vmap, jacrev or jacfwd") from None  # fmt: skip
        raise
    results, declared = call.run_for(inputs, arrays)
    return [_tensor(result, spec, device) for result, spec in zip(results, declared, strict=True)]


def _tensor(array: Any, spec: Spec, device: torch.device) -> Tensor:
    """Return a tensor in the memory of an array if possible; f may have locked it since."""
    dtype = _dtype_of(spec.dtype)
    tensor = _tensors.from_numpy(array if array.flags.writeable else array.copy())
    return tensor if device == _CPU and tensor.dtype is dtype else tensor.to(device, dtype)


@functools.cache
def _dtype_of(name: str) -> torch.dtype:
    """Return the dtype of this NumPy name: "int" is NumPy's int64, and not torch.int."""
    dtype = getattr(torch, name if name == "bfloat16" else np.dtype(name).name, None)
    if not isinstance(dtype, torch.dtype):
        raise refusal(CustomGradientTypeError, "op_host",
                      must="outputs must declare dtypes that torch has", got=name,
                      do="declare another one")  # fmt: skip
    return dtype


# --- The derivative -------------------------------------------------------------------------------


class OnHost(torch.autograd.Function):  # type: ignore[misc]
    """A call, or the call of a name, in autograd and at each level of torch.func."""

    @staticmethod
    def forward(call: HostCall | str, op: str, *inputs: Tensor) -> tuple[Tensor, ...]:
        if isinstance(call, HostCall):
            return tuple(run(call, inputs))
        with below_autograd():
            return tuple(torch.ops.cgshim.host(list(inputs), call))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, ctx.op, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.like = [torch.empty_like(y, device="meta") for y in output]
        if len_dispatch_stack() and not is_transformed():
            ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor | None) -> tuple[Tensor | None, ...]:
        taken = [upstream for upstream in upstreams if upstream is not None]
        if not taken:
            return (None,) * len(ctx.needs_input_grad)
        if not ctx.saved_tensors:
            refuse_host_derivative(ctx.op)
        # torch.compile makes the graph of all derivatives; unused ones get zeros when
        # it runs
        return None, None, *torch.ops.cgshim.zero_upstreams(taken, list(ctx.saved_tensors), ctx.op)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        take_as_constant(functools.partial(refuse_host_derivative, ctx.op))
        return tuple([
            torch.zeros(y.shape, dtype=y.dtype) if is_differentiable(y.dtype) else None
            for y in ctx.like
        ])  # fmt: skip

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], call: HostCall | str, op: str, *inputs: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        batched = [dim is not None for dim in in_dims[2:]]
        moved = [
            x if dim is None else x.movedim(dim, 0)
            for x, dim in zip(inputs, in_dims[2:], strict=True)
        ]
        results = OnHost.apply(
            over(call, batched) if isinstance(call, str) else call.over(batched), op, *moved
        )
        return results, (0,) * len(results)


# --- The operation --------------------------------------------------------------------------------


def _concrete(inputs: Sequence[Tensor], name: str) -> list[Tensor]:
    return run(call_of(name, len(inputs)), inputs)


def _fake(inputs: Sequence[Tensor], name: str) -> list[Tensor]:
    device = inputs[0].device if inputs else None
    specs = [Spec(tuple(x.shape), str(x.dtype).rpartition(".")[2]) for x in inputs]
    declared, _ = call_of(name, len(inputs)).declared(_BACKEND, specs)
    return [
        torch.empty(spec.shape, dtype=_dtype_of(spec.dtype), device=device) for spec in declared
    ]


def _differentiable(inputs: Sequence[Tensor], name: str) -> list[Tensor]:
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if differentiated or forward_ad._current_level >= 0:
        return _transformed(inputs, name)
    with below_autograd():
        return list(torch.ops.cgshim.host.default(inputs, name))


def _transformed(inputs: Sequence[Tensor], name: str) -> list[Tensor]:
    return list(OnHost.apply(name, call_of(name, len(inputs)).name, *inputs))


def _zeros(upstreams: Sequence[Tensor], inputs: Sequence[Tensor], op: str) -> list[Tensor]:
    """Return the gradients of a compiled program for zero upstreams; raise an error for others."""
    if any(map(torch.any, upstreams)):
        refuse_host_derivative(op)
    return list(map(torch.zeros_like, inputs))


_library = torch.library.Library("cgshim", "FRAGMENT")


def _define(schema: str, concrete: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operation by its results for tensors with values, and for tensors without."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=tags_of_host)
    _library.impl(name, concrete, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cgshim::{name}", fake, lib=_library)


_define("host(Tensor[] inputs, str call) -> Tensor[]", _concrete, _fake)
_library.impl("host", _differentiable, "Autograd")
# before any level, so that every level gets it
_library.impl("host", _transformed, "FuncTorchDynamicLayerFrontMode")
_define(
    "zero_upstreams(Tensor[] upstreams, Tensor[] inputs, str op) -> Tensor[]",
    _zeros,
    lambda _, inputs, __: list(map(torch.zeros_like, inputs)),
)


# --- The operations with which inductor's programs call the host ----------------------------------
#
# Inductor gets a graph that has the derivatives. So a program needs no autograd kernel, which
# would cost a Python call in each run. The C++ wrapper of 2.13 crashes on a list of results, so
# one result is no list.


def in_program(inputs: Sequence[Tensor], name: str) -> list[Tensor]:
    """Return the results of cgshim::host by its operation in an inductor program."""
    if len(_fake(inputs, name)) == 1:
        return [torch.ops.cgshim.host_to_one(inputs, name)]
    return list(torch.ops.cgshim.host_to_many(inputs, name))


_define(
    "host_to_one(Tensor[] inputs, str call) -> Tensor",
    lambda inputs, name: _concrete(inputs, name)[0],
    lambda inputs, name: _fake(inputs, name)[0],
)
_define("host_to_many(Tensor[] inputs, str call) -> Tensor[]", _concrete, _fake)
