"""The differentiated tensors that f captures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cgshim.backend import Call, Tensor, tensors_inside
from cgshim_torch._private import functorch, is_wrapped

Edge = tuple[Any, int]


def captured_by(
    call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Return the tensors that outputs depend on besides the inputs.

    They are variables, tensors in f's closure, or other leaves. Under torch.func each level has a
    graph of its own.
    """
    known = [*inputs, *call.variables]
    if not call.variables:  # the search is slow; undeclared variables are errors
        known += [t for t in tensors_inside(call.f, call.backend.is_tensor) if t.requires_grad]
    found: dict[int, Tensor] = {}
    # of each level, and as f holds it
    tensors = [(t, t) for t in {id(t): t for t in known}.values()]
    while True:
        origins = {id(t): origin for t, origin in tensors}
        for t in reached(outputs, [t for t, _ in tensors]):
            t = origins.get(id(t), t)
            if not any(t is x for x in inputs):
                found[id(t)] = t
        level = max([functorch.maybe_get_level(y) for y in outputs if is_wrapped(y)], default=None)
        if level is None:
            return [*found.values()]
        outputs = [_below(y, level) for y in outputs]
        tensors = [(_below(t, level), origin) for t, origin in tensors]


def _below(t: Tensor, level: int) -> Tensor:
    is_there = is_wrapped(t) and functorch.maybe_get_level(t) == level
    return functorch.get_unwrapped(t) if is_there else t


def _edge_of(tensor: Tensor) -> Edge:
    return tensor.grad_fn, tensor.output_nr


def reached(tensors: Sequence[Tensor], known: Iterable[Tensor] = ()) -> list[Tensor]:
    """Return the leaves and the known tensors that tensors depend on.

    The graphs of known tensors are not followed.
    """
    stops = {_edge_of(t): t for t in known if t.grad_fn is not None}
    found = {id(t): t for t in tensors if t.requires_grad and t.is_leaf}
    edges = [_edge_of(t) for t in tensors if t.grad_fn is not None]
    seen: set[Edge] = set()
    for edge in edges:  # the list grows
        if edge[0] is None or edge in seen:
            continue
        seen.add(edge)
        t = stops[edge] if edge in stops else getattr(edge[0], "variable", None)
        if t is None:
            edges += edge[0].next_functions
        else:
            found[id(t)] = t
    seen.clear()
    while edges:  # free the graph from its leaves: from its roots, freeing is recursive
        edges.pop()
    return [*found.values()]
