"""PyTorch: what Dynamo checks in each run of a function that it has compiled with a call of an op.

Dynamo guards whatever it reads while it traces. Most of what it reads in a call is cgshim's own:
functions, classes and constants of its modules, which stay what they are. f, what an op holds, the
arguments, and values in any other module may change: their guards stay.
"""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

from torch._dynamo.source import AttrSource, ChainedSource, GlobalSource
from torch._guards import TracingContext

from cgshim_torch._compile.dynamo import assume_constant_result

Guard = Any
Source = Any

_OF_CODE = frozenset(["BUILTIN_MATCH", "CLASS_MATCH", "CLOSURE_MATCH", "MODULE_MATCH"])
"""what Dynamo calls its guards on functions, classes and modules; those on values have other names"""
_OUR_MODULE = re.compile("__import_(cgshim(_torch)?(_dot_(?!testing).*)?)")
"""the name by which a guard finds a module of cgshim; cgshim.testing is left out: the functions in it are authors'"""


def _forget_our_own() -> bool:
    """Take from the function that is being traced its guards on what is cgshim's own."""
    tracing = TracingContext.try_get()
    if tracing is None:  # a frame that Dynamo has broken is resumed here, as it is
        return True
    context = tracing.guards_context
    state = context.copy_graphstate()
    guards = context.dynamo_guards
    for guard in guards:  # the state has a copy of them
        if _is_on_our_own(guard, guards):
            state.dynamo_guards.discard(guard)
    context.restore_graphstate(state)
    return True


forget_our_own = assume_constant_result(_forget_our_own)
"""the same within a traced function: Dynamo calls it while it traces"""


def _is_on_our_own(guard: Guard, guards: Any) -> bool:
    module, name = _global_of(guard.originating_source)
    if module is None:
        return False
    if _kind_of(guard) == "DUPLICATE_INPUT":  # it says that two names lead to one object
        other = guard.create_fn.keywords["source_b"]
        is_code = any(_kind_of(each) in _OF_CODE for each in guards.get_guards_for_source(other))
        return is_code or _global_of(other)[0] is not None
    return _kind_of(guard) in _OF_CODE or not isinstance(getattr(module, name, None), ModuleType)


def _kind_of(guard: Guard) -> str:
    return str(guard.inner_create_fn().__name__)


def _global_of(source: Source) -> tuple[ModuleType | None, str]:
    """Return the module of cgshim by whose global name Dynamo finds something, and the name; None
    if it is not ours.
    """
    name = ""
    while isinstance(source, ChainedSource):
        name, source = source.member if isinstance(source, AttrSource) else "", source.base
    match = _OUR_MODULE.fullmatch(source.global_name) if isinstance(source, GlobalSource) else None
    return (sys.modules.get(match[1].replace("_dot_", ".")), name) if match else (None, name)
