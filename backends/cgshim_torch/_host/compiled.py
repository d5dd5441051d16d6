"""PyTorch: a call on the host that Dynamo traces: its name in the graph.

To leave the graph here would be less code. Then a call would take two to three times as long, and a
function that calls the host could not be compiled with fullgraph=True.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from cgshim.backend import SIMPLE, BackendError, partition_each, refusal
from cgshim.host.backend import HostCall, Spec
from cgshim_torch import _tensors
from cgshim_torch._compile.dynamo import assume_constant_result, has_symbols
from cgshim_torch._host.names import PROCESS, name_of
from cgshim_torch._host.run import in_program

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
    return _name_of_constants(seen, results, call.function, *arguments, **options)  # type: ignore[no-any-return]


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
