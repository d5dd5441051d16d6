"""PyTorch: leaves that f makes in the graph to differentiate something itself; they are not trainable state."""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cgshim.backend import held_by

if TYPE_CHECKING:
    from cgshim.backend import Call

Tensor = Any


def made_by(call: Call, grad_fn: Callable[..., Any], leaves: list[Tensor], *lists: list[Tensor]) -> list[Tensor]:
    """Return the leaves that f has made: only the graph, what f returned, and these lists hold them.

    Something else holds what existed before f ran.
    """
    before = set(map(id, held_by(call.f)))
    made = [x for x in held_by(grad_fn) if id(x) not in before and not torch.is_tensor(x)]
    known = Counter(id(x) for holder in (*made, *lists) for x in gc.get_referents(holder))
    holders = zip(leaves, _references(leaves), strict=True)
    return [leaf for leaf, references in holders if references - known[id(leaf)] == _references_by_graph()]


def _references(tensors: list[Tensor]) -> list[int]:
    return list(map(sys.getrefcount, tensors))


@functools.cache
def _references_by_graph() -> int:
    """Return the number of references to a leaf that a graph and one list hold."""
    leaves = [torch.zeros((), requires_grad=True)]
    graph = leaves[0] * 1
    references = _references(leaves)[0]
    del graph
    return references


def depend_on(tensors: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that are connected with one of the leaves."""
    known = set(map(id, leaves))
    return [t for t in tensors if t.grad_fn is not None and _reaches(t.grad_fn, known)]


def _reaches(node: Any, leaves: set[int]) -> bool:
    nodes, seen = [node], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in leaves:
            return True
        nodes += [following for following, _ in node.next_functions]
    return False
