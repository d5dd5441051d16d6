"""PyTorch: the name of a call on the host that Dynamo traces: it can name only what exists already."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.decomposition import decompositions, select_decomp_table

import cgshim_torch
from cgshim.backend import ONE_TENSOR, SIMPLE, BackendError, HostCall, TreeSpec, output_on_host, sentence
from cgshim_torch._compiled import _calls_run_whole
from cgshim_torch._dynamo import assume_constant_result, disabled
from cgshim_torch._guards import forget_our_own
from cgshim_torch._host_names import fingerprint, name_of
from cgshim_torch._host_program import in_program

if TYPE_CHECKING:
    from cgshim.backend import Call, Spec

Tensor = Any

for _table in (decompositions, select_decomp_table()):  # the second may be a copy, which is made once
    _table[torch.ops.cgshim.host.default] = in_program


class _OneTensor:
    """Stands for a tensor in an argument."""


_BY_VALUE = SIMPLE | {list, tuple, dict, type}

untraced = disabled(output_on_host, "cgshim: Dynamo has left the graph already")


def traced(call: Call, inputs: Sequence[Tensor]) -> Any:
    """Return the output of an op_host in the graph that Dynamo makes."""
    _calls_run_whole()
    output = output_on_host(call, inputs)
    forget_our_own()
    return output


def name_of_traced(call: HostCall, declared: Sequence[Spec]) -> str:
    """Return the name of a call whose function, static arguments and options are constants of the trace."""
    arguments = [_constant(spec.combine([_OneTensor] * spec.count)) for spec in call.specs]
    options = {name: _constant(option) for name, option in call.options.items()}
    seen = [id(x) for x in (call.function, *arguments, *options.values()) if type(x) not in _BY_VALUE]
    results = ",".join([f"{spec.dtype}.{len(spec.shape)}" for spec in declared])
    name: str = _name_of_constants(seen, results, call.function, *arguments, **options)
    return name


def _constant(x: Any) -> Any:
    """Return x; the graph is for this value of a number that Dynamo has made symbolic."""
    if type(x) is int:
        return range(x).stop
    return float.fromhex(x.hex()) if type(x) is float else x


def _named(seen: list[int], results: str, function: Any, /, *arguments: Any, **options: Any) -> str:
    """Return the name of the call; `seen` are the identities in the trace, where an object that it makes is hollow."""
    if seen != [id(x) for x in (function, *arguments, *options.values()) if type(x) not in _BY_VALUE]:
        raise BackendError(
            sentence(getattr(function, "name", "op_host"), must="a graph knows a function on the host by its name",
                     got="an op or an argument that the compiled function makes", do="make it outside of the function")
        )  # fmt: skip
    results = f"{results}.{fingerprint(function.declares)}"
    return name_of(HostCall(function, list(map(_spec_of, arguments)), options), results)


_name_of_constants = assume_constant_result(_named)


def _spec_of(argument: Any) -> TreeSpec:
    spec: Any = ONE_TENSOR if argument is _OneTensor else _Constant(argument)
    return spec  # type: ignore[no-any-return]  # a call needs no more of a spec than a _Constant has


class _Constant:
    """The spec of a tree in which _OneTensor stands for each tensor."""

    def __init__(self, tree: Any) -> None:
        self._leaves, self._structure = cgshim_torch.tree_flatten(tree)
        self.count = self._leaves.count(_OneTensor)

    @property
    def key(self) -> Hashable:
        """What tells this spec from others; equal leaves, as 1 and True, may not be the same for f."""
        return self._structure, tuple(map(type, self._leaves)), tuple(self._leaves), repr(self._leaves)

    def combine(self, tensors: Sequence[Tensor]) -> Any:
        rest = iter(tensors)
        leaves = [next(rest) if leaf is _OneTensor else leaf for leaf in self._leaves]
        return cgshim_torch.tree_unflatten(self._structure, leaves)
