"""PyTorch: the name of a call on the host that Dynamo traces: it can name only what exists already."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.decomposition import decompositions, select_decomp_table
from torch.autograd import forward_ad

from cgshim.backend import SIMPLE, BackendError, HostCall, output_on_host, partition_each, refusal
from cgshim_torch import _tensors
from cgshim_torch._compiled import calls_run_whole
from cgshim_torch._dynamo import assume_constant_result, disabled, has_symbols
from cgshim_torch._guards import forget_our_own
from cgshim_torch._host import in_program
from cgshim_torch._host_names import name_of

if TYPE_CHECKING:
    from cgshim.backend import Call, Spec

Tensor = Any

for _table in (decompositions, select_decomp_table()):  # the second may be a copy, which is made once
    _table[torch.ops.cgshim.host.default] = in_program

untraced = disabled(output_on_host, "cgshim: Dynamo has left the graph already")
_in_forward_mode = disabled(output_on_host, "cgshim: torch.compile would drop the tangents of what runs on the host")


def traced(call: Call, inputs: Sequence[Tensor]) -> Any:
    """Return the output of an op_host in the graph that Dynamo makes."""
    if forward_ad._current_level >= 0:
        return _in_forward_mode(call, inputs)
    calls_run_whole()
    output = output_on_host(call, inputs)
    forget_our_own()
    return output


_BY_VALUE = SIMPLE | {list, tuple, dict, type}


def name_of_traced(call: HostCall, declared: Sequence[Spec]) -> str:
    """Return the name of a call whose function, static arguments and options are constants of the trace."""
    arguments = [_constant(spec.combine([_OneTensor] * spec.count)) for spec in call.specs]
    options = {name: _constant(option) for name, option in call.options.items()}
    seen = [id(x) for x in (call.function, *arguments, *options.values()) if type(x) not in _BY_VALUE]
    symbolic = has_symbols()  # then sizes have no names
    results = ",".join([f"{spec.dtype}.{len(spec.shape) if symbolic else spec.shape}" for spec in declared])
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
    """Return the name of the call; `seen` are the identities in the trace, where an object that it makes is hollow."""
    if seen != [id(x) for x in (function, *arguments, *options.values()) if type(x) not in _BY_VALUE]:
        raise refusal(BackendError, getattr(function, "name", "op_host"),
                      must="a graph knows a function on the host by its name",
                      got="an op or an argument that the compiled function makes",
                      do="make it outside of the function")  # fmt: skip
    _, specs = partition_each(function.name, _BACKEND, arguments)
    return name_of(HostCall(function, specs, options), results)


_name_of_constants = assume_constant_result(_named)
_BACKEND: Any = SimpleNamespace(
    is_tensor=lambda x: x is _OneTensor, tree_flatten=_tensors.tree_flatten, tree_unflatten=_tensors.tree_unflatten
)
