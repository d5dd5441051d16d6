"""What a thing holds, and where: to list the tensors that a function may read, and to put others in
their places.

A framework tells what a rule reads, as long as f computes in the framework. This is for what it
does not tell: objects that no registry knows, and what an opaque f has computed in NumPy or C,
which is known by its identity alone.
"""

from __future__ import annotations

import copyreg
import functools
import gc
import math
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from cgshim._closure import SIMPLE, FunctionHolder

T = TypeVar("T")

_DISCRETE = frozenset([bool, int, str, bytes, type(None)])

Put = Callable[[Any], object]


Place = tuple[Any, tuple[str, Any] | None, Put | None]
"""What is held; how Python writes where, behind its holder's name (.history, [0]) or as a variable, in a format and
what goes into it; and what puts something else there. None stands for what Python cannot do."""


def places(x: Any) -> Iterator[Place]:
    """Yield what a thing holds, with the place of each.

    An object shows what its attributes are. Of an object of C, the garbage collector knows what it
    holds.
    """
    if not isinstance(x, (FunctionHolder, types.MethodType)):  # which show what they hold
        yield from _items(_attributes(x), ".{}")
    if isinstance(x, types.FunctionType):
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            if cell != _EMPTY:
                put = partial(setattr, cell, "cell_contents")
                yield cell.cell_contents, ("{}", name), put
        yield x.__defaults__, None, partial(setattr, x, "__defaults__")
        yield from _items(x.__kwdefaults__ or {}, "{}")
    elif isinstance(x, (list, tuple, deque)):
        yield from _items(x, "[{}]", range(len(x)))
    elif isinstance(x, dict):
        yield from _items(x, "[{!r}]")
    elif isinstance(x, FunctionHolder):
        yield x.held_function, _ITSELF, None
    elif isinstance(x, types.MethodType):
        yield x.__self__, ("self", None), None
        yield x.__func__, _ITSELF, None
    elif isinstance(x, ContextVar):
        yield x.get(None), (".get()", None), x.set
    elif is_array_of_objects(x):
        yield from _items(x.reshape(-1), ".flat[{}]", range(x.size))
    elif _is_of_python(type(x)):
        for name in copyreg._slotnames(type(x)):  # type: ignore[attr-defined]
            if hasattr(x, name):
                yield getattr(x, name), (".{}", name), partial(setattr, x, name)
    else:
        yield from [(held, None, None) for held in gc.get_referents(x)]


_EMPTY = types.CellType()
_ITSELF = "", None


def named_globals(x: Any) -> Iterator[Place]:
    """Yield the globals that a function names."""
    if isinstance(x, types.FunctionType):
        names = [name for name in x.__code__.co_names if name in x.__globals__]
        yield from _items(x.__globals__, "{}", names)


def _attributes(x: Any) -> dict[str, Any]:
    """Return the attributes of an object; none if its class makes up even this one, or raises an
    error of its own, as proxies do.
    """
    try:
        attributes = getattr(x, "__dict__", None)
    except Exception:  # noqa: BLE001  # whatever the author of the class has written
        return {}
    return attributes if isinstance(attributes, dict) else {}


def _items(holder: Any, written: str, keys: Iterable[Any] | None = None) -> Iterator[Place]:
    """Yield the items of a container with their places, but not those that have no derivative:
    most are names and flags.
    """
    for key in list(holder) if keys is None else keys:
        held = holder[key]
        if type(held) not in _DISCRETE:
            yield held, (written, key), partial(operator.setitem, holder, key)


