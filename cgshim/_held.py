"""What a thing holds, and where: to list the tensors that a function may read, and to put others in
their places.

A framework tells what a rule reads, as long as f computes in the framework. This is for what it
does not tell: objects that no registry knows, and what an opaque f has computed in NumPy or C,
which is known by its identity alone.
"""

from __future__ import annotations

import functools
import gc
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

SIMPLE = frozenset([bool, int, float, complex, str, bytes, type(None)])


class FunctionHolder:
    """An object that is called like the function that it holds, as an op is."""

    __slots__ = ()
    _f: Callable[..., Any]

    @property
    def held_function(self) -> Callable[..., Any]:
        """The function."""
        return self._f


Put = Callable[[Any], object]


def places(x: Any) -> Iterator[tuple[Any, Put | None]]:
    """Yield what a thing holds, each with what puts something else there; None where that is not
    possible.

    An object shows what its attributes are. Of an object of C, the garbage collector knows what it
    holds.
    """
    if isinstance(x, types.FunctionType):
        for cell in x.__closure__ or ():
            if cell != _EMPTY:
                yield cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
        yield x.__defaults__, functools.partial(setattr, x, "__defaults__")
        yield from _items(x.__kwdefaults__ or {})
        yield from _items(x.__dict__)
    elif isinstance(x, (list, deque)):
        yield from _items(x, range(len(x)))
    elif isinstance(x, dict):
        yield from _items(x)
    elif isinstance(x, FunctionHolder):
        yield x.held_function, None
    elif isinstance(x, ContextVar):
        yield x.get(None), x.set
    elif is_array_of_objects(x):
        yield from _items(x.reshape(-1), range(x.size))
    elif _is_of_python(type(x)):
        names = [name for name in _slots_of(type(x)) if hasattr(x, name)]
        yield from ((getattr(x, name), functools.partial(setattr, x, name)) for name in names)
        yield from _items(getattr(x, "__dict__", {}))
    else:
        yield from ((held, None) for held in gc.get_referents(x))


_EMPTY = types.CellType()


def _items(holder: Any, keys: Iterable[Any] | None = None) -> Iterator[tuple[Any, Put]]:
    for key in list(holder) if keys is None else keys:
        yield holder[key], functools.partial(operator.setitem, holder, key)


