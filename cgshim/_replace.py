"""Put other objects in the places where a function holds some.

A framework tells what a rule reads, as long as f computes in the framework. What an opaque f has computed in NumPy or C
is a constant to it, and so is a rule that reads it. Where such an output has a derivative after all, the one of the
op's own rule, it has to be replaced by what the framework knows, before the rule runs.
"""

from __future__ import annotations

import functools
import gc
import operator
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from cgshim._contents import SIMPLE, FunctionHolder, is_array_of_objects, slots_of


def replace_held(
    function: Any, others: Mapping[int, Any], is_tensor: Callable[[Any], bool]
) -> tuple[Any, object | None]:
    """Return a function that holds others in the places of some objects, which are known by their identity.

    It is the same function: what it reaches is written to, in cells, default values, globals that it names, containers
    and attributes. A tuple, a partial or a method cannot be, and is made again. The second result is an object that
    may hold one too and does not show it (an iterator, a ContextVar, another type of C); None if there is none.
    """
    replacing = _Replacing(others, is_tensor)
    return replacing(function), replacing.closed


class _Replacing:
    """One walk through what a function reaches. It goes through each thing once."""

    def __init__(self, others: Mapping[int, Any], is_tensor: Callable[[Any], bool]) -> None:
        self._others, self._is_tensor = others, is_tensor
        self._seen: dict[int, Any] = {}  # by identity, and kept alive so that no other object gets it
        self._scope: dict[str, Any] = {}
        self.closed: object | None = None

    def __call__(self, x: Any) -> Any:
        if id(x) in self._others:
            return self._others[id(x)]
        if type(x) in SIMPLE or id(x) in self._seen or self._is_tensor(x):
            return x
        self._seen[id(x)] = x
        if isinstance(x, tuple):
            items = [*map(self, x)]
            made_again = any(new is not old for new, old in zip(items, x, strict=True))
            return getattr(type(x), "_make", type(x))(items) if made_again else x
        if isinstance(x, functools.partial):
            return functools.partial(self(x.func), *self(x.args), **self(dict(x.keywords)))
        if isinstance(x, types.MethodType):
            return types.MethodType(self(x.__func__), self(x.__self__))
        for held, put in self._places(x):
            new = self(held)
            if new is not held:
                put(new)
        return x

    def _places(self, x: Any) -> Iterator[tuple[Any, Callable[[Any], object]]]:
        """Yield what a thing holds, each with a function that puts something else there."""
        if isinstance(x, types.FunctionType):
            for cell in x.__closure__ or ():
                if cell != _EMPTY:
                    yield cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
            yield x.__defaults__, functools.partial(setattr, x, "__defaults__")
            yield from _items(x.__kwdefaults__ or {})
            yield from _items(x.__dict__)
            self._scope = self._scope or x.__globals__  # the rule's own module
            if x.__globals__ is self._scope:  # what other modules keep is theirs
                yield from _items(self._scope, [name for name in x.__code__.co_names if name in self._scope])
        elif isinstance(x, (list, deque)):
            yield from _items(x, range(len(x)))
        elif isinstance(x, dict):
            yield from _items(x)
        elif isinstance(x, types.ModuleType):
            yield from _items(vars(x), [name for name, held in vars(x).items() if id(held) in self._others])
        elif isinstance(x, type):
            own = vars(x).items() if x.__flags__ & _HEAP_TYPE else ()
            yield from ((held, functools.partial(setattr, x, name)) for name, held in [*own] if _shows(held))
        elif isinstance(x, (staticmethod, classmethod)):
            self(x.__func__)
        elif isinstance(x, FunctionHolder):
            self(x.held_function)
        elif isinstance(x, ContextVar):
            yield x.get(None), x.set
        elif is_array_of_objects(x):
            yield from _items(x.reshape(-1), range(x.size))
        elif _is_of_python(type(x)):
            names = [name for name in slots_of(type(x)) if hasattr(x, name)]
            yield from ((getattr(x, name), functools.partial(setattr, x, name)) for name in names)
            yield from _items(getattr(x, "__dict__", {}))
            self(type(x))
        elif any(self(held) is not held for held in gc.get_referents(x)):
            self.closed = x


_EMPTY = types.CellType()
_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: a class of Python, whose objects show what they hold"""


def _shows(x: Any) -> bool:
    """Return True for what a class has been given, and False for the descriptors that Python has made for it."""
    return type(x) in _SHOWING or hasattr(type(x), "dtype") or hasattr(x, "__dict__")


_SHOWING = (list, dict, tuple, set, types.FunctionType, staticmethod, classmethod)


def _is_of_python(kind: type) -> bool:
    """Return True for a class whose objects hold what their attributes show."""
    names = {name for base in kind.__mro__ for name in vars(base)}
    return not issubclass(kind, functools._lru_cache_wrapper) and bool(names & {"__dict__", "__slots__"})


def _items(holder: Any, keys: Any = None) -> Iterator[tuple[Any, Callable[[Any], object]]]:
    for key in list(holder) if keys is None else keys:
        yield holder[key], functools.partial(operator.setitem, holder, key)
