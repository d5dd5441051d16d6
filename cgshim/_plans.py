"""Plans: most calls of an op are alike, so only the first finds the backend and the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from cgshim._call import Call
from cgshim._dispatch import framework_of_type
from cgshim._foreign import KERAS
from cgshim._gradients import Arguments
from cgshim._pytree import ONE_TENSOR
from cgshim._registry import load
from cgshim._signature import Parameters

Plan = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]
"""runs f on arguments of known types, with options; NotImplemented leads to the general path"""
MOST = 64
"""the most plans that an op caches: usually one per backend for the same types"""


def new_plan(
    make_call: Callable[[Arguments], Call], op: str, parameters: Parameters, chosen: str | None,
    args: tuple[Any, ...], options: Mapping[str, Any],
) -> Plan:  # fmt: skip
    """Return a plan for calls with these argument types and option names.

    Only calls whose positional arguments are all tensors of one framework have one.
    """
    names = parameters.names_of_call(len(args), options)
    frameworks = set(map(framework_of_type, map(type, args)))
    (name,) = frameworks if len(frameworks) == 1 else (None,)
    if names is None or name in (None, KERAS):
        return no_plan
    backend = load(chosen or name)
    call = make_call(Arguments(op, backend, names, [ONE_TENSOR] * len(args), True))
    plan_of: Callable[..., Plan | None] = getattr(backend, "plan", lambda call, types: None)
    return plan_of(call, [*map(type, args)]) or functools.partial(_run_without_fast_path, call)


def no_plan(f: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Decline calls that take the general path: with variables or without tensors, for example."""
    return NotImplemented


def _run_without_fast_path(
    call: Call, f: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    """Run a call on a backend without a fast path."""
    if not all(map(call.backend.is_tensor, args)):
        return NotImplemented
    return call.backend.custom_gradient(call.with_f(f, options), args)
