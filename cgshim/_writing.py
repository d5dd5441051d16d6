"""Find in a function's code what it stores in objects that it has not made itself."""

from __future__ import annotations

import dis
import functools
import re
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

ANYTHING = "*"
"""the name for what has no name"""

_WRITERS = frozenset(["append", "appendleft", "extend", "insert", "update", "setdefault", "add", "put"])
"""methods with the names of those that write to lists, dicts, sets and queues"""

_SETTERS = frozenset(["setattr", "__setattr__", "globals", "vars", "__dict__"])
"""what may store under unknown names"""

_INDICES = {"STORE_ATTR": 0, "STORE_SUBSCR": 1, "STORE_SLICE": 2}
"""the operations that store, and how many indices stand between them and the object to which they store"""

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_VARIABLES = ("FAST", "DEREF")
_MAKERS = ("BUILD_", "CALL", "PRECALL", "BINARY_", "INPLACE_", "UNARY_", "LIST_", "SET_", "DICT_", "MAP_", "LOAD_CONST")
"""the beginnings of the operations whose result is new, except BINARY_SUBSCR"""


def written_by(
    code: types.CodeType, but: types.CodeType | None, foreign_parameters: int, outer: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Return the attributes in which this code, or a function in it, stores something, of objects not made there.

    A helper's parameters belong to its caller; those of f are the arguments, of which the rule keeps copies. outer
    are the variables of an outer function that hold what that one has made.
    """
    steps = list(_steps(code))
    own = _own_variables(code, steps, foreign_parameters) | (outer & frozenset(code.co_freevars))
    names = {name for at in range(len(steps)) for name in _stored_in(steps, at, own)}
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(names).union(*(written_by(each, but, each.co_argcount, own) for each in inner if each is not but))


@functools.lru_cache(maxsize=4096)
def attributes_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of the attributes and methods that code, and the functions in it, look up or set."""
    own = {step.argument for step in _steps(code) if "ATTR" in step.name or step.name == "LOAD_METHOD"}
    inner = [attributes_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(own).union(*inner)


class _Step(NamedTuple):
    """One operation on the stack."""

    name: str
    argument: Any
    pushed: int
    """how much the stack grows"""
    is_target: bool
    """True if other code jumps here"""


def _steps(code: types.CodeType) -> Iterator[_Step]:
    for i in dis.get_instructions(code):
        if isinstance(i.argval, tuple) and "_FAST" in i.opname:  # two in one, as Python 3.13 has them
            for verb, variable in zip(re.findall("LOAD|STORE", i.opname), i.argval, strict=True):
                yield _Step(f"{verb}_FAST", variable, 1 if verb == "LOAD" else -1, i.is_jump_target)
            continue
        pushed = dis.stack_effect(i.opcode, i.arg if i.opcode >= dis.HAVE_ARGUMENT else None, jump=False)
        yield _Step(i.opname, i.argval, pushed, i.is_jump_target)


def _own_variables(code: types.CodeType, steps: Sequence[_Step], foreign_parameters: int) -> frozenset[str]:
    """Return the variables that only ever hold arguments of f or what the code has made."""
    own = {*code.co_varnames[foreign_parameters:], *code.co_cellvars}.difference(code.co_varnames[:foreign_parameters])
    for at, step in enumerate(steps):
        if step.name in ("STORE_FAST", "STORE_DEREF") and not _is_new(steps, at):
            own.discard(step.argument)
    return frozenset(own)


def _is_new(steps: Sequence[_Step], at: int) -> bool:
    """Return True if a step stores in a variable what was just made."""
    made, stored = at - 1, 0
    while steps[made].name == "STORE_FAST" and not steps[made].is_target:  # several in a row
        made, stored = made - 1, stored + 1
    if steps[made].name == "UNPACK_SEQUENCE":
        made -= 1
    else:
        for _ in range(stored):
            made = _first_of(steps, made) - 1
    name = steps[made].name
    return name.startswith(_MAKERS) and name != "BINARY_SUBSCR" and not steps[at].is_target


def _stored_in(steps: Sequence[_Step], at: int, own: frozenset[str]) -> Iterator[str]:
    """Yield the name under which a step stores something outside of the code's own variables."""
    name, argument, *_ = steps[at]
    if name == "STORE_GLOBAL" or (name in ("LOAD_GLOBAL", *_ATTRIBUTES) and argument in _SETTERS):
        yield ANYTHING
        return
    if name in _INDICES or (name in _ATTRIBUTES and argument in _WRITERS):
        receiver = _receiver(steps, at)
        if receiver.name.startswith("LOAD_") and receiver.name.split("_")[1] in _VARIABLES and receiver.argument in own:
            return
        if name == "STORE_ATTR":
            yield argument
        else:
            yield receiver.argument if receiver.name in _ATTRIBUTES else ANYTHING


def _receiver(steps: Sequence[_Step], at: int) -> _Step:
    """Return the last step of the expression whose value is the object to which a step stores."""
    last, indices = at - 1, _INDICES.get(steps[at].name, 0)
    if steps[last].name.startswith(("SWAP", "ROT")):  # `a[i] += b` reads the object to which it stores
        last = _copied(steps, last) - 1
    for _ in range(indices):
        last = _first_of(steps, last) - 1
    return steps[last]


def _copied(steps: Sequence[_Step], last: int) -> int:
    """Return where the expressions are copied that an augmented assignment both reads and writes."""
    open_reads = 0
    for at in range(last, 0, -1):
        if steps[at].name.startswith(("SWAP", "ROT")) and not steps[at - 1].name.startswith(("SWAP", "ROT")):
            open_reads += 1
        elif steps[at].name.startswith(("COPY", "DUP_TOP")) and not steps[at - 1].name.startswith(("COPY", "DUP_TOP")):
            open_reads -= 1
            if not open_reads:
                return at
    return 0


def _first_of(steps: Sequence[_Step], last: int) -> int:
    """Return where the expression begins whose value the last step leaves."""
    pushed = 0
    for at in range(last, -1, -1):
        pushed += steps[at].pushed
        if pushed >= 1:
            return at
    return 0
