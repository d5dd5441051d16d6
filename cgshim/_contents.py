"""Find what things hold: functions their closures, containers their items, objects their attributes."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

SIMPLE = frozenset([bool, int, float, complex, str, bytes, type(None)])


class FunctionHolder:
    """An object that is called like the function that it holds, as an op is."""

    __slots__ = ()

    @property
    def held_function(self) -> Callable[..., Any]:
        """The function."""
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
    objects: Any = x if is_array_of_objects(x) else None
    return None if objects is None else list(objects.flat)


def is_array_of_objects(x: Any) -> bool:
    """Return True for NumPy's array of any objects of Python."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray) and x.dtype.kind == "O"


def attributes_of(x: Any) -> list[Any]:
    """Return what an object holds in its attributes."""
    return [*getattr(x, "__dict__", {}).values(), *(getattr(x, name, None) for name in slots_of(type(x)))]


def slots_of(kind: type) -> list[str]:
    """Return the names of the slots that objects of a class have, but for those that say nothing of what one is."""
    declared = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
    names = [name for slots in declared for name in ([slots] if isinstance(slots, str) else slots)]
    return [name for name in names if name not in _NOT_HELD]


_NOT_HELD = ("__dict__", "__weakref__", "_plans", "_plans_of_methods")
"""in _plans an op remembers its earlier calls"""


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
