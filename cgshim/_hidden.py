"""Tensors that a rule reaches where nobody can put others in their place: in objects, and in what f has written to."""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cgshim._closure import SIMPLE, FunctionHolder, attributes_of, contents_of

DEPTH = 6
"""at which configuration ends"""


def tensors_in(objects: Sequence[Any], is_tensor: Callable[[Any], bool]) -> Iterator[Any]:
    """The tensors that objects hold: in attributes, in containers of any kind, in iterators, in local classes."""
    seen: set[int] = set()
    level = list(objects)
    for _ in range(DEPTH):
        inner = [each for x in level for each in _inside(x)]
        yield from filter(is_tensor, inner)
        level = [each for each in inner if id(each) not in seen and not is_tensor(each) and _may_hold(each)]
        seen.update(map(id, level))


def _inside(x: Any) -> list[Any]:
    inner = contents_of(x)
    if inner is not None:
        return inner
    if isinstance(x, type):
        return list(vars(x).values())
    if getattr(getattr(x, "dtype", None), "kind", "") == "O":  # an array of objects, which Python's collector ignores
        return list(x.flat)
    return [*attributes_of(x), *gc.get_referents(x)]


def _may_hold(x: Any) -> bool:
    if isinstance(x, type):
        return is_local(x)
    return type(x) not in SIMPLE and not isinstance(x, types.ModuleType)


def is_local(x: type) -> bool:
    """Whether a class was made within a function, in whose variables its methods may look."""
    return "<locals>" in x.__qualname__


# --- What f may have written to -----------------------------------------------------------------------------------

_STORES = {"STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_SLICE"}
_WRITERS = frozenset(["append", "appendleft", "extend", "insert", "update", "setdefault", "add", "put", "setattr"])
_NO_HOLDERS = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, FunctionHolder)


def writes(f: Any, but: types.CodeType | None) -> bool:
    """Whether f, or a helper of its module or its object, may store a tensor in what was there before the call.

    That is read off the code: an assignment to an attribute, an item or a global, or a method that is called like those
    of lists and dicts. `but` is the code of the rule, which may write what it wants.
    """
    function, owner = _function_of(f), type(getattr(f, "__self__", f))
    key = getattr(function, "__code__", None), owner, but
    if key not in _writes:
        _writes[key] = any(writes_itself(code, but) for code in _codes_within_reach(function, owner))
    return _writes[key]


_writes: dict[Any, bool] = {}


def _codes_within_reach(function: Any, owner: type) -> Iterator[types.CodeType]:
    """The code of a function, and of the functions of its module, closure and class that it names."""
    todo, seen = [function], set[Any]()
    scope = getattr(function, "__globals__", {})
    while todo:
        x = _function_of(todo.pop())
        if not isinstance(x, types.FunctionType) or x.__code__ in seen or x.__globals__ is not scope:
            continue
        seen.add(x.__code__)
        yield x.__code__
        names = names_in(x.__code__)
        todo += [scope.get(name) for name in names]
        todo += [content for cell in x.__closure__ or () for content in contents_of(cell) or ()]
        todo += [inspect.getattr_static(owner, name, None) for name in names]


@functools.lru_cache(maxsize=4096)
def writes_itself(code: types.CodeType, but: types.CodeType | None) -> bool:
    """Whether this code, or that of the functions within it, stores something, or calls what may."""
    if any(i.opname in _STORES for i in dis.get_instructions(code)) or _WRITERS & set(code.co_names):
        return True
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return any(writes_itself(each, but) for each in inner if each is not but)


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """The names that code, and the functions and comprehensions within it, look up outside of themselves."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def globals_of(code: types.CodeType, scope: dict[str, Any], f: Any) -> list[Any]:
    """The global objects and containers that code names, and what else f assigns to these names."""
    found = [(name, scope[name]) for name in names_in(code) if name in scope]
    found = [(name, x) for name, x in found if type(x) not in SIMPLE and not isinstance(x, _NO_HOLDERS)]
    assigned = assigned_globals(getattr(_function_of(f), "__code__", code)) if found else ()
    return [[x] if name in assigned else x for name, x in found]


@functools.lru_cache(maxsize=4096)
def assigned_globals(code: types.CodeType) -> frozenset[str]:
    """The global names that code, and the functions within it, assign to."""
    own = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"}
    inner = [assigned_globals(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(own).union(*inner)


def _function_of(x: Any) -> Any:
    """The function that runs when x is called: a partial's, a method's, that of an object's class."""
    while isinstance(x, (functools.partial, staticmethod, classmethod, types.MethodType)):
        x = x.func if isinstance(x, functools.partial) else x.__func__
    return x if isinstance(x, (types.FunctionType, type)) else inspect.getattr_static(type(x), "__call__", None)