def is_array_of_objects(x: Any) -> bool:
    """Return True for NumPy's array of any objects of Python."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray) and x.dtype.kind == "O"


def _is_of_python(kind: type) -> bool:
    """Return True for a class whose objects hold what their attributes show."""
    return not issubclass(kind, _HOLD_MORE) and any(
        "__dict__" in vars(base) or "__slots__" in vars(base) for base in kind.__mro__
    )


_HOLD_MORE = (partial, functools._lru_cache_wrapper, staticmethod, classmethod)


# --- List what is held ----------------------------------------------------------------------------


def objects_held(
    x: Any, is_tensor: Callable[[Any], bool], depth: int = 5, most: float = math.inf
) -> list[Any]:
    """Return the tensors that an object holds, down to a depth where configuration ends; each once.

    A container that is longer than ``most`` is not looked into: that takes a second for a million.
    """
    return [tensor for tensor, _ in _walk(x, is_tensor, depth, most, with_globals=False)]


def tensors_held(function: Any, is_tensor: Callable[[Any], bool]) -> list[Any]:
    """Return the tensors in a function's closure, in objects that it holds, in globals that it
    names; each once.

    They may be too many, for it need not read them, and too few: those of other modules, for
    example, are not there.
    """
    return [tensor for tensor, _ in _walk(function, is_tensor, 6, with_globals=True)]


def order_inside(x: Any, things: Sequence[Any]) -> tuple[int, ...]:
    """Return the numbers of the things in the order in which an object holds them, the nearest first."""
    number = {id(thing): at for at, thing in enumerate(things)}
    found = _walk(x, lambda held: id(held) in number, 20, with_globals=False)
    return tuple([number[id(thing)] for thing, _ in islice(found, len(things))])


def path_to(x: Any, function: Any) -> str | None:
    """Return where a function holds a thing, as Python writes it (solver.history[0]); None if that
    is not seen.
    """
    found = _walk(function, lambda held: held is x, 5, with_globals=True)
    return next((_written(way) for _, way in found), None)


Way = tuple[Any, tuple[str, Any] | None] | None
"""how a walk came to a thing: the way to its holder, and where that holds it; None where it began"""


def _walk(
    x: Any,
    is_wanted: Callable[[Any], bool],
    depth: int,
    most: float = math.inf,
    *,
    with_globals: bool,
) -> Iterator[tuple[Any, Way]]:
    """Yield what is wanted of what x holds, the nearest first, each once, and the way to it."""
    seen: set[int] = set()
    todo: list[tuple[Any, Way, int]] = [(x, None, 0)]
    for x, way, level in todo:  # which grows, and keeps all alive: no other gets an identity
        if id(x) in seen or level > depth or isinstance(x, _NO_HOLDERS):
            continue
        seen.add(id(x))
        if is_wanted(x):
            yield x, way
        elif type(x) not in SIMPLE and not (isinstance(x, _CONTAINERS) and len(x) > most):
            # however deep functions are in functions, they are code
            inner = level + (not isinstance(x, _FUNCTIONS))
            todo += [(held, (way, where), inner) for held, where, _ in places(x)]
            if with_globals:
                todo += [(held, (way, where), inner) for held, where, _ in named_globals(x)]


def _written(way: Way) -> str | None:
    """Return a way as Python writes it; None if it cannot."""
    if way is None:
        return "f"
    holder, where = way
    name = where and where[0].format(where[1])
    if name is None or name.isidentifier():
        return name
    path = _written(holder)
    return path and path + name


_FUNCTIONS: tuple[type, ...] = (types.FunctionType, partial, types.MethodType, FunctionHolder)
_CONTAINERS: tuple[type[Collection[Any]], ...] = (list, tuple, deque, dict, set, frozenset)
_NO_HOLDERS: tuple[type, ...] = (type, types.ModuleType, types.CodeType)


# --- Put others in their places -------------------------------------------------------------------


def replace_held(
    function: Any, others: Mapping[int, Any], is_tensor: Callable[[Any], bool]
) -> tuple[Any, object | None]:
    """Return a function that holds others in place of some objects, which are known by their
    identity.

    It is the same function: what it reaches is written to, in cells, default values, globals that
    it names, containers and attributes. A tuple, a partial or a method cannot be, and is made
    again. The second result is an object that holds one too and cannot be written to (an iterator,
    another type of C); None if there is none.
    """
    replacing = _Replacing(others, is_tensor)
    return replacing(function), replacing.closed


class _Replacing:
    """One walk through what a function reaches. It goes through each thing once."""

    def __init__(self, replacements: Mapping[int, Any], is_tensor: Callable[[Any], bool]) -> None:
        self._replacements, self._is_tensor = replacements, is_tensor
        self._seen: dict[int, Any] = {}
        self._scope: dict[str, Any] = {}
        self.closed: object | None = None

    def __call__(self, x: Any) -> Any:
        if id(x) in self._replacements:
            return self._replacements[id(x)]
        if type(x) in SIMPLE or id(x) in self._seen or self._is_tensor(x):
            return x
        self._seen[id(x)] = x
        if isinstance(x, tuple):
            return self._made_again(x, x, getattr(type(x), "_make", type(x)))
        if isinstance(x, partial):
            self(x.keywords)
            make = lambda new: partial(new[0], *new[1], **x.keywords)
            return self._made_again(x, (x.func, x.args), make)
        if isinstance(x, types.MethodType):
            return self._made_again(x, (x.__func__, x.__self__), lambda new: types.MethodType(*new))
        for held, _, put in self._places(x):
            new = self(held)
            if new is not held and put is not None:
                put(new)
            elif new is not held:
                self.closed = x
        return x

    def _made_again(self, x: Any, parts: tuple[Any, ...], make: Callable[[Any], Any]) -> Any:
        """Return a thing that cannot be written to, made again of its parts if one of them is
        replaced.
        """
        new = [*map(self, parts)]
        return (
            make(new) if any(one is not other for one, other in zip(new, parts, strict=True)) else x
        )

    def _places(self, x: Any) -> Iterator[Place]:
        """Yield the places that this walk goes through; of modules and classes those that may hold
        what is replaced.
        """
        if isinstance(x, types.ModuleType):
            names = [name for name, held in vars(x).items() if id(held) in self._replacements]
            yield from _items(vars(x), "{}", names)
        elif isinstance(x, type):
            for name, held in list(vars(x).items()):
                if _shows(held):
                    yield held, None, partial(setattr, x, name)
        else:
            yield from places(x)
            if isinstance(x, types.FunctionType):
                # the rule's own module: what others keep is theirs
                self._scope = self._scope or x.__globals__
                if x.__globals__ is self._scope:
                    yield from named_globals(x)
            elif _is_of_python(type(x)):
                yield type(x), None, None


def _shows(x: Any) -> bool:
    """Return True for what a class has been given, and False for the descriptors that Python has
    made for it.
    """
    return type(x) in _SHOWING or hasattr(type(x), "dtype") or hasattr(x, "__dict__")


_SHOWING = (list, dict, tuple, set, types.FunctionType, staticmethod, classmethod)


# --- What a thing was made of ---------------------------------------------------------------------


def reached(
    starts: Iterable[T], origins: Callable[[T], Iterable[T]], known: Collection[T] = ()
) -> list[T]:
    """Return the starts, and all that they were made of, each once; but none of the known ones, and
    nothing that only these were made of.
    """
    seen, todo = dict[T, None](), [*starts]
    while todo:
        x = todo.pop()
        if x not in known and x not in seen:
            seen[x] = None
            todo += origins(x)
    return [*seen]
