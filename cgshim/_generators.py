"""The random number generators that a function may draw from: Python's, NumPy's, a framework's, and those it holds."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cgshim._closure import attributes_of, contents_of
from cgshim._same import same


class Generator(NamedTuple):
    """How to read the state of a generator, and how to set it."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


class Drawing:
    """What generators are at now, to know later whether something was drawn from one of them."""

    def __init__(self, generators: Sequence[Generator]) -> None:
        self._before = [(generator, generator.get()) for generator in generators]

    def happened(self) -> bool:
        """Whether a number was drawn since; if so, the generators are set back."""
        drawn = [(g, before) for g, before in self._before if not same(before, g.get(), _tensors_agree)]
        for generator, before in drawn:
            generator.set(before)
        return bool(drawn)


def generators_of(f: Callable[..., Any]) -> list[Generator]:
    """The generators of this process that every function reads, and those that f holds or names."""
    found = []
    if "random" in sys.modules:
        random = sys.modules["random"]
        found.append(Generator(random.getstate, random.setstate))
    if "numpy" in sys.modules:
        numpy_random = sys.modules["numpy"].random
        found.append(Generator(numpy_random.get_state, numpy_random.set_state))
    return found + [generator for x in _within_reach(f) if (generator := _as_generator(x)) is not None]


def _within_reach(f: Any) -> list[Any]:
    """What f holds in its closure and its object, and the globals that it and its helpers of one module name."""
    found: list[Any] = []
    todo, seen = [f], {id(f)}
    scope = getattr(inspect.unwrap(f), "__globals__", None)
    while todo:
        x = todo.pop()
        inner = [*(contents_of(x) or ())]
        if getattr(x, "__globals__", None) is scope and scope is not None:
            inner += [scope[name] for name in x.__code__.co_names if name in scope]
        instance = getattr(x, "__self__", None) if callable(x) else None
        if instance is not None:
            inner += [instance, *attributes_of(instance)]
        fresh = [each for each in inner if id(each) not in seen and not isinstance(each, (type, types.ModuleType))]
        seen.update(map(id, fresh))
        found += fresh
        todo += fresh
    return found


def _as_generator(x: Any) -> Generator | None:
    """x as a generator: NumPy's Generator and RandomState, Python's Random, torch's Generator, or their like."""
    if hasattr(x, "bit_generator"):
        bits = x.bit_generator
        return Generator(lambda: bits.state, lambda state: setattr(bits, "state", state))
    for get, set in (("getstate", "setstate"), ("get_state", "set_state")):
        if callable(getattr(x, get, None)) and callable(getattr(x, set, None)) and hasattr(x, "seed"):
            return Generator(getattr(x, get), getattr(x, set))
        if hasattr(x, "initial_seed") and hasattr(x, "get_state"):
            return Generator(x.get_state, x.set_state)
    return None


def _tensors_agree(a: Any, b: Any) -> bool | None:
    """States that are tensors of a framework, as torch's are, are compared by their bytes."""
    if hasattr(a, "numpy") and hasattr(b, "numpy"):
        return bool(a.numpy().tobytes() == b.numpy().tobytes())
    return None
