"""Take the tensors out of a function's closure, so that a framework can look after them."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cgshim._contents import SIMPLE, assigned_names, cells_assigned_by, contents_of, held_by, is_local
from cgshim._rebuild import Rebuild, Recipes, Trees

Function = Callable[..., Any]


class Closure(NamedTuple):
    """What was found in the closure of a function."""

    tensors: list[Any]
    """the known tensors, and then the others that the function holds"""
    rebuild: Rebuild
    held: Sequence[int]
    """the places in `tensors` of those that the function holds, in order"""
    objects: Sequence[Any] = ()
    """other objects that it holds; their attributes were not searched"""
    old: Sequence[Any] = ()
    """objects and containers that it holds and that existed before the call, which were not searched either"""


def convert_closure(
    function: Function, is_tensor: Callable[[Any], bool], of: Function | None = None, known: Sequence[Any] = ()
) -> tuple[list[Any], Rebuild]:
    """Return the known tensors, then those in the closure of a function that ``of`` made, and how to rebuild it.

    The search covers cells, default values, nested functions, partials and Python's containers, but not the attributes
    of objects, because an object is known by its identity. What is shared stays shared: a cell, a helper or a list
    that two functions hold is made once for both. What existed before the call (all that ``of`` holds) is not copied,
    nor is a variable that a function assigns to: the author sees what the rule does to it.
    """
    if holds_nothing(function):
        return list(known), lambda tensors: function
    return search_closure(function, is_tensor, of, known)[:2]


def search_closure(
    function: Function,
    is_tensor: Callable[[Any], bool],
    of: Function | None = None,
    known: Sequence[Any] = (),
    trees: Trees | None = None,
) -> Closure:
    """Find what `convert_closure` finds, and the rest of a Closure; trees knows the containers of a framework."""
    return _search_plain(function, is_tensor, of, known) or _Search(is_tensor, of, known, trees)(function)


def _search_plain(
    function: Function, is_tensor: Callable[[Any], bool], of: Function | None, known: Sequence[Any]
) -> Closure | None:
    """Return the Closure of a function that holds only tensors, numbers, and lists or dicts of tensors; else None.

    Most rules hold no more, and need no search of what holds what.
    """
    if type(function) is not types.FunctionType or function.__defaults__ or function.__kwdefaults__:
        return None
    tensors, place = list(known), None
    held: set[int] = set()
    parts: list[_Part] = []
    seen: set[int] = set()
    try:
        for cell in function.__closure__ or ():
            content = cell.cell_contents
            one = is_tensor(content)
            if not one and type(content) in SIMPLE:
                parts.append(cell)
                continue
            items = [content] if one else _own_items(content, is_tensor, of, seen)
            if items is None:
                return None
            place = place or _places(known)
            places = []
            for item in items:
                at = place.setdefault(id(item), len(tensors))
                if at == len(tensors):
                    tensors.append(item)
                places.append(at)
            held.update(places)
            parts.append(places[0] if one else _maker(content, places))
    except ValueError:  # a name that was never assigned
        return None
    if not held:
        return Closure(tensors, lambda tensors: function, ())
    return None if assigned_names(function.__code__) else Closure(tensors, _Plain(function, parts), sorted(held))


_Part = types.CellType | int | Callable[[Sequence[Any]], Any]
"""a cell as it is; or what is to be in it instead: the tensor in a place, or what a function makes of the tensors"""


def _own_items(x: Any, is_tensor: Callable[[Any], bool], of: Function | None, seen: set[int]) -> Sequence[Any] | None:
    """Return the tensors in a list, tuple or dict that holds nothing else and that the call has made; else None.

    The call has made it if `of` holds nothing. One that is seen twice must stay one, and an empty one the author's own:
    the other search does this.
    """
    if type(x) not in _CONTAINERS or id(x) in seen or not (of is None or holds_nothing(of)):
        return None
    seen.add(id(x))
    items = list(x.values()) if type(x) is dict else x
    return items if items and all(map(is_tensor, items)) else None


_CONTAINERS = (list, tuple, dict)


def holds_nothing(function: Function) -> bool:
    """Return True for a function without a closure and without default values."""
    return type(function) is types.FunctionType and not (
        function.__closure__ or function.__defaults__ or function.__kwdefaults__
    )


def _maker(x: Any, places: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    """Return a function that makes a container like x of the tensors in these places; it does not keep x."""
    kind, keys = type(x), list(x) if type(x) is dict else []
    if kind is dict:
        return lambda tensors: dict(zip(keys, [tensors[at] for at in places], strict=True))
    return lambda tensors: kind([tensors[at] for at in places])


class _Plain:
    """Rebuilds a function from the parts in its cells; it keeps no tensor alive."""

    __slots__ = ("_code", "_globals", "_name", "_parts")

    def __init__(self, function: types.FunctionType, parts: Sequence[_Part]) -> None:
        self._code, self._globals, self._name = function.__code__, function.__globals__, function.__name__
        self._parts = parts

    def __call__(self, tensors: Sequence[Any]) -> Function:
        closure = []
        for part in self._parts:
            if isinstance(part, int):
                part = types.CellType(tensors[part])
            elif not isinstance(part, types.CellType):
                part = types.CellType(part(tensors))
            closure.append(part)
        return types.FunctionType(self._code, self._globals, self._name, None, tuple(closure))


def _places(known: Sequence[Any]) -> dict[int, int]:
    """Return the place of each known tensor by its identity; its first place if it is known twice."""
    place = {id(tensor): at for at, tensor in enumerate(known)}
    if len(place) < len(known):
        place.update({id(known[at]): at for at in reversed(range(len(known)))})
    return place


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
        return Closure(self._tensors, rebuild, sorted(self._held), self._objects, self._old)

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
