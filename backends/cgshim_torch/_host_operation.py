"""PyTorch: the operation cgshim::host, for graphs, torch.func, and tensors without values.

It finds the call by its name. It refuses its derivative at every level, and only one that is taken.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import cgshim_torch
from cgshim.backend import CustomGradientTypeError, CustomGradientValueError, Spec, refuse_host_derivative, sentence
from cgshim_torch._graph import is_transformed, requires_grad
from cgshim_torch._host_names import call_of, over
from cgshim_torch._host_tangents import take_as_constant
from cgshim_torch._private import below_autograd, forward_ad, len_dispatch_stack, tags_of_host
from cgshim_torch._reads import FLOATS

if TYPE_CHECKING:
    from cgshim.backend import HostCall

Tensor = Any
_CPU = torch.device("cpu")


def run(call: HostCall, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the results for tensors that have values, on the device of the first one."""
    device = inputs[0].device if inputs else _CPU
    given = [cgshim_torch.convert_to_numpy(x) for x in inputs]
    try:
        arrays, declared = call.run_for(inputs, given)
    except CustomGradientValueError:
        if not call.declares_anew(cgshim_torch, inputs):
            raise
        arrays, declared = call.run_for(inputs, given)
    return list(map(_tensor, arrays, declared, itertools.repeat(device)))


def _tensor(array: Any, spec: Spec, device: torch.device) -> Tensor:
    """Return a tensor in the memory of an array if it can be there; f may have locked it since."""
    dtype = _dtype_of(spec.dtype)
    tensor = cgshim_torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor if device == _CPU and tensor.dtype is dtype else tensor.to(device, dtype)


@functools.cache
def _dtype_of(name: str) -> torch.dtype:
    """Return the dtype that has this name in NumPy: "int" is its int64, and not torch.int."""
    dtype = getattr(torch, name if name == "bfloat16" else np.dtype(name).name, None)
    if not isinstance(dtype, torch.dtype):
        raise CustomGradientTypeError(
            sentence("op_host", must="outputs must declare dtypes that torch has", got=name, do="declare another one")
        )
    return dtype


_library = torch.library.Library("cgshim", "FRAGMENT")
_library.define("host(Tensor[] inputs, str call) -> Tensor[]", tags=tags_of_host)
_library.define("zero_upstreams(Tensor[] upstreams, Tensor[] inputs, str op) -> Tensor[]")


def _concrete(inputs: Sequence[Tensor], name: str) -> list[Tensor]:
    return run(call_of(name, len(inputs)), inputs)


def fake(inputs: Sequence[Tensor], name: str) -> list[Tensor]:
    device = inputs[0].device if inputs else None
    specs = [Spec(tuple(x.shape), str(x.dtype).rpartition(".")[2]) for x in inputs]
    declared, _ = call_of(name, len(inputs)).copy().declared(cgshim_torch, specs)  # which asks outputs
    return [torch.empty(spec.shape, dtype=_dtype_of(spec.dtype), device=device) for spec in declared]


def _differentiable(inputs: Sequence[Tensor], name: str) -> list[Tensor]:
    differentiated = torch.is_grad_enabled() and any(map(requires_grad, inputs))
    if differentiated or forward_ad._current_level >= 0:
        return _transformed(inputs, name)
    with below_autograd():
        return list(torch.ops.cgshim.host.default(inputs, name))


def _transformed(inputs: Sequence[Tensor], name: str) -> list[Tensor]:
    return list(_Host.apply(name, call_of(name, len(inputs)).name, *inputs))


class _Host(torch.autograd.Function):  # type: ignore[misc]
    """The operation, at each level of torch.func and in autograd."""

    @staticmethod
    def forward(name: str, op: str, *inputs: Tensor) -> tuple[Tensor, ...]:
        with below_autograd():
            return tuple(torch.ops.cgshim.host(list(inputs), name))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, ctx.op, *tensors = inputs
        ctx.set_materialize_grads(False)
        if forward_ad._current_level >= 0:
            ctx.zeros = list(map(_zeros_of, output))
        if len_dispatch_stack() and not is_transformed():
            ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor | None) -> tuple[Tensor | None, ...]:
        taken = [upstream for upstream in upstreams if upstream is not None]
        if not taken:
            return (None,) * len(ctx.needs_input_grad)
        if not ctx.saved_tensors:
            refuse_host_derivative(ctx.op)
        # torch.compile makes the graph of all derivatives; those that are not taken get zeros when it runs
        return None, None, *torch.ops.cgshim.zero_upstreams(taken, list(ctx.saved_tensors), ctx.op)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        take_as_constant(ctx.op)
        return tuple([zeros() for zeros in ctx.zeros])

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], name: str, op: str, *inputs: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        dims = in_dims[2:]
        moved = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(inputs, dims, strict=True)]
        results = _Host.apply(over(name, [dim is not None for dim in dims]), op, *moved)
        return results, (0,) * len(results)


def _zeros_of(result: Tensor) -> Callable[[], Tensor | None]:
    """Return what makes the tangent of a constant, which torch 2.13 wants for a float, and for nothing else."""
    if result.dtype not in FLOATS:
        return lambda: None
    return functools.partial(torch.zeros, result.shape, dtype=result.dtype, device=result.device)


def _zeros(upstreams: Sequence[Tensor], inputs: Sequence[Tensor], op: str) -> list[Tensor]:
    """Return the gradients of a compiled program for upstreams of zero; refuse any others."""
    if any(map(torch.any, upstreams)):
        refuse_host_derivative(op)
    return _zeros_like(upstreams, inputs, op)


def _zeros_like(upstreams: Sequence[Tensor], inputs: Sequence[Tensor], op: str) -> list[Tensor]:
    return list(map(torch.zeros_like, inputs))


_library.impl("host", _concrete, "CompositeExplicitAutograd")
_library.impl("host", _differentiable, "Autograd")
_library.impl("host", _transformed, "FuncTorchDynamicLayerFrontMode")  # before any level, so that none is left out
_library.impl("zero_upstreams", _zeros, "CompositeExplicitAutograd")
torch.library.register_fake("cgshim::host", fake, lib=_library)
torch.library.register_fake("cgshim::zero_upstreams", _zeros_like, lib=_library)
