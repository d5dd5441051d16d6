"""PyTorch: what Dynamo checks in each run of a function that it has compiled with a call of an op.

Dynamo guards whatever it reads while it traces. Most of what it reads in a call is cgshim's own:
functions, classes and constants of its modules, which stay what they are. So does an op on the
host, whose function is guarded by its identity. f, what any other op holds, the arguments, and
values in the modules of others may change: their guards stay.
"""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

from torch._dynamo.source import AttrSource, ChainedSource, GlobalSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import TracingContext

from cgshim.backend import HostPair, OnHost
from cgshim_torch._dynamo import assume_constant_result

Guard = Any
Source = Any

_OF_CODE = frozenset(["BUILTIN_MATCH", "CLASS_MATCH", "CLOSURE_MATCH", "MODULE_MATCH"])
"""what Dynamo calls its guards on functions, classes and modules; those on values have other names"""
_OF_HOST = re.compile(r"\._f(\._forward\._f)?\.function$")
"""where an op holds its function on the host"""
_OUR_MODULE = re.compile("__import_(cgshim(_torch)?(_dot_(?!testing).*)?)")
"""the name by which a guard finds a module of cgshim; cgshim.testing is left out: the functions in it are authors'"""


def _forget_our_own() -> bool:
    """Take from the function that is being traced its guards on what is cgshim's own."""
    context = TracingContext.get().guards_context
    state = context.copy_graphstate()
    on_host = set(filter(None, map(_op_on_host, context.dynamo_guards)))
    for guard in context.dynamo_guards:
        if _is_on_our_own(guard, context.dynamo_guards) or _is_within(
            guard.originating_source, on_host
        ):
            state.dynamo_guards.discard(guard)
    context.restore_graphstate(state)
    return True


forget_our_own = assume_constant_result(_forget_our_own)
"""the same within a traced function: Dynamo calls it while it traces"""


def _is_on_our_own(guard: Guard, guards: Any) -> bool:
    module, name = _global_of(guard.originating_source)
    if module is None:
        return False
    if _kind(guard) == "DUPLICATE_INPUT":  # it says that two names lead to one object
        other = guard.create_fn.keywords["source_b"]
        is_code = any(_kind(each) in _OF_CODE for each in guards.get_guards_for_source(other))
        return is_code or _global_of(other)[0] is not None
    return _kind(guard) in _OF_CODE or not isinstance(getattr(module, name, None), ModuleType)


def _op_on_host(guard: Guard) -> Source | None:
    """Return where Dynamo finds an op on the host, if the guard is on the identity of its function,
    or of its f.
    """
    source = guard.originating_source
    found = _OF_HOST.search(source.name) if _kind(guard) == "ID_MATCH" else None
    if found is None:
        return None
    for _ in found[0].split(".")[1:]:
        source = source.base
    op = InstructionTranslator.current_tx().output.resolve_source_value(source)
    return source if isinstance(getattr(op, "held_function", None), (OnHost, HostPair)) else None


def _is_within(source: Source, ops: set[Source]) -> bool:
    """Return True for what belongs to one of these ops, but for functions on the host and what
    their outputs read.
    """
    if isinstance(source, AttrSource) and source.member == "function":
        return False
    while isinstance(source, ChainedSource) and not (
        isinstance(source, AttrSource) and source.member == "declares"
    ):
        source = source.base
        if source in ops:
            return True
    return False


def _kind(guard: Guard) -> str:
    kind: str = guard.inner_create_fn().__name__
    return kind


def _global_of(source: Source) -> tuple[ModuleType | None, str]:
    """Return the module of cgshim by whose global name Dynamo finds something, and the name; None
    if it is not ours.
    """
    name = ""
    while isinstance(source, ChainedSource):
        name, source = source.member if isinstance(source, AttrSource) else "", source.base
    found = _OUR_MODULE.fullmatch(source.global_name) if isinstance(source, GlobalSource) else None
    return (sys.modules.get(found[1].replace("_dot_", ".")), name) if found else (None, name)
