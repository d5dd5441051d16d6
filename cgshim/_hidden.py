"""Tensors that a rule reaches where nobody can put others in their place: in objects, and in what f has written to."""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import itertools
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

_WRITERS = frozenset(["append", "appendleft", "extend", "insert", "update", "setdefault", "add", "put"])
"""methods that are called like those of lists, dicts, sets and queues"""
_NO_HOLDERS = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, FunctionHolder)


def writes(f: Any, but: types.CodeType | None) -> bool:
    """Whether f, or a helper of its module or its object, may store a tensor in what was there before the call.

    That is read off the code: an assignment to a global, to an attribute or to an item of what f has not made itself,
    or a method of such a thing that is called like those of lists and dicts. `but` is the code of the rule, which may
    write what it wants.
    """
    function, owner = _function_of(f), type(getattr(f, "__self__", f))
    key = getattr(function, "__code__", None), owner, but
    if key not in _writes:
        own, given = key[0], _given_before(f)
        _writes[key] = any(
            writes_itself(code, but, given if code is own else code.co_argcount)
            for code in _codes_within_reach(function, owner)
        )
    return _writes[key]


_writes: dict[Any, bool] = {}


def _given_before(f: Any) -> int:
    """How many parameters of f, at most, were given to it before the call."""
    if isinstance(f, functools.partial):
        return len(f.args) + len(f.keywords) + 1
    return 0 if isinstance(f, types.FunctionType) else 1


def _codes_within_reach(function: Any, owner: type) -> Iterator[types.CodeType]:
    """The code of a function, and of the functions of its module, closure and class that it names."""
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
        todo += [inspect.getattr_static(owner, name, None) for name in names]


def writes_itself(code: types.CodeType, but: types.CodeType | None, foreign_parameters: int) -> bool:
    """Whether this code, or that of the functions within it, writes to what it has not made.

    A helper's parameters are its caller's; those of f are the arguments, of which the rule keeps copies.
    """
    instructions = list(dis.get_instructions(code))
    own = set(code.co_varnames[foreign_parameters:])
    own -= {new.argval for old, new in itertools.pairwise(instructions)
            if new.opname == "STORE_FAST" and old.opname in _LOADS_OF_OTHERS}  # fmt: skip
    if any(_writes_to_others(instructions, at, own) for at in range(len(instructions))):
        return True
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return any(writes_itself(each, but, each.co_argcount) for each in inner if each is not but)


_INDICES = {"STORE_ATTR": 0, "STORE_SUBSCR": 1, "STORE_SLICE": 2}
"""the operations that store something, and how many indices stand between them and where they store it"""

_LOADS_OF_OTHERS = {"LOAD_ATTR", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_FAST"}


def _writes_to_others(instructions: Sequence[dis.Instruction], at: int, own: set[str]) -> bool:
    """Whether an instruction stores something in what is no variable of the code's own."""
    instruction = instructions[at]
    if instruction.opname == "STORE_GLOBAL" or (
        instruction.opname == "LOAD_GLOBAL" and instruction.argval in ("setattr", "globals", "vars")
    ):
        return True
    calls_a_writer = instruction.opname in ("LOAD_METHOD", "LOAD_ATTR") and instruction.argval in _WRITERS
    if not calls_a_writer and instruction.opname not in _INDICES:
        return False
    receiver = at - 1
    for _ in range(_INDICES.get(instruction.opname, 0)):
        receiver = _first_of(instructions, receiver) - 1
    load = instructions[receiver]
    return not (load.opname.startswith("LOAD_FAST") and load.argval in own)


def _first_of(instructions: Sequence[dis.Instruction], last: int) -> int:
    """Where the expression begins whose value the last instruction leaves."""
    pushed = 0
    for at in range(last, -1, -1):
        i = instructions[at]
        pushed += dis.stack_effect(i.opcode, i.arg if i.opcode >= dis.HAVE_ARGUMENT else None, jump=False)
        if pushed >= 1:
            return at
    return 0


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """The names that code, and the functions and comprehensions within it, look up outside of themselves."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def globals_of(code: types.CodeType, scope: dict[str, Any], f: Any) -> list[Any]:
    """The global objects and containers that code names, and what else f assigns to these names."""
    found = [(name, scope[name]) for name in names_in(code) if name in scope]
    if not found:
        return []
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
