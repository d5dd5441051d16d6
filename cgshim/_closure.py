"""The tensors that a function holds in its closure, lifted out so that a framework can look after them."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Function = Callable[..., Any]
Recipe = Callable[[Sequence[Any]], Any]
"""Makes an object again, round other tensors."""


def lift(
    function: Function, is_tensor: Callable[[Any], bool], of: Function, known: Sequence[Any] = ()
) -> tuple[list[Any], Recipe]:
    """The known tensors and then those in the closure of a function that `of` made; how to make it round others.

    Cells, default values, nested functions, partials and Python's containers are searched; the attributes of objects
    are not, for an object is known by its identity. What `of` captured itself was there before the call: a function
    or a container among it stays the one that it is, so that the caller sees what the rule does to it.
    """
    lifting = _Lifting(is_tensor, of, known)
    recipe = lifting.recipe(function)
    return lifting.tensors, recipe or (lambda tensors: function)


class _Lifting:
    """One search of a function: the tensors found so far, each once."""

    def __init__(self, is_tensor: Callable[[Any], bool], of: Function, known: Sequence[Any]) -> None:
        self.tensors = list(known)
        self._is_tensor = is_tensor
        self._outer_cells = {id(cell) for cell in _cells(of)}
        self._index = {id(tensor): at for at, tensor in enumerate(known)}
        self._entered: set[int] = set()

    def recipe(self, x: Any) -> Recipe | None:
        """How to make x again; None where it holds no tensor, and is kept as it is."""
        search = _SEARCHES.get(type(x))
        if search is None:
            if self._is_tensor(x):
                return self._tensor(x)
            if not _is_namedtuple(x):
                return None
            search = _Lifting._namedtuple
        if id(x) in self._entered:  # a function that calls itself holds its own original
            return None
        self._entered.add(id(x))
        found = search(self, x)
        self._entered.discard(id(x))
        return found

    def _tensor(self, tensor: Any) -> Recipe:
        at = self._index.setdefault(id(tensor), len(self.tensors))
        if at == len(self.tensors):
            self.tensors.append(tensor)
        return operator.itemgetter(at)

    def _function(self, function: types.FunctionType) -> Recipe | None:
        closure = function.__closure__ or ()
        cells = [self._cell(cell) for cell in closure]
        defaults = self._tuple(function.__defaults__) if function.__defaults__ else None
        keyword_defaults = self._dict(function.__kwdefaults__) if function.__kwdefaults__ else None
        if not (any(cells) or defaults or keyword_defaults):
            return None
        new_cells = [_kept(cell, found) for cell, found in zip(closure, cells, strict=True)]
        new_defaults = _kept(function.__defaults__, defaults)
        new_keyword_defaults = _kept(function.__kwdefaults__, keyword_defaults)
        code, scope, name = function.__code__, function.__globals__, function.__name__

        def make(tensors: Sequence[Any]) -> types.FunctionType:
            cells = tuple([cell(tensors) for cell in new_cells])
            made = types.FunctionType(code, scope, name, new_defaults(tensors), cells)
            made.__kwdefaults__ = new_keyword_defaults(tensors)
            return made

        return make

    def _cell(self, cell: types.CellType) -> Recipe | None:
        try:
            content = cell.cell_contents
        except ValueError:  # a name that was never assigned
            return None
        if id(cell) in self._outer_cells and not self._is_tensor(content):
            return None
        found = self.recipe(content)
        return found and (lambda tensors: types.CellType(found(tensors)))

    def _partial(self, partial: functools.partial[Any]) -> Recipe | None:
        return self._joined([partial.func, partial.args, partial.keywords], _make_partial)

    def _list(self, items: list[Any]) -> Recipe | None:
        return self._joined(items, list)

    def _tuple(self, items: tuple[Any, ...]) -> Recipe | None:
        return self._joined(items, tuple)

    def _namedtuple(self, items: Any) -> Recipe | None:
        return self._joined(items, type(items)._make)

    def _dict(self, items: dict[Any, Any]) -> Recipe | None:
        keys = list(items)
        return self._joined(items.values(), lambda values: dict(zip(keys, values, strict=True)))

    def _joined(self, parts: Iterable[Any], join: Callable[[list[Any]], Any]) -> Recipe | None:
        parts = list(parts)
        found = [self.recipe(part) for part in parts]
        if not any(found):
            return None
        recipes = [_kept(part, recipe) for part, recipe in zip(parts, found, strict=True)]
        return lambda tensors: join([recipe(tensors) for recipe in recipes])


_SEARCHES: dict[type, Callable[[_Lifting, Any], Recipe | None]] = {
    types.FunctionType: _Lifting._function,
    functools.partial: _Lifting._partial,
    list: _Lifting._list,
    tuple: _Lifting._tuple,
    dict: _Lifting._dict,
}


def _kept(x: Any, recipe: Recipe | None) -> Recipe:
    return recipe or (lambda tensors: x)


def _make_partial(parts: list[Any]) -> functools.partial[Any]:
    func, args, keywords = parts
    return functools.partial(func, *args, **keywords)


def _is_namedtuple(x: object) -> bool:
    return isinstance(x, tuple) and hasattr(x, "_fields")


def _cells(function: Any) -> Sequence[types.CellType]:
    """The cells of a function, or of the function that a bound method or a partial calls."""
    if isinstance(function, types.FunctionType):
        return function.__closure__ or ()
    while (inner := getattr(function, "func", None) or getattr(function, "__func__", None)) is not None:
        function = inner
    return getattr(function, "__closure__", None) or ()
