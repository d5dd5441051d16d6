"""Cache plans by the types of the arguments and the values of static ones.

Most calls of an op are alike: only the first one looks up the backend and partitions the arguments.
A list of tensors counts as static values. An option of f that is a number or a name may be passed
by position, by name, or left to its default.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from cgshim._call import Call
from cgshim._closure import SIMPLE
from cgshim._dispatch import framework_of_type, is_lasting
from cgshim._foreign import KERAS
from cgshim._gradients import Arguments
from cgshim._pytree import ONE_TENSOR, partition, told_apart
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
    """Return a plan for calls with these argument types and option names."""
    by_name = parameters.by_name(len(args), options)
    names = None if by_name is None else parameters.names_of(len(args) + len(by_name))
    if by_name is None or names is None:
        return no_plan
    if by_name or any(_is_static(arg) or type(arg) in _LISTS for arg in args):
        return _PlanByValues(functools.partial(_plan_of, make_call, op, chosen, names), by_name)
    return _plan_of(make_call, op, chosen, names, args)


def no_plan(f: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Decline calls that take the general path: with variables or without tensors, for example."""
    return NotImplemented


class _PlanByValues:
    """Run calls with static arguments by a plan for their values, lists by their items."""

    def __init__(
        self,
        plan_of: Callable[[tuple[Any, ...]], Plan],
        by_name: Mapping[str, Any],
    ) -> None:
        self._plan_of, self._by_name = plan_of, by_name
        self._plans: dict[Hashable, Plan] = {}

    def __call__(
        self, f: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Any:
        if self._by_name:
            given = {**self._by_name, **options}
            args += tuple([given.pop(name) for name in self._by_name])
            options = {name: given[name] for name in options if name in given}
        key: list[Any] = []
        tensors: list[Any] = []
        for arg in args:
            if _is_static(arg):
                key.append(told_apart(arg))
            elif type(arg) in _LISTS:
                key.append((type(arg), *map(type, arg)))
                tensors += arg
            else:
                key.append(type(arg))
                tensors.append(arg)
        plan = self._plans.get(tuple(key))
        if plan is None:
            types = [*map(type, (*args, *tensors))]
            if len(self._plans) >= MOST or not all(map(is_lasting, types)):
                return NotImplemented
            plan = self._plans[tuple(key)] = self._plan_of(args)
        return plan(f, tuple(tensors), options)


def _plan_of(
    make_call: Callable[[Arguments], Call], op: str, chosen: str | None, names: Sequence[str],
    args: tuple[Any, ...],
) -> Plan:  # fmt: skip
    """Return the plan for calls with tensors like these and the same static arguments."""
    trees = [arg if type(arg) in _LISTS else [arg] for arg in args if not _is_static(arg)]
    types = [type(x) for tree in trees for x in tree]
    frameworks = set(map(framework_of_type, types))
    (name,) = frameworks if len(frameworks) == 1 else (None,)
    if name in (None, KERAS) or not all(trees):  # an empty list may be the caller's log
        return no_plan
    backend = load(chosen or name)
    specs = [
        partition(op, backend, arg)[1] if _is_static(arg) or type(arg) in _LISTS else ONE_TENSOR
        for arg in args
    ]
    are_tensors = specs.count(ONE_TENSOR) == len(args)
    call = make_call(Arguments(op, backend, names, specs, are_tensors))
    plan_of: Callable[..., Plan | None] = getattr(backend, "plan", lambda call, types: None)
    return plan_of(call, types) or functools.partial(_run_without_fast_path, call)


_LISTS = (list, tuple)


def _is_static(arg: Any) -> bool:
    """Return True for a number, a name, or a tuple of these: f cannot tell equal ones apart."""
    return type(arg) in SIMPLE or (type(arg) is tuple and all(type(x) in SIMPLE for x in arg))


def _run_without_fast_path(
    call: Call, f: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    """Run a call on a backend without a fast path."""
    if not all(map(call.backend.is_tensor, args)):
        return NotImplemented
    return call.backend.custom_gradient(call.with_f(f, options), args)
