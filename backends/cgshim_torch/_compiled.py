"""PyTorch: a call that Dynamo traces for torch.compile; the first one imports this, because Dynamo
takes a second.

Dynamo can trace a rule that is kept on ctx, and itself saves what the rule's closure holds. What it
cannot trace leaves the graph: it would drop a custom backward under the transformations of
torch.func (PyTorch issues 186303, 192985 and 193279), it cannot name the variables that f reads,
and it silently loses the error for a refused derivative if the backward pass reads none of the
inputs (181581).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from cgshim.backend import (
    SIMPLE,
    BackendError,
    CustomGradient,
    HostCall,
    output_on_host,
    partition_each,
    refusal,
)
from cgshim_torch import _tensors
from cgshim_torch._dynamo import assume_constant_result, disabled, has_symbols, run_whole
from cgshim_torch._eager import Outputs, differentiable
from cgshim_torch._graph import is_transformed
from cgshim_torch._guards import forget_our_own
from cgshim_torch._host import in_program
from cgshim_torch._host_names import PROCESS, name_of
from cgshim_torch._run import Autocast, Run, device_types
from cgshim_torch._staged import without_gradient

if TYPE_CHECKING:
    from cgshim.backend import Call, Spec

Tensor = Any

untraced = disabled(differentiable, "Dynamo has left the graph already")
_transformed = disabled(
    differentiable,
    "torch.compile would drop the rule of an op under torch.func; compile inside of it",
)
_with_variables = disabled(
    differentiable, "torch.compile cannot name the variables that f reads; pass them as arguments"
)
_once = disabled(differentiable, "torch.compile would lose that a gradient is once_differentiable")
_is_transformed = assume_constant_result(is_transformed)


def _run_calls_whole() -> bool:
    """Let Dynamo trace a call in the graph of its caller or not at all: then it runs as in eager
    mode.

    Otherwise Dynamo would compile it up to the place that it cannot trace, when f has already run.
    The same is true of a backward pass. torch._dynamo.reset() may undo this, so each traced call
    does it again.
    """
    for function in (CustomGradient.__call__, CustomGradient.__get__, Run.gradients):
        run_whole(function.__code__)
    return True


_run_calls_whole()
calls_run_whole = assume_constant_result(_run_calls_whole)


def traced(call: Call, inputs: Sequence[Tensor]) -> Outputs:
    """Return f's outputs with the rule for their gradient, in the graph that is being traced if
    possible.
    """
    calls_run_whole()
    outputs = _in_graph_if_possible(call, inputs)
    forget_our_own()
    return outputs


def _in_graph_if_possible(call: Call, inputs: Sequence[Tensor]) -> Outputs:
    # Dynamo compiles anew where a level that it read changes
    if forward_ad._current_level >= 0 or _is_transformed():
        return _transformed(call, inputs)
    if not torch.is_grad_enabled():
        outputs, rule = call.with_needed([False] * len(inputs))(inputs)
        return outputs, rule.output
    if torch.compiler.is_exporting():
        return without_gradient(call, inputs)
    differentiated = any(x.requires_grad for x in inputs)
    if differentiated and call.once_differentiable:
        return _once(call, inputs)
    told = call.with_needed([x.requires_grad for x in inputs])
    given = [x.detach() for x in inputs] if differentiated else inputs
    outputs, rule = told(given)
    if any(y.requires_grad for y in outputs):
        return _with_variables(call, inputs)
    if differentiated:
        # an output in an argument's memory is no view for Dynamo: a change in place would reach the
        # argument
        outputs = [y.clone() if any(y is x or y._base is x for x in given) else y for y in outputs]
        outputs = _Compiled.apply(rule, _autocast(), len(inputs), *inputs, *outputs)
    return outputs, rule.output


class _Compiled(torch.autograd.Function):  # type: ignore[misc]
    """Returns aliases of outputs, whose gradients come from the rule on ctx."""

    @staticmethod
    def forward(
        ctx: Any, rule: Any, autocast: Autocast, inputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.rule = rule
        ctx.autocast = autocast
        ctx.save_for_backward(*tensors[:inputs])
        return tuple([y.detach() for y in tensors[inputs:]])

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        if has_symbols():
            # Dynamo knows a size in the graph of a backward pass if a tensor in it has the size
            for x in inputs:
                x.detach()
        gradients, _ = _as_in(
            ctx.autocast, ctx.rule, inputs, upstreams, (), ctx.needs_input_grad[3 : 3 + len(inputs)]
        )
        return None, None, None, *gradients, *[None for _ in upstreams]


_DEVICE_TYPES = device_types()


def _autocast() -> Autocast:
    """Return what autocast is set to, for each kind of device on which it is on."""
    return tuple([
        (kind, torch.get_autocast_dtype(kind), True) for kind in _DEVICE_TYPES if torch.is_autocast_enabled(kind)
    ])  # fmt: skip


def _as_in(autocast: Autocast, rule: Callable[..., Any], *args: Any) -> Any:
    """Return the rule's result, under autocast as it was when f ran."""
    if not autocast:
        return rule(*args)
    with torch.autocast(*autocast[0]):
        return _as_in(autocast[1:], rule, *args)


