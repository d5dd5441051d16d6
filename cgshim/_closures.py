"""Take the tensors out of a function's closure, so that a framework can look after them."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

from cgshim._contents import SIMPLE, assigned_names, cells_assigned_by, contents_of, held_by, is_local
from cgshim._rebuild import Rebuild, Recipes, Trees

Function = Callable[..., Any]


class Closure(NamedTuple):
    """What was found in the closure of a function."""

    tensors: list[Any]
    """the known tensors, and then the others that the function holds"""
    rebuild: Rebuild
    held: Set[int]
    """the places in `tensors` of those that the function holds"""
    objects: list[Any]
    """other objects that it holds; their attributes were not searched"""
    old: list[Any]
    """objects and containers that it holds and that existed before the call: not searched either"""


def convert_closure(
    function: Function, is_tensor: Callable[[Any], bool], of: Function | None = None, known: Sequence[Any] = ()
) -> tuple[list[Any], Rebuild]:
    """Return the known tensors, then those in the closure of a function that `of` made, and how to rebuild it.

    The search covers cells, default values, nested functions, partials and Python's containers, but not the attributes
    of objects, because an object is known by its identity. What is shared stays shared: a cell, a helper or a list
    that two functions hold is made once for both. What existed before the call (all that `of` holds) is not copied,
    nor is a variable that a function assigns to: the author sees what the rule does to it.
    """
    return search_closure(function, is_tensor, of, known)[:2]


def search_closure(
    function: Function,
    is_tensor: Callable[[Any], bool],
    of: Function | None = None,
    known: Sequence[Any] = (),
    trees: Trees | None = None,
) -> Closure:
    """Find what `convert_closure` finds, and the rest of a Closure; trees knows the containers of a framework."""
    return _search_plain(function, is_tensor, known) or _Search(is_tensor, of, known, trees)(function)


def _search_plain(function: Function, is_tensor: Callable[[Any], bool], known: Sequence[Any]) -> Closure | None:
    """Return the Closure of a function that holds only tensors and numbers, as most rules do; None for others."""
    if type(function) is not types.FunctionType or function.__defaults__ or function.__kwdefaults__:
        return None
    if not function.__closure__:
        return Closure(list(known), lambda tensors: function, frozenset(), [], [])
    tensors = list(known)
    place = _places(known)
    cells: list[types.CellType | int] = []  # a cell, or instead of it the place of the tensor that it holds
    held = set()
    try:
        for cell in function.__closure__:
            content = cell.cell_contents
            if is_tensor(content):
                at = place.setdefault(id(content), len(tensors))
                if at == len(tensors):
                    tensors.append(content)
                cells.append(at)
                held.add(at)
            elif type(content) in SIMPLE:
                cells.append(cell)
            else:
                return None
    except ValueError:  # a name that was never assigned
        return None
    if not held:
        return Closure(tensors, lambda tensors: function, held, [], [])
    code, scope, name = function.__code__, function.__globals__, function.__name__
    if assigned_names(code):
        return None

    def rebuild(tensors: Sequence[Any]) -> Function:
        closure = tuple([types.CellType(tensors[cell]) if isinstance(cell, int) else cell for cell in cells])
        return types.FunctionType(code, scope, name, None, closure)

    return Closure(tensors, rebuild, held, [], [])


def _places(known: Sequence[Any]) -> dict[int, int]:
    """Return the place of each known tensor by its identity; its first place if it is known twice."""
    return dict(zip(map(id, reversed(known)), range(len(known) - 1, -1, -1), strict=True))


class _Search:
    """One search of a function: it finds the graph of what the function holds, and each tensor in it once."""

    def __init__(
        self, is_tensor: Callable[[Any], bool], of: Function | None, known: Sequence[Any], trees: Trees | None
    ) -> None:
        self._is_tensor = is_tensor
        self._trees = trees
        self._tensors = list(known)
        self._place = _places(known)
        self._held: set[int] = set()
        self._objects: list[Any] = []
        self._old: list[Any] = []
        self._nodes: dict[int, tuple[Any, list[Any]]] = {}  # by identity: what is searched, and what it holds
        self._stays = frozenset(map(id, held_by(of)))  # what existed before the function was made

    def __call__(self, function: Function) -> Closure:
        self._visit(function)
        rebuilt = self._leading_to_tensors()
        rebuild: Rebuild = lambda tensors: function
        if id(function) in rebuilt:
            rebuild = Recipes(rebuilt, self._place, self._trees).of(function)
        return Closure(self._tensors, rebuild, self._held, self._objects, self._old)

    def _visit(self, x: Any) -> None:
        todo = [x]
        while todo:
            x = todo.pop()
            if self._is_tensor(x):
                self._hold(x)
                continue
            if id(x) in self._nodes or type(x) in SIMPLE:
                continue
            inner = self._contents_of(x)
            if id(x) in self._stays:  # what existed before the call may hold a tensor
                self._old += [x] if inner is None or isinstance(x, (list, dict)) else []
                inner = inner if inner and isinstance(x, types.CellType) else []
            elif inner is None:
                if not isinstance(x, types.ModuleType) and (not isinstance(x, type) or is_local(x)):
                    self._objects.append(x)
                inner = []
            self._nodes[id(x)] = x, inner
            todo += reversed(inner)

    def _contents_of(self, x: Any) -> list[Any] | None:
        inner = contents_of(x)
        if inner is None and self._trees is not None and id(x) not in self._stays:
            leaves, _ = self._trees.tree_flatten(x)
            inner = leaves if len(leaves) != 1 or leaves[0] is not x else None
        return inner

    def _hold(self, tensor: Any) -> None:
        at = self._place.setdefault(id(tensor), len(self._tensors))
        if at == len(self._tensors):
            self._tensors.append(tensor)
        self._held.add(at)

    def _leading_to_tensors(self) -> dict[int, Any]:
        """Return by identity what to make again: all that leads to a tensor, except what a function assigns to."""
        assigned = {id(cell) for x, _ in self._nodes.values() for cell in cells_assigned_by(x)}
        holders: dict[int, list[int]] = {}
        for holder, (_, inner) in self._nodes.items():
            for each in inner:
                holders.setdefault(id(each), []).append(holder)
        rebuilt: dict[int, Any] = {}
        todo = [self._id_of(at) for at in self._held]
        while todo:
            for holder in holders.get(todo.pop(), ()):
                if holder not in rebuilt and holder not in assigned:
                    rebuilt[holder] = self._nodes[holder][0]
                    todo.append(holder)
        return rebuilt

    def _id_of(self, at: int) -> int:
        return id(self._tensors[at])
