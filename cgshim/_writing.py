"""What a function stores in what it has not made itself, read off its code."""

from __future__ import annotations

import dis
import functools
import re
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

ANYTHING = "*"
"""stands among names for what has none"""

_WRITERS = frozenset(["append", "appendleft", "extend", "insert", "update", "setdefault", "add", "put"])
"""methods that are called like those of lists, dicts, sets and queues"""

_SETTERS = frozenset(["setattr", "__setattr__", "globals", "vars", "__dict__"])
"""what stores under names that cannot be told"""

_INDICES = {"STORE_ATTR": 0, "STORE_SUBSCR": 1, "STORE_SLICE": 2}
"""the operations that store something, and how many indices stand between them and where they store it"""

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_VARIABLES = ("FAST", "DEREF")
_MAKERS = ("BUILD_", "CALL", "PRECALL", "BINARY_", "INPLACE_", "UNARY_", "LIST_", "SET_", "DICT_", "MAP_", "LOAD_CONST")
"""how the operations begin whose result is new; BINARY_SUBSCR, of which that is not so, is excepted"""


def written_by(
    code: types.CodeType, but: types.CodeType | None, foreign_parameters: int, outer: frozenset[str] = frozenset()
) -> frozenset[str]:
    """The attributes in which this code, or that of the functions within it, stores something that it has not made.

    A helper's parameters are its caller's; those of f are the arguments, of which the rule keeps copies. outer are
    the variables of an outer function that hold what this has made.
    """
    steps = list(_steps(code))
    own = _own_variables(code, steps, foreign_parameters) | (outer & frozenset(code.co_freevars))
    names = {name for at in range(len(steps)) for name in _stored_in(steps, at, own)}
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(names).union(*(written_by(each, but, each.co_argcount, own) for each in inner if each is not but))


@functools.lru_cache(maxsize=4096)
def attributes_in(code: types.CodeType) -> frozenset[str]:
    """The names of the attributes and methods that code, and the functions within it, look up or set."""
    own = {step.argument for step in _steps(code) if "ATTR" in step.name or step.name == "LOAD_METHOD"}
    inner = [attributes_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(own).union(*inner)


class _Step(NamedTuple):
    """One operation on the stack."""

    name: str
    argument: Any
    pushed: int
    """by how much the stack grows"""
    is_target: bool
    """whether other code jumps here"""


def _steps(code: types.CodeType) -> Iterator[_Step]:
    for i in dis.get_instructions(code):
        if isinstance(i.argval, tuple) and "_FAST" in i.opname:  # two in one, as Python 3.13 has them
            for verb, variable in zip(re.findall("LOAD|STORE", i.opname), i.argval, strict=True):
                yield _Step(f"{verb}_FAST", variable, 1 if verb == "LOAD" else -1, i.is_jump_target)
            continue
        pushed = dis.stack_effect(i.opcode, i.arg if i.opcode >= dis.HAVE_ARGUMENT else None, jump=False)
        yield _Step(i.opname, i.argval, pushed, i.is_jump_target)


def _own_variables(code: types.CodeType, steps: Sequence[_Step], foreign_parameters: int) -> frozenset[str]:
    """The variables that hold arguments of f, or what the code has made, and never anything else."""
    own = {*code.co_varnames[foreign_parameters:], *code.co_cellvars}.difference(code.co_varnames[:foreign_parameters])
    for at, step in enumerate(steps):
        if step.name in ("STORE_FAST", "STORE_DEREF") and not _is_new(steps, at):
            own.discard(step.argument)
    return frozenset(own)


def _is_new(steps: Sequence[_Step], at: int) -> bool:
    """Whether a step stores in a variable what was just made."""
    made, stored = at - 1, 0
    while steps[made].name == "STORE_FAST" and not steps[made].is_target:  # one after the other
        made, stored = made - 1, stored + 1
    if steps[made].name == "UNPACK_SEQUENCE":
        made -= 1
    else:
        for _ in range(stored):
            made = _first_of(steps, made) - 1
    name = steps[made].name
    return name.startswith(_MAKERS) and name != "BINARY_SUBSCR" and not steps[at].is_target


def _stored_in(steps: Sequence[_Step], at: int, own: frozenset[str]) -> Iterator[str]:
    """The name under which a step stores something in what is no variable of the code's own."""
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
    """The last step of the expression in whose value a step stores something."""
    last, indices = at - 1, _INDICES.get(steps[at].name, 0)
    if steps[last].name.startswith(("SWAP", "ROT")):  # `a[i] += b` reads what it stores in
        last = _copied(steps, last) - 1
    for _ in range(indices):
        last = _first_of(steps, last) - 1
    return steps[last]


def _copied(steps: Sequence[_Step], last: int) -> int:
    """Where the expressions are copied that an augmented assignment both reads and stores in."""
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
    """Where the expression begins whose value the last step leaves."""
    pushed = 0
    for at in range(last, -1, -1):
        pushed += steps[at].pushed
        if pushed >= 1:
            return at
    return 0
