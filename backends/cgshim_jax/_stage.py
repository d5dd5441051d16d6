"""Staging a call: the jaxprs of f and of its rule, and the tracers that they captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, combinations, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from cgshim.backend import CustomGradientError, CustomGradientTypeError, TransformationError, sentence, subvals
from cgshim_jax._rules import is_differentiable, of_tangents, outputs_of_rules
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
    rule: StagedRule
    output: TreeSpec
    """the spec of what f returned"""
    inputs: list[int]
    """the inputs that are f's first arguments; what f captured are its other arguments"""
    captured: list[Array]
    """the tracers that f and the rule captured"""
    variables: frozenset[int]
    """the identities of those captured that are the rule's variables"""
    refusal: str | None
    """why the other captured tracers may not be differentiated"""
    choices: list[Choice]
    """if it is not known yet which captured tracers are variables: the call, for some choices of variables"""


class Choice(NamedTuple):
    """A staged call whose variables are some of those that its function captured."""

    f: Jaxpr
    rule: StagedRule
    variables: frozenset[int]
    """the arguments of f that are variables"""


class _Reading(NamedTuple):
    """A rule that was staged with some of the captured tracers as its variables."""

    rule: StagedRule
    captured: list[Array]
    """the tracers that the rule captured"""
    variables: list[Array]
    refusal: str | None = None
    """why the other tracers may not be differentiated"""


_NOWHERE = -1
"""the place of the gradient of a captured tracer that is no variable: it has none"""


def stage(call: Call, inputs: Sequence[Array], is_constant: Callable[[Array], bool]) -> Stage:
    """Stage a call: f runs once, and the rule once unless it alone captured a variable, or its variables are guessed.

    is_constant tells of captured tracers that they are no variables.
    """
    at = [i for i, x in enumerate(inputs) if is_tracer(x)]
    readings: list[_Reading] = []
    residuals: list[range] = []
    specs: list[TreeSpec] = []

    def run_f(*tracers: Array) -> list[Array]:
        full = subvals(inputs, at, tracers)
        outputs, author_rule = call(full)
        specs.append(author_rule.output)
        author_rule = of_tangents(call, author_rule)
        captured = captured_so_far()
        if captured is None:
            captured = _captured_by_f(call, inputs, at)
        found = _RunOfF(call, author_rule, full, outputs, captured, is_constant).readings()
        _refuse_references(call, found)
        results = list(outputs)
        for reading in found:
            others = reading.rule.sort(reading.captured, full, outputs)
            residuals.append(range(len(results), len(results) + len(others)))
            results += others
        readings.extend(reading._replace(captured=[]) for reading in found)  # no tracer of f leaves it
        return results

    f, captured = jaxpr_of(run_f, [inputs[i].aval for i in at], outputs_of_rules())
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
    """Raise the error for a rule that captured a mutable array."""
    for reference in filter(is_reference, chain.from_iterable(reading.captured for reading in readings)):
        raise TransformationError(
            sentence(call.name, must="a grad_fn that is staged may not read or write a mutable array",
                     got=f"a captured {reference.aval}",
                     do="read it in f, and return from grad_fn what is to be written")
        )  # fmt: skip


class _RunOfF(NamedTuple):
    """A run of f on tracers. Its rule is staged here: once or several times, with different variables."""

    call: Call
    rule: Rule
    inputs: Sequence[Array]
    outputs: Sequence[Array]
    captured: Sequence[Array]
    """the tracers that f captured"""
    is_constant: Callable[[Array], bool]
    """tells of captured tracers that they are no variables"""

    def readings(self) -> list[_Reading]:
        """Stage the rule: once, or for each choice of variables if it is unknown and not every choice will do."""
        reading = self.read()
        error, guessed = reading.rule.error, reading.variables
        if error is None or not guessed or any(map(is_differentiated, guessed)):
            return [reading]
        choices = chain.from_iterable(combinations(guessed, count) for count in range(len(guessed)))
        found = [self.read_with(chosen) for chosen in islice(choices, _CHOICES)]
        fitting = [other for other in found if other.rule.error is None]
        if not fitting and isinstance(error, CustomGradientError) and not isinstance(error, TransformationError):
            raise error
        return [reading, *fitting]

    def read_with(self, variables: Sequence[Array]) -> _Reading:
        """Stage the rule with these variables. If it does not take them, the reading holds the error."""
        rule = StagedRule(self.outputs)
        captured = rule.stage(self.rule, self.inputs, self.outputs, variables, outputs_of_rules())
        return _Reading(rule, captured, list(variables))

    def read(self) -> _Reading:
        """Stage the rule with the variables that are among the tracers that f and the rule itself captured."""
        trace = current_trace()
        captured = [c for c in self.captured if not self.is_constant(c)]
        while True:
            variables = _choose_variables(captured)
            is_guess = bool(variables) and not any(map(is_differentiated, variables))
            rule = StagedRule(self.outputs)
            try:
                self.call.require_variables(self.rule, variables)
            except CustomGradientTypeError as error:
                if not is_guess:
                    raise
                return _Reading(
                    rule, rule.stage(self.rule, self.inputs, self.outputs, [], outputs_of_rules()), [], str(error)
                )
            residuals = rule.stage(self.rule, self.inputs, self.outputs, variables, outputs_of_rules())
            known = {id(c) for c in captured}
            captured += [
                c
                for c in residuals
                if is_tracer(c) and c._trace is not trace and id(c) not in known and not self.is_constant(c)
            ]
            if list(map(id, _choose_variables(captured))) == list(map(id, variables)):
                return _Reading(rule, residuals, variables)


_CHOICES = 32
"""how often a rule is staged at most to find those that it takes for its variables"""


def _choose_variables(captured: Sequence[Array]) -> list[Array]:
    """Return the captured tracers that are being differentiated. If none is, return those that may be later."""
    floats = [c for c in captured if is_differentiable(c) and not is_reference(c)]
    return [c for c in floats if is_differentiated(c)] or [c for c in floats if is_differentiated(c) is None]


def _captured_by_f(call: Call, inputs: Sequence[Array], at: Sequence[int]) -> list[Array]:
    """Stage f once more, and return what it captures: a JAX may not tell this before a function has returned."""

    def run_f(*tracers: Array) -> list[Array]:
        return call(subvals(inputs, at, tracers))[0]

    return jaxpr_of(run_f, [inputs[i].aval for i in at])[1]
