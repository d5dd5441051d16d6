"""Rebuild functions, and what leads from them to tensors, around other tensors."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from cgshim._contents import METHODS_IN_C, FunctionHolder, contents_of

Rebuild = Callable[[Sequence[Any]], Any]
"""Makes a function again, around other tensors."""


class Trees(Protocol):
    """What takes a framework's own containers apart and makes them again: a backend."""

    def tree_flatten(self, tree: Any, /) -> tuple[list[Any], Any]: ...

    def tree_unflatten(self, structure: Any, leaves: Sequence[Any], /) -> Any: ...


class Recipes:
    """The recipes for making things again. A recipe holds no tensor, and so keeps none alive."""

    def __init__(self, things: Mapping[int, Any], place: Mapping[int, int], trees: Trees | None) -> None:
        """Take things, by identity, that hold each other and tensors, and the tensors' places, by identity too."""
        self._things = things
        self._place = place
        self._trees = trees
        self._recipes = {key: self._recipe(x) for key, x in things.items()}

    def of(self, function: Any) -> Rebuild:
        """Return a function that makes one of the things again."""
        recipes, key = self._recipes, id(function)
        return lambda tensors: _Rebuilding(recipes, tensors).made(key)

    def _recipe(self, x: Any) -> _Recipe:
        """Return the recipe of x; that of a function makes its cells too."""
        part = self._part
        if isinstance(x, types.FunctionType):
            cells = [(id(cell) if id(cell) in self._things else None, cell) for cell in x.__closure__ or ()]
            return _recipe_of_function(x, cells, part)
        if isinstance(x, types.CellType):
            return part(x.cell_contents)
        if isinstance(x, functools.partial):
            func, args, keywords = part(x.func), [*map(part, x.args)], {k: part(v) for k, v in x.keywords.items()}
            return lambda r: functools.partial(func(r), *[a(r) for a in args], **{k: v(r) for k, v in keywords.items()})
        if isinstance(x, types.MethodType):
            func, instance = part(x.__func__), part(x.__self__)
            return lambda r: types.MethodType(func(r), instance(r))
        if isinstance(x, METHODS_IN_C):
            instance, name = part(x.__self__), x.__name__
            return lambda r: getattr(instance(r), name)
        if isinstance(x, FunctionHolder):
            func, holding = part(x.held_function), x.holding(_nothing).holding
            return lambda r: holding(func(r))
        if contents_of(x) is None:
            return self._recipe_of_tree(x)
        if isinstance(x, dict):
            table = {key: part(value) for key, value in x.items()}
            return lambda r: {key: value(r) for key, value in table.items()}
        items = [*map(part, x)]
        join = list if isinstance(x, list) else getattr(type(x), "_make", tuple)
        return lambda r: join([item(r) for item in items])

    def _recipe_of_tree(self, x: Any) -> _Recipe:
        """Return the recipe of one of the framework's containers."""
        assert self._trees is not None
        leaves, structure = self._trees.tree_flatten(x)
        items, unflatten = [*map(self._part, leaves)], self._trees.tree_unflatten
        return lambda r: unflatten(structure, [item(r) for item in items])

    def _part(self, x: Any) -> _Recipe:
        """Return how to get what a thing holds: a tensor, something that is made again, or x as it is."""
        at, key = self._place.get(id(x)), id(x)
        if at is not None:
            return lambda r: r.tensors[at]
        if key in self._things:
            return lambda r: r.made(key)
        return lambda r: x


class _Rebuilding:
    """One rebuilding of what leads from a function to tensors, around other tensors: each thing is made once."""

    def __init__(self, recipes: dict[int, _Recipe], tensors: Sequence[Any]) -> None:
        self.recipes = recipes
        self.tensors = tensors
        self.things: dict[int, Any] = {}
        self.cells: dict[int, types.CellType] = {}

    def made(self, key: int) -> Any:
        if key not in self.things:
            self.things[key] = self.recipes[key](self)
        return self.things[key]


_Recipe = Callable[[_Rebuilding], Any]


def _recipe_of_function(
    function: types.FunctionType, cells: Sequence[tuple[int | None, types.CellType]], part: Callable[[Any], _Recipe]
) -> _Recipe:
    """Return the recipe of a function, which exists before its cells are filled: they may hold the function itself."""
    kept = [(key, cell if key is None else types.CellType()) for key, cell in cells]
    bare, own = _like(function, tuple([types.CellType() for _ in cells])), id(function)
    defaults, keyword_defaults = part(function.__defaults__), part(function.__kwdefaults__)
    bare.__defaults__ = bare.__kwdefaults__ = None

    def make(r: _Rebuilding) -> types.FunctionType:
        empty = [key for key, _ in kept if key is not None and key not in r.cells]
        r.cells.update({key: types.CellType() for key in empty})
        closure = tuple([cell if key is None else r.cells[key] for key, cell in kept])
        made = r.things[own] = _like(bare, closure)
        made.__defaults__, made.__kwdefaults__ = defaults(r), keyword_defaults(r)
        for key in empty:
            r.cells[key].cell_contents = r.made(key)
        return made

    return make


def _nothing(*args: Any, **kwargs: Any) -> Any:
    """Replace a function that holds tensors."""


def _like(function: types.FunctionType, closure: tuple[types.CellType, ...]) -> types.FunctionType:
    """Return the same function around other cells."""
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update({k: v for k, v in function.__dict__.items() if k != "__wrapped__"})  # which holds the tensors
    return made
