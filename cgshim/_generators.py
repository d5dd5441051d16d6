"""The random number generators that a function may draw from: Python's, NumPy's, a framework's, and those it holds."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cgshim._contents import attributes_of, contents_of
from cgshim._hidden import names_in
from cgshim._same import same


class Generator(NamedTuple):
    """How to read the state of a generator, and how to set it."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


class Drawing:
    """The states of generators now, to tell later if a number was drawn from one of them."""

    def __init__(self, generators: Sequence[Generator]) -> None:
        self._before = [(generator, generator.get()) for generator in generators]

    def happened(self) -> bool:
        """Return True if a number was drawn since; if so, set the generators back."""
        drawn = [(g, before) for g, before in self._before if not _same_state(before, g.get())]
        for generator, before in drawn:
            generator.set(before)
        return bool(drawn)


def generators_of(f: Callable[..., Any]) -> list[Generator]:
    """Return the global generators of this process, and those that f holds or names."""
    found = []
    if "random" in sys.modules:
        random = sys.modules["random"]
        found.append(Generator(random.getstate, random.setstate))
    if "numpy" in sys.modules:
        numpy_random = sys.modules["numpy"].random
        found.append(Generator(numpy_random.get_state, numpy_random.set_state))
    return found + [generator for x in _within_reach(f) if (generator := _as_generator(x)) is not None]


def _within_reach(f: Any) -> list[Any]:
    """Return what f holds in its closure and its object, and the globals that f and helpers of its module name."""
    found: list[Any] = []
    todo, seen = [f], {id(f)}
    scope: dict[str, Any] = getattr(_code_of(f), "__globals__", {})
    while todo:
        x = todo.pop()
        inner = [*(contents_of(x) or ())]
        function = _code_of(x)
        if getattr(function, "__globals__", None) is scope:
            inner += _named(names_in(function.__code__), scope)
        instance = x.__self__ if hasattr(type(x), "__self__") else None
        if instance is None and x is f and not isinstance(f, types.FunctionType):
            instance = f  # an object that is called
        if instance is not None:
            inner += [instance, *attributes_of(instance)]
        inner += [each for each in attributes_of(x) if _as_generator(each) is not None]
        fresh = [each for each in inner if id(each) not in seen and not isinstance(each, (type, types.ModuleType))]
        seen.update(map(id, fresh))
        found += fresh
        todo += fresh
    return found


def _code_of(x: Any) -> Any:
    """Return the function that runs when x is called: of a partial, a decorated function, or an object's class."""
    while isinstance(x, functools.partial):
        x = x.func
    if not callable(x) or isinstance(x, type):
        return None
    x = inspect.unwrap(x)
    return x if hasattr(x, "__code__") else type(x).__call__


def _named(names: frozenset[str], scope: dict[str, Any]) -> list[Any]:
    """Return what the names stand for in a module, and in the modules among these."""
    found = [scope[name] for name in names if name in scope]
    modules = [vars(x) for x in found if isinstance(x, types.ModuleType)]
    return found + [module[name] for module in modules for name in names if name in module]


def _as_generator(x: Any) -> Generator | None:
    """Return x as a Generator if it is NumPy's Generator or RandomState, Python's Random, torch's or similar."""
    kind = type(x)  # not x: a configuration object may have any attribute, or raise
    if hasattr(kind, "bit_generator"):
        bits = x.bit_generator
        return Generator(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if not (hasattr(kind, "seed") or hasattr(kind, "initial_seed")):
        return None
    for get, set in (("getstate", "setstate"), ("get_state", "set_state")):
        if hasattr(kind, get) and hasattr(kind, set):
            return Generator(getattr(x, get), getattr(x, set))
    return None


_STATE_OF_PYTHON = [int, tuple]


def _same_state(a: Any, b: Any) -> bool:
    if type(a) is tuple and [*map(type, a)][:2] == _STATE_OF_PYTHON:  # of 625 integers
        return bool(a == b)
    return same(a, b, _tensors_agree)


def _tensors_agree(a: Any, b: Any) -> bool | None:
    """Compare states that are tensors of a framework, as torch's are, by their bytes; None for any others."""
    if hasattr(a, "numpy") and hasattr(b, "numpy"):
        return bool(a.numpy().tobytes() == b.numpy().tobytes())
    return None