def is_array_of_objects(x: Any) -> bool:
    """Return True for NumPy's array of any objects of Python."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray) and x.dtype.kind == "O"


def _is_of_python(kind: type) -> bool:
    """Return True for a class whose objects hold what their attributes show."""
    names = {name for base in kind.__mro__ for name in vars(base)}
    return not issubclass(kind, _HOLD_MORE) and bool(names & {"__dict__", "__slots__"})


_HOLD_MORE = (
    tuple,
    functools.partial,
    functools._lru_cache_wrapper,
    staticmethod,
    classmethod,
)


def _slots_of(kind: type) -> list[str]:
    declared = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
    names = [name for slots in declared for name in ([slots] if isinstance(slots, str) else slots)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _named_globals(function: types.FunctionType) -> list[str]:
    return [name for name in function.__code__.co_names if name in function.__globals__]


# --- List what is held ----------------------------------------------------------------------------


def tensors_inside(x: Any, is_tensor: Callable[[Any], bool], depth: int = 5) -> list[Any]:
    """Return the tensors that an object holds, down to a depth where configuration ends; each once."""
    return _search(x, is_tensor, depth, with_globals=False)


def tensors_held(function: Any, is_tensor: Callable[[Any], bool]) -> list[Any]:
    """Return the tensors in a function's closure, in objects that it holds, in globals that it
    names; each once.

    They may be too many, for it need not read them, and too few: those of other modules, for
    example, are not there.
    """
    return _search(function, is_tensor, 6, with_globals=True)


def _search(
    x: Any, is_tensor: Callable[[Any], bool], depth: int, *, with_globals: bool
) -> list[Any]:
    seen: dict[int, Any] = {}  # kept alive, so that no other object gets its identity
    tensors: list[Any] = []
    todo = [(x, 0)]
    while todo:
        x, level = todo.pop()
        if id(x) in seen or level > depth or isinstance(x, _NO_HOLDERS):
            continue
        seen[id(x)] = x
        if is_tensor(x):
            tensors.append(x)
        elif type(x) not in SIMPLE:
            inner = [held for held, _ in places(x)]
            if with_globals and isinstance(x, types.FunctionType):
                inner += [x.__globals__[name] for name in _named_globals(x)]
            # however deep functions are in functions, they are code
            level += not isinstance(x, _FUNCTIONS)
            todo += [(held, level) for held in inner]
    return tensors


_FUNCTIONS: tuple[type, ...] = (
    types.FunctionType,
    functools.partial,
    types.MethodType,
    FunctionHolder,
)
_NO_HOLDERS: tuple[type, ...] = (type, types.ModuleType, types.CodeType)


def path_to(x: Any, function: Any, depth: int = 5) -> str | None:
    """Return where a function holds a thing, as Python writes it (solver.history[0]); None if that
    is not seen.
    """
    seen: dict[int, Any] = {}  # kept alive, so that no other object gets its identity
    todo = [("", function)]
    for _ in range(depth):
        parts = [part for path, holder in todo for part in _named_parts(path, holder)]
        todo = [(path, held) for path, held in parts if id(held) not in seen]
        for path, held in todo:
            if held is x:
                return path
            seen[id(held)] = held
    return None


def _named_parts(path: str, x: Any) -> list[tuple[str, Any]]:
    if isinstance(x, (list, tuple, deque)):
        return [(f"{path}[{at}]", held) for at, held in enumerate(x)]
    if isinstance(x, dict):
        return [(f"{path}[{key!r}]", held) for key, held in x.items()]
    if isinstance(x, FunctionHolder):
        return [(path, x.held_function)]
    if isinstance(x, types.MethodType):
        return [("self", x.__self__), (path, x.__func__)]
    if isinstance(x, types.FunctionType):
        cells = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
        own = [(name, cell.cell_contents) for name, cell in cells if cell != _EMPTY]
        return own + [(name, x.__globals__[name]) for name in _named_globals(x)]
    if type(x) in SIMPLE or isinstance(x, _NO_HOLDERS) or not _is_of_python(type(x)):
        return []
    names = [*getattr(x, "__dict__", ()), *_slots_of(type(x))]
    return [(f"{path}.{name}", getattr(x, name)) for name in names if hasattr(x, name)]


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
        if isinstance(x, functools.partial):
            parts = (x.func, x.args, tuple(x.keywords.values()))
            return self._made_again(
                x,
                parts,
                lambda new: functools.partial(
                    new[0], *new[1], **dict(zip(x.keywords, new[2], strict=True))
                ),
            )
        if isinstance(x, types.MethodType):
            return self._made_again(x, (x.__func__, x.__self__), lambda new: types.MethodType(*new))
        for held, put in self._places(x):
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

    def _places(self, x: Any) -> Iterator[tuple[Any, Put | None]]:
        """Yield the places that this walk goes through; of modules and classes those that may hold
        what is replaced.
        """
        if isinstance(x, types.ModuleType):
            yield from _items(
                vars(x), [name for name, held in vars(x).items() if id(held) in self._replacements]
            )
        elif isinstance(x, type):
            own = vars(x).items() if x.__flags__ & _HEAP_TYPE else ()
            yield from (
                (held, functools.partial(setattr, x, name)) for name, held in [*own] if _shows(held)
            )
        else:
            yield from places(x)
            if isinstance(x, types.FunctionType):
                # the rule's own module: what others keep is theirs
                self._scope = self._scope or x.__globals__
                yield from _items(
                    x.__globals__, _named_globals(x) if x.__globals__ is self._scope else ()
                )
            elif _is_of_python(type(x)):
                yield type(x), None


_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: a class of Python, whose objects show what they hold"""


def _shows(x: Any) -> bool:
    """Return True for what a class has been given, and False for the descriptors that Python has
    made for it.
    """
    return type(x) in _SHOWING or hasattr(type(x), "dtype") or hasattr(x, "__dict__")


_SHOWING = (list, dict, tuple, set, types.FunctionType, staticmethod, classmethod)
