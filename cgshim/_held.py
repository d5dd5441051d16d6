"""List the tensors that a function may read, for a framework that does not tell which ones it reads."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable
from typing import Any

from cgshim._contents import SIMPLE, FunctionHolder

DEPTH = 6
"""the depth of objects where configuration ends; functions in functions do not count"""

_FUNCTIONS: tuple[type, ...] = (types.FunctionType, types.CellType, functools.partial, types.MethodType, FunctionHolder)
_NO_HOLDERS: tuple[type, ...] = (type, types.ModuleType, types.CodeType)


def tensors_held(function: Any, is_tensor: Callable[[Any], bool]) -> list[Any]:
    """Return the tensors in a function's closure, in objects that it holds, in globals that it names; each once.

    They may be too many, for it need not read them, and too few: those of other modules, for example, are not there.
    """
    seen: dict[int, Any] = {}
    todo = [(function, 0)]
    while todo:
        x, depth = todo.pop()
        if id(x) in seen or depth > DEPTH or type(x) in SIMPLE or isinstance(x, _NO_HOLDERS):
            continue
        seen[id(x)] = x
        if not is_tensor(x):
            todo += [(each, depth + (not isinstance(x, _FUNCTIONS))) for each in _held_by(x)]
    return [x for x in seen.values() if is_tensor(x)]


def _held_by(x: Any) -> list[Any]:
    if isinstance(x, FunctionHolder):
        return [x.held_function]
    if not isinstance(x, types.FunctionType):
        return gc.get_referents(x)
    named = [x.__globals__[name] for name in x.__code__.co_names if name in x.__globals__]
    return [*(x.__closure__ or ()), x.__defaults__, x.__kwdefaults__, x.__dict__, *named]
