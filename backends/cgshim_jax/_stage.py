"""Staging a call: f's jaxpr and its rule's, and what they captured."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain, combinations, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from cgshim.backend import CustomGradientError, CustomGradientTypeError, TransformationError, sentence, subvals
from cgshim_jax._late import LateRule, late_rule
from cgshim_jax._rules import ask_for_tangents, is_differentiable
from cgshim_jax._staged_rule import StagedRule
from cgshim_jax._tracing import (
    Jaxpr,
    captured_so_far,
    current_trace,
    is_differentiated,
    is_reference,
    is_tracer,
    jaxpr_of,
)

if TYPE_CHECKING:
    from cgshim.backend import Call, Rule, TreeSpec

Array = Any


class Stage(NamedTuple):
    """A staged call."""

    f: Jaxpr
    rule: StagedRule | LateRule
    output: TreeSpec
    """of what f returned"""
    inputs: list[int]
    """which inputs are f's first arguments; what it captured are the others"""
    captured: list[Array]
    variables: frozenset[int]
    """the identities of those captured that the rule speaks for"""
    refusal: str | None
    """why the others may not be differentiated"""
    choices: list[Choice]
    """where it is not known yet which of them are variables: the call for some of them"""


class Choice(NamedTuple):
    """A staged call whose variables are some of those that its function captured."""

    f: Jaxpr
    rule: StagedRule
    variables: frozenset[int]
    """the arguments of f that are variables"""


class _Reading(NamedTuple):
    """A rule, staged with some of what was captured for its variables."""

    rule: StagedRule
    captured: list[Array]
    """the tracers that the rule captured"""
    variables: list[Array]
    refusal: str | None = None
    """why the other tracers may not be differentiated"""


_NOWHERE = -1


def stage(call: Call, inputs: Sequence[Array], constants: Collection[int], may_wait: bool = False) -> Stage:
    """Stage a call: f runs once, and the rule once unless it alone captured a variable, or its variables are guessed.

    constants are the identities of captured tracers that are no variables. The rule may wait until a derivative is
    taken, if the call captured nothing and the rule holds all that it reads.
    """
    at = [i for i, x in enumerate(inputs) if is_tracer(x)]
    readings: list[_Reading] = []
    residuals: list[range] = []
    late: LateRule | None = None
    specs: list[TreeSpec] = []

    def run(*tracers: Array) -> list[Array]:
        nonlocal late
        full = subvals(inputs, at, tracers)
        outputs, author_rule = call(full)
        specs.append(author_rule.output)
        ask_for_tangents(call, author_rule)
        captured = captured_so_far()
        if may_wait and captured == [] and (late := late_rule(call, author_rule, full, outputs)) is not None:
            results = [*outputs, *late.others]
            late.others = []  # no tracer of f leaves it
            return results
        if captured is None:
            captured = _captured_by_f(call, inputs, at)
        found = _read(call, author_rule, full, outputs, captured, constants)
        _refuse_references(call, found)
        results = list(outputs)
        for reading in found:
            kept = reading.rule.sort(reading.captured, full, outputs)
            residuals.append(range(len(results), len(results) + len(kept)))
            results += kept
        readings.extend(reading._replace(captured=[]) for reading in found)  # no tracer of f leaves it
        return results

    f, captured = jaxpr_of(run, [inputs[i].aval for i in at])
    if late is not None:
        return Stage(f, late, specs[0], at, captured, frozenset(), None, [])
    for reading in readings:
        place = {id(variable): len(inputs) + i for i, variable in enumerate(reading.variables)}
        reading.rule.match([*at, *(place.get(id(c), _NOWHERE) for c in captured)])
    first, *others = readings
    outputs = range(first.rule.outputs)
    jaxprs = [f.only([*outputs, *of_rule]) if others else f for of_rule in residuals]
    argument = {id(c): len(at) + i for i, c in enumerate(captured)}
    choices = [
        Choice(jaxpr, reading.rule, frozenset(argument[id(v)] for v in reading.variables if id(v) in argument))
        for jaxpr, reading in zip(jaxprs[1:], others, strict=True)
    ]
    variables = frozenset(map(id, first.variables))
    return Stage(jaxprs[0], first.rule, specs[0], at, captured, variables, first.refusal, choices)


def _refuse_references(call: Call, readings: Sequence[_Reading]) -> None:
    for reference in filter(is_reference, chain.from_iterable(reading.captured for reading in readings)):
        raise TransformationError(
            sentence(call.name, must="a grad_fn that is staged may not read or write a mutable array",
                     got=f"a captured {reference.aval}",
                     do="read it in f, and return from grad_fn what is to be written")
        )  # fmt: skip


def _read(
    call: Call,
    author_rule: Rule,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    captured: Sequence[Array],
    constants: Collection[int],
) -> list[_Reading]:
    """Stage the rule: once, or for each choice of variables if it is unknown and not every choice will do."""
    reading = _stage_rule(call, author_rule, inputs, outputs, captured, constants)
    error, guessed = reading.rule.error, reading.variables
    if error is None or not guessed or any(map(is_differentiated, guessed)):
        return [reading]
    choices = chain.from_iterable(combinations(guessed, count) for count in range(len(guessed)))
    found = [_try(author_rule, inputs, outputs, chosen) for chosen in islice(choices, _CHOICES)]
    fitting = [other for other in found if other.rule.error is None]
    if not fitting and isinstance(error, CustomGradientError):
        raise error
    return [reading, *fitting]


_CHOICES = 32
"""how often a rule is staged at most to find those that it takes for its variables"""


def _try(author_rule: Rule, inputs: Sequence[Array], outputs: Sequence[Array], variables: Sequence[Array]) -> _Reading:
    rule = StagedRule(outputs)
    captured = rule.stage(author_rule, inputs, outputs, variables, keep=(CustomGradientError,))
    return _Reading(rule, captured, list(variables))


def _stage_rule(
    call: Call,
    author_rule: Rule,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    captured: Sequence[Array],
    constants: Collection[int],
) -> _Reading:
    """The rule, staged with the variables among what was captured, by f and by itself."""
    trace = current_trace()
    captured = [c for c in captured if id(c) not in constants]
    while True:
        variables = _choose_variables(captured)
        is_guess = bool(variables) and not any(map(is_differentiated, variables))
        rule = StagedRule(outputs)
        try:
            call.require_variables(author_rule, variables)
        except CustomGradientTypeError as error:
            if not is_guess:
                raise
            return _Reading(rule, rule.stage(author_rule, inputs, outputs, []), [], str(error))
        residuals = rule.stage(author_rule, inputs, outputs, variables, (CustomGradientError,) if is_guess else ())
        known = {id(c) for c in captured}.union(constants)
        captured += [c for c in residuals if c._trace is not trace and id(c) not in known]
        if list(map(id, _choose_variables(captured))) == list(map(id, variables)):
            return _Reading(rule, residuals, variables)


def _choose_variables(captured: Sequence[Array]) -> list[Array]:
    """The captured tracers that are being differentiated, failing that those that may be later."""
    floats = [c for c in captured if is_differentiable(c) and not is_reference(c)]
    return [c for c in floats if is_differentiated(c)] or [c for c in floats if is_differentiated(c) is None]


def _captured_by_f(call: Call, inputs: Sequence[Array], at: Sequence[int]) -> list[Array]:
    """What f captures, by another staging: for a JAX that does not tell before a function is through."""

    def run(*tracers: Array) -> list[Array]:
        return call(subvals(inputs, at, tracers))[0]

    return jaxpr_of(run, [inputs[i].aval for i in at])[1]
