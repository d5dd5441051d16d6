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
    function: Function, is_tensor: Callable[[Any], bool], of: Function | None = None, known: Sequence[Any] = ()
) -> tuple[list[Any], Recipe]:
    """The known tensors and then those in the closure of a function that `of` made; how to make it round others.

    Cells, default values, nested functions, partials and Python's containers are searched; the attributes of objects
    are not, for an object is known by its identity. What `of` captured itself was there before the call: a function
    or a container among it stays the one that it is, so that the caller sees what the rule does to it. Without `of`
    nothing was there before.
    """
    lifted = _lift_plain(function, is_tensor, known)
    if lifted is not None:
        return lifted
    lifting = _Lifting(is_tensor, of, known)
    recipe = lifting.recipe(function)
    return lifting.tensors, recipe or _keep(function)


def _lift_plain(
    function: Function, is_tensor: Callable[[Any], bool], known: Sequence[Any]
) -> tuple[list[Any], Recipe] | None:
    """What lift gives for a function that holds tensors and numbers alone, as most rules do; None for any other."""
    if type(function) is not types.FunctionType or function.__defaults__ or function.__kwdefaults__:
        return None
    tensors = list(known)
    place = {id(tensor): at for at, tensor in enumerate(known)}
    cells: list[types.CellType | Recipe] = []
    recipe: Recipe | None = None
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # a name that was never assigned
            return None
        if is_tensor(content):
            at = place.setdefault(id(content), len(tensors))
            if at == len(tensors):
                tensors.append(content)
            recipe = operator.itemgetter(at)
            cells.append(recipe)
        elif type(content) in _SIMPLE:
            cells.append(cell)
        else:
            return None
    return tensors, _keep(function) if recipe is None else _make_function(function, cells)


class _Lifting:
    """One search of a function: the tensors found so far, each once."""

    __slots__ = ("_entered", "_is_tensor", "_of", "_place", "tensors")

    def __init__(self, is_tensor: Callable[[Any], bool], of: Function | None, known: Sequence[Any]) -> None:
        self.tensors = list(known)
        self._is_tensor = is_tensor
        self._of = of
        self._place = {id(tensor): at for at, tensor in enumerate(known)}
        self._entered: set[int] = set()

    def recipe(self, x: Any) -> Recipe | None:
        """How to make x again; None where it holds no tensor, and is kept as it is."""
        if self._is_tensor(x):
            return self._tensor(x)
        search = _SEARCHES.get(type(x)) or (_Lifting._namedtuple if _is_namedtuple(x) else None)
        if search is None or id(x) in self._entered:  # a function that calls itself holds its own original
            return None
        self._entered.add(id(x))
        found = search(self, x)
        self._entered.discard(id(x))
        return found

    def _tensor(self, tensor: Any) -> Recipe:
        at = self._place.setdefault(id(tensor), len(self.tensors))
        if at == len(self.tensors):
            self.tensors.append(tensor)
        return operator.itemgetter(at)

    def _function(self, function: types.FunctionType) -> Recipe | None:
        cells = [*map(self._cell, function.__closure__ or ())]
        defaults = function.__defaults__, function.__kwdefaults__
        make_defaults = self.recipe(defaults) if any(defaults) else None
        if make_defaults is None and all(type(cell) is types.CellType for cell in cells):
            return None
        return _make_function(function, cells, make_defaults)

    def _cell(self, cell: types.CellType) -> types.CellType | Recipe:
        try:
            content = cell.cell_contents
        except ValueError:  # a name that was never assigned
            return cell
        if self._is_tensor(content):
            return self._tensor(content)
        if type(content) in _SIMPLE or any(cell is outer for outer in _cells(self._of)):
            return cell
        return self.recipe(content) or cell

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
        recipes = [recipe or _keep(part) for part, recipe in zip(parts, found, strict=True)]
        return lambda tensors: join([recipe(tensors) for recipe in recipes])


_SIMPLE = {bool, int, float, complex, str, type(None)}

_SEARCHES: dict[type, Callable[[_Lifting, Any], Recipe | None]] = {
    types.FunctionType: _Lifting._function,
    functools.partial: _Lifting._partial,
    list: _Lifting._list,
    tuple: _Lifting._tuple,
    dict: _Lifting._dict,
}


def _keep(x: Any) -> Recipe:
    return lambda tensors: x


def _make_function(
    function: types.FunctionType, cells: Sequence[types.CellType | Recipe], make_defaults: Recipe | None = None
) -> Recipe:
    """How to make a function again that holds what these cells, or the recipes of their contents, say."""
    code, scope, name = function.__code__, function.__globals__, function.__name__
    make_defaults = make_defaults or _keep((function.__defaults__, function.__kwdefaults__))

    def make(tensors: Sequence[Any]) -> types.FunctionType:
        closure = [cell if isinstance(cell, types.CellType) else types.CellType(cell(tensors)) for cell in cells]
        defaults, keyword_defaults = make_defaults(tensors)
        made = types.FunctionType(code, scope, name, defaults, tuple(closure))
        made.__kwdefaults__ = keyword_defaults
        return made

    return make


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
