"""PyTorch: what the graph of autograd tells about tensors that reached f by another way than its arguments."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _functorch as functorch
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from cgshim._closure import lift
from cgshim._contents import tensors_inside
from cgshim._hidden import names_in

if TYPE_CHECKING:
    from cgshim._call import Call

Tensor = Any
Edge = tuple[Any, int]

requires_grad = operator.attrgetter("requires_grad")
_is_leaf = operator.attrgetter("is_leaf")


def now() -> int:
    """A point in the history of the graph: nodes that are made later have this number or a higher one."""
    return int(torch._C._autograd._get_sequence_nr())


def is_transformed() -> bool:
    """Whether a transformation of torch.func, or a level of dual numbers, is active."""
    return functorch.maybe_current_level() is not None or bool(forward_ad._current_level >= 0)


def is_wrapped_or_requires_grad(tensor: Tensor) -> bool:
    """Whether a derivative of tensor can be taken at some level of torch.func."""
    return bool(tensor.requires_grad or functorch.is_functorch_wrapped_tensor(tensor))


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has numbers in it, and not just a shape and a dtype."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def captured(
    call: Call, made: Sequence[Tensor], inputs: Sequence[Tensor], start: int, in_a_rule: bool = False
) -> list[Tensor]:
    """The variables that tensors, made since start, depend on; what else they depend on but inputs is refused.

    In a rule a tensor that is older than start is a constant where it depends on nothing but the inputs: there the
    op's own rule speaks for them.
    """
    variables: list[Tensor] = []
    known = _Known(inputs)
    while made:  # first as they are, and then as each transformation of torch.func has wrapped them
        leaves, older = known.reached_beyond([t for t in made if t.requires_grad], start)
        known.add(leaves)
        variables += leaves
        for edge in older:
            if not in_a_rule or known.is_passed_from(edge):
                call.refuse_captured(edge[0]._input_metadata[edge[1]])
        made = [functorch.get_unwrapped(t) for t in made if functorch.is_functorch_wrapped_tensor(t)]
    return variables


def refuse_captured_tangents(call: Call, made: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Raise where forward mode reached f by another way: seen in its closure, and in what it made of mere constants."""
    captured, _ = lift(call.f, torch.is_tensor)
    given = set(map(id, inputs))
    suspects = [tensor for tensor in captured if id(tensor) not in given]
    if not any(map(_has_tangent, inputs)):
        suspects += made
    for tensor in filter(_has_tangent, suspects):
        call.refuse_captured(tensor)


def _has_tangent(tensor: Tensor) -> bool:
    duals = [level for level in levels(tensor) if not functorch.is_batchedtensor(level)]
    return any(forward_ad.unpack_dual(dual).tangent is not None for dual in duals)


def depends_on_more(tensors: Sequence[Tensor], than: Sequence[Tensor]) -> bool:
    """Whether tensors are connected with anything that requires grad beyond those."""
    leaves, _ = _Known(than).reached_beyond(tensors)
    return bool(leaves)


def read_by_rules(tensors: Sequence[Tensor]) -> bool:
    """Whether a rule of an op that tensors depend on may read more than is saved, and of that what requires grad."""
    edges: list[Any] = [t.grad_fn for t in tensors]
    seen = set()
    while edges:
        node = edges.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kept = getattr(node, "kept", None)
        if kept is not None and any(map(requires_grad, _within_reach(kept.call.f))):
            return True
        edges += [following for following, _ in node.next_functions]
    return False


def _within_reach(f: Any) -> Iterator[Tensor]:
    """The tensors that f and the functions within it can read: in its closure and its object, and by a global name."""
    yield from tensors_inside(f, torch.is_tensor)
    function = inspect.unwrap(f)
    code, scope = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    for name in names_in(code) if code else ():
        if torch.is_tensor(scope.get(name)):
            yield scope[name]


def leaf_of(tensor: Tensor) -> Tensor:
    """The leaf whose gradient that of a leaf is: itself, but for the copies that hooks on saved tensors make."""
    transformed = functorch.maybe_current_level() is not None or functorch.is_functorch_wrapped_tensor(tensor)
    return tensor if transformed else get_gradient_edge(tensor).node.variable


class _Known:
    """Tensors at which a walk through the graph turns back, at every level of torch.func that wraps them."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._leaves: list[Tensor] = []
        self._edges: set[Edge] = set()
        self.add(tensors)

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            for level in levels(tensor):
                if not level.is_leaf:
                    self._edges.add((level.grad_fn, level.output_nr))
                elif level.requires_grad:
                    self._leaves.append(leaf_of(level))

    def reached_beyond(self, tensors: Sequence[Tensor], start: int = 0) -> tuple[list[Tensor], list[Edge]]:
        """The other leaves that tensors depend on, in the order of their use, and what is older than start."""
        used_at = {id(leaf): (leaf, 0) for leaf in map(leaf_of, filter(_is_leaf, tensors))}
        older: list[Edge] = []
        edges: list[Edge] = [(t.grad_fn, t.output_nr) for t in tensors if not t.is_leaf]
        seen = set(self._edges)
        while edges:
            edge = edges.pop()
            if edge in seen:
                continue
            seen.add(edge)
            node = edge[0]
            number = node._sequence_nr()
            if number < start:
                older.append(edge)
                continue
            for following in node.next_functions:
                leaf = getattr(following[0], "variable", None)
                if leaf is None:
                    edges += [following] if following[0] is not None else []
                elif id(leaf) not in used_at or number < used_at[id(leaf)][1]:
                    used_at[id(leaf)] = leaf, number
        for leaf in self._leaves:
            used_at.pop(id(leaf), None)
        return [leaf for leaf, _ in sorted(used_at.values(), key=lambda use: use[1])], older

    def is_passed_from(self, edge: Edge) -> bool:
        """Whether a walk from an edge reaches a leaf that is not known."""
        known = set(map(id, self._leaves))
        edges, seen = [edge], set(self._edges)
        while edges:
            edge = edges.pop()
            if edge[0] is None or edge in seen:
                continue
            seen.add(edge)
            leaf = getattr(edge[0], "variable", None)
            if leaf is not None and id(leaf) not in known:
                return True
            edges += edge[0].next_functions
        return False


def levels(tensor: Tensor) -> Iterable[Tensor]:
    """A tensor, and what each transformation of torch.func has wrapped."""
    yield tensor
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
        yield tensor