# --- Functions on the host ------------------------------------------------------------------------

untraced_on_host = disabled(output_on_host, "Dynamo has left the graph already")
_in_forward_mode = disabled(
    output_on_host, "torch.compile would drop the tangents of what runs on the host"
)


def traced_on_host(call: Call, inputs: Sequence[Tensor]) -> Any:
    """Return the output of an op_host in the graph that Dynamo makes."""
    if forward_ad._current_level >= 0:
        return _in_forward_mode(call, inputs)
    calls_run_whole()
    output = output_on_host(call, inputs)
    forget_our_own()
    return output


_BY_VALUE = SIMPLE | {list, tuple, dict, type}


def name_of_traced(call: HostCall, declared: Sequence[Spec]) -> str:
    """Return the name of a call whose function, static arguments and options are constants of the
    trace.
    """
    arguments = [_constant(spec.combine([_OneTensor] * spec.count)) for spec in call.specs]
    options = {name: _constant(option) for name, option in call.options.items()}
    seen = [
        id(x) for x in (call.function, *arguments, *options.values()) if type(x) not in _BY_VALUE
    ]
    # sizes have no names, and code on disk would be for those that another process declares
    if has_symbols():
        results = f"{PROCESS}.{','.join([f'{spec.dtype}.{len(spec.shape)}' for spec in declared])}"
    else:
        results = ",".join([f"{spec.dtype}.{spec.shape}" for spec in declared])
    name: str = _name_of_constants(seen, results, call.function, *arguments, **options)
    return name


class _OneTensor:
    """Stands for a tensor in an argument."""


def _constant(x: Any) -> Any:
    """Return x; the graph is for this value of a number that Dynamo has made symbolic."""
    if type(x) is int:
        return range(x).stop
    return float.fromhex(x.hex()) if type(x) is float else x


def _named(seen: list[int], results: str, function: Any, /, *arguments: Any, **options: Any) -> str:
    """Return the name of the call; `seen` are the identities in the trace, where an object that it
    makes is hollow.
    """
    if seen != [
        id(x) for x in (function, *arguments, *options.values()) if type(x) not in _BY_VALUE
    ]:
        raise refusal(BackendError, getattr(function, "name", "op_host"),
                      must="a graph knows a function on the host by its name",
                      got="an op or an argument that the compiled function makes",
                      do="make it outside of the function")  # fmt: skip
    _lower_in_inductor()
    _, specs = partition_each(function.name, _BACKEND, arguments)
    return name_of(HostCall(function, specs, options), results)


_name_of_constants = assume_constant_result(_named)
_BACKEND: Any = SimpleNamespace(
    is_tensor=lambda x: x is _OneTensor,
    tree_flatten=_tensors.tree_flatten,
    tree_unflatten=_tensors.tree_unflatten,
)


@functools.cache
def _lower_in_inductor() -> None:
    """Let inductor's programs call the host by the operations that are for them."""
    from torch._inductor.decomposition import decompositions, select_decomp_table

    # the second may be a copy, which is made once
    for table in (decompositions, select_decomp_table()):
        table[torch.ops.cgshim.host.default] = in_program
