"""Find tensors that a rule reaches and that cannot be replaced: in objects, and in what f has written to."""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cgshim._contents import SIMPLE, FunctionHolder, attributes_of, contents_of, is_local
from cgshim._writing import ANYTHING, attributes_in, written_by

DEPTH = 6
"""the depth where configuration ends"""


def tensors_in(objects: Sequence[Any], is_tensor: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the tensors that objects hold: in attributes, containers of any kind, iterators and local classes."""
    seen: set[int] = set()
    level = list(objects)
    for _ in range(DEPTH):
        inner = {id(each): each for x in level for each in _inside(x) if id(each) not in seen}
        seen.update(inner)
        yield from filter(is_tensor, inner.values())
        level = [each for each in inner.values() if not is_tensor(each) and _may_hold(each)]


def _inside(x: Any) -> list[Any]:
    inner = contents_of(x)
    if inner is not None:
        return inner
    if isinstance(x, type):
        return list(vars(x).values())
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(x, numpy.ndarray) and x.dtype.kind == "O":  # which Python's collector ignores
        return list(x.flat)
    return [*attributes_of(x), *gc.get_referents(x)]


def _may_hold(x: Any) -> bool:
    if isinstance(x, type):
        return is_local(x)
    return type(x) not in SIMPLE and not isinstance(x, types.ModuleType)


# --- What f may have written to -----------------------------------------------------------------------------------

_NO_HOLDERS = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, FunctionHolder)


def written(f: Any, but: types.CodeType | None) -> frozenset[str]:
    """Return the attributes in which f, or a helper of its module or object, may store a tensor outside of itself.

    ANYTHING is among them if a name is unknown. ``but`` is the code of the rule, which may write anything.
    """
    function, owner = _function_of(f), type(getattr(f, "__self__", f))
    key = getattr(function, "__code__", None), owner, but
    if key not in _written:
        own, given = key[0], _given_before(f)
        codes = _codes_within_reach(function, owner)
        of_each = [written_by(code, but, given if code is own else code.co_argcount) for code in codes]
        _written[key] = frozenset().union(*of_each)
    return _written[key]


_written: dict[Any, frozenset[str]] = {}


def values_under(names: frozenset[str], objects: Sequence[Any]) -> list[Any]:
    """Return what objects, and the objects that they hold, have in the attributes of these names."""
    if ANYTHING in names:
        return list(objects)
    found: list[Any] = []
    seen: set[int] = set()
    level = list(objects)
    for _ in range(DEPTH):
        found += [value for x in level for value in _values_of(x, names)]
        inner = [each for x in level for each in _inside(x)]
        level = [each for each in inner if id(each) not in seen and _may_hold(each)]
        seen.update(map(id, level))
    return found


def _values_of(x: Any, names: frozenset[str]) -> list[Any]:
    if isinstance(x, dict):  # where an object's own __setattr__ may put them
        return [x[name] for name in names if name in x]
    of_class = [inspect.getattr_static(type(x), name, None) for name in names]
    if any(hasattr(type(each), "__set__") and not isinstance(each, types.MemberDescriptorType) for each in of_class):
        return [x]  # a property, which stores under another name
    return [value for name in names if (value := _attribute(x, name)) is not None]


def _attribute(x: Any, name: str) -> Any:
    """Return an object's own attribute, in its dict or in a slot."""
    found = inspect.getattr_static(x, name, None)
    return getattr(x, name, None) if isinstance(found, types.MemberDescriptorType) else found


def _given_before(f: Any) -> int:
    """Return how many parameters of f, at most, had their values before the call."""
    if isinstance(f, functools.partial):
        return len(f.args) + len(f.keywords) + 1
    return 0 if isinstance(f, types.FunctionType) else 1


def _codes_within_reach(function: Any, owner: type) -> Iterator[types.CodeType]:
    """Yield the code of a function, and of the functions of its module, closure and class that it names."""
    todo, seen = [function], set[Any]()
    scope = getattr(function, "__globals__", {})
    while todo:
        x = _function_of(todo.pop())
        if not isinstance(x, types.FunctionType) or x.__code__ in seen:
            continue
        seen.add(x.__code__)
        yield x.__code__
        names = names_in(x.__code__)
        others = [scope.get(name) for name in names]
        others += [content for cell in x.__closure__ or () for content in contents_of(cell) or ()]
        todo += [each for each in others if getattr(_function_of(each), "__globals__", None) is scope]
        todo += [inspect.getattr_static(owner, name, None) for name in attributes_in(x.__code__)]


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names that code, and the functions and comprehensions in it, look up outside of themselves."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def globals_of(code: types.CodeType, scope: dict[str, Any], f: Any) -> list[Any]:
    """Return the global objects and containers that code names; one whose name f assigns to comes in a list."""
    found = [(name, scope[name]) for name in names_in(code) if name in scope]
    if not found:
        return []
    found = [(name, x) for name, x in found if type(x) not in SIMPLE and not isinstance(x, _NO_HOLDERS)]
    assigned = assigned_globals(getattr(_function_of(f), "__code__", code)) if found else ()
    return [[x] if name in assigned else x for name, x in found]


@functools.lru_cache(maxsize=4096)
def assigned_globals(code: types.CodeType) -> frozenset[str]:
    """Return the global names that code, and the functions in it, assign to."""
    own = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"}
    inner = [assigned_globals(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(own).union(*inner)


def _function_of(x: Any) -> Any:
    """Return the function that runs when x is called: of a partial, of a method, or of an object's class."""
    while isinstance(x, (functools.partial, staticmethod, classmethod, types.MethodType)):
        x = x.func if isinstance(x, functools.partial) else x.__func__
    return x if isinstance(x, (types.FunctionType, type)) else inspect.getattr_static(type(x), "__call__", None)
