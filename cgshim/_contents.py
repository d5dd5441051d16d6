"""Find what things hold: functions their closures, containers their items, objects their attributes."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

SIMPLE = frozenset([bool, int, float, complex, str, bytes, type(None)])


class FunctionHolder:
    """An object that is called like the function that it holds, as an op is: its closure is searched too."""

    __slots__ = ()

    @property
    def held_function(self) -> Callable[..., Any]:
        """The function."""
        raise NotImplementedError

    def holding(self, function: Callable[..., Any]) -> FunctionHolder:
        """Return a similar object that holds another function of the same code."""
        raise NotImplementedError


METHODS_IN_C = (types.BuiltinMethodType, types.MethodWrapperType)


def contents_of(x: Any) -> list[Any] | None:
    """Return what x holds if it is searched; None for any other object."""
    if isinstance(x, types.FunctionType):
        return [*(x.__closure__ or ()), x.__defaults__, x.__kwdefaults__]
    if isinstance(x, types.CellType):
        try:
            return [x.cell_contents]
        except ValueError:  # a name that was never assigned
            return []
    if type(x) in (list, tuple) or (isinstance(x, tuple) and hasattr(x, "_fields")):
        return list(x)
    if type(x) is dict:
        return list(x.values())
    if type(x) is functools.partial:
        return [x.func, *x.args, *x.keywords.values()]
    if isinstance(x, types.MethodType):
        return [x.__func__, x.__self__]
    if isinstance(x, METHODS_IN_C) and not isinstance(x.__self__, types.ModuleType | None):
        return [x.__self__]
    if isinstance(x, FunctionHolder):
        return [x.held_function]
    return None


def attributes_of(x: Any) -> list[Any]:
    """Return what an object holds in its attributes."""
    slots = [name for base in type(x).__mro__ for name in _as_names(base.__dict__.get("__slots__", ()))]
    slots = [name for name in slots if name not in _NOT_HELD]
    return [*getattr(x, "__dict__", {}).values(), *(getattr(x, name, None) for name in slots)]


_NOT_HELD = ("__dict__", "__weakref__", "_calls")
"""slots that say nothing about what an object is; in _calls an op remembers its earlier calls"""


def _as_names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def tensors_inside(x: Any, is_tensor: Callable[[Any], bool], depth: int = 5) -> Iterator[Any]:
    """Yield the tensors that an object holds, in its attributes too, down to a depth where configuration ends."""
    seen: set[int] = set()
    level = [x]
    for _ in range(depth):
        inner = [each for x in level for each in (contents_of(x) or attributes_of(x))]
        yield from filter(is_tensor, inner)
        level = [each for each in inner if id(each) not in seen and _may_hold(each) and not is_tensor(each)]
        seen.update(map(id, level))


def _may_hold(x: Any) -> bool:
    return type(x) not in SIMPLE and not isinstance(x, (type, types.ModuleType))


def is_local(x: type) -> bool:
    """Return True if a class was made in a function, whose variables its methods may read."""
    return "<locals>" in x.__qualname__


def held_by(x: Any) -> Iterator[Any]:
    """Yield x, and all that is searched in it, each once."""
    seen: set[int] = set()
    todo = [x]
    while todo:
        x = todo.pop()
        if id(x) not in seen and type(x) not in SIMPLE:
            seen.add(id(x))
            yield x
            todo += contents_of(x) or ()


def assigned_cells_of(f: Any) -> list[types.CellType]:
    """Return the variables outside of f that f, or a function that it holds, assigns to."""
    return [cell for x in held_by(f) for cell in cells_assigned_by(x)]


@functools.lru_cache(maxsize=4096)
def assigned_names(code: types.CodeType) -> frozenset[str]:
    """Return the names that code, or a function that it makes, declares nonlocal and assigns to."""
    import dis  # its import takes as long as that of all of cgshim, and few processes need it more than a few times

    own = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("STORE_DEREF", "DELETE_DEREF")
    }
    inner = (assigned_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(own.union(*inner)) & frozenset(code.co_freevars)


def cells_assigned_by(x: Any) -> Iterator[types.CellType]:
    """Yield the cells that a function assigns to; others may read them too."""
    if isinstance(x, types.FunctionType) and x.__closure__:
        assigned = assigned_names(x.__code__)
        for name, cell in zip(x.__code__.co_freevars, x.__closure__, strict=True):
            if name in assigned:
                yield cell
