"""Staging a call: f's jaxpr and its rule's, and what they captured."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Sequence
from itertools import chain, combinations, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from cgshim._errors import CustomGradientError, CustomGradientTypeError, TransformationError, sentence
from cgshim_jax._linearity import Linearity, linearity_of
from cgshim_jax._rules import apply_rule, ask_for_tangents, is_differentiable, type_of_upstream
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
    from cgshim._call import Call
    from cgshim._convention import Rule

Array = Any


class Stage(NamedTuple):
    """A staged call."""

    f: Jaxpr
    rule: StagedRule
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


class StagedRule:
    """A rule as a jaxpr; or the error that its author raises, kept for whoever asks for a gradient."""

    jaxpr: Jaxpr | None = None
    error: Exception | None = None
    outputs: int
    float_at: list[int]
    """which outputs have an upstream"""
    returned: list[int]
    """which gradients the rule returns, of those of the inputs and then of the variables"""
    taking: list[int]
    """which arguments of f have a gradient"""
    taken: list[int]
    """which of the gradients theirs are"""
    kept: list[int]
    """which outputs are the last residuals"""
    connected: list[bool]
    """which of the other residuals have a derivative through f's own operations"""
    order: list[int]
    """the residuals in the order in which the jaxpr captured them"""

    def __init__(self, outputs: Sequence[Array]) -> None:
        self.outputs = len(outputs)
        self.float_at = [i for i, y in enumerate(outputs) if is_differentiable(y)]
        self._linearity: Linearity | None = None

    def stage(
        self,
        rule: Rule,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        variables: Sequence[Array],
        keep: tuple[type[Exception], ...] = (),
    ) -> list[Array]:
        """Stage the rule; the tracers that it captured. An error that is not cgshim's, or is to be kept, is kept."""

        def backward(*of_floats: Array) -> list[Array]:
            upstreams = dict(zip(self.float_at, of_floats, strict=True))
            gradients = apply_rule(rule, inputs, outputs, upstreams, variables)
            self.returned = [i for i, gradient in enumerate(gradients) if gradient is not None]
            return [gradients[i] for i in self.returned]

        try:
            self.jaxpr, captured = jaxpr_of(backward, [type_of_upstream(outputs[i].aval) for i in self.float_at])
        except Exception as error:  # the author's own may be a way to forbid gradients
            if isinstance(error, CustomGradientError) and not isinstance(error, keep):
                raise
            self.error = _without_frames(error)
            self.returned = [i for i, x in enumerate([*inputs, *variables]) if is_differentiable(x)]
            return []
        return captured

    def sort(self, captured: Sequence[Array], inputs: Sequence[Array], outputs: Sequence[Array]) -> list[Array]:
        """Tell the kept outputs from the other residuals of f, which are returned."""
        known = {id(x) for x in inputs}
        place = {id(outputs[at]): at for at in reversed(self.float_at) if id(outputs[at]) not in known}
        others = [c for c in captured if id(c) not in place]
        kept = [c for c in captured if id(c) in place]
        self.kept = [place[id(c)] for c in kept]
        self.connected = [is_differentiable(c) for c in others]
        at = {id(c): i for i, c in enumerate([*others, *kept])}
        self.order = [at[id(c)] for c in captured]
        return others

    def take(self, gradient_at: Sequence[int]) -> None:
        """Tell which arguments of f have a gradient; gradient_at is where each one's would be among the gradients."""
        self.taking = [i for i, gradient in enumerate(gradient_at) if gradient in self.returned]
        self.taken = [gradient_at[i] for i in self.taking]

    def __call__(self, residuals: Sequence[Array], upstreams: Sequence[Array]) -> list[Array]:
        """The gradients of the arguments that have one."""
        if self.error is not None:
            raise self.error
        assert self.jaxpr is not None
        gradients = self.jaxpr([residuals[i] for i in self.order], upstreams)
        values = dict(zip(self.returned, gradients, strict=True))
        return [values[at] for at in self.taken]

    def linearity(self) -> Linearity:
        """What is seen of the rule's linearity in its upstreams."""
        if self.error is not None:
            raise self.error
        assert self.jaxpr is not None
        if self._linearity is None:
            self._linearity = linearity_of(self.jaxpr.jaxpr, self.jaxpr.constants)
        return self._linearity


class _Reading(NamedTuple):
    """A rule, staged with some of what was captured for its variables."""

    rule: StagedRule
    captured: list[Array]
    """the tracers that the rule captured"""
    variables: list[Array]
    refusal: str | None = None
    """why the other tracers may not be differentiated"""


_NOWHERE = -1


def stage(call: Call, inputs: Sequence[Array], constants: Collection[int]) -> Stage:
    """Stage a call: f runs once, and the rule once unless it alone captured a variable, or its variables are guessed.

    constants are the identities of captured tracers that are no variables.
    """
    at = [i for i, x in enumerate(inputs) if is_tracer(x)]
    readings: list[_Reading] = []
    residuals: list[range] = []

    def run(*tracers: Array) -> list[Array]:
        full = list(inputs)
        for i, x in zip(at, tracers, strict=True):
            full[i] = x
        outputs, author_rule = call(full)
        ask_for_tangents(call, author_rule)
        captured = captured_so_far()
        if captured is None:
            captured = _captured_by_f(call, inputs, at)
        found = _read(author_rule, full, outputs, captured, constants)
        _refuse_references(call, found)
        results = list(outputs)
        for reading in found:
            kept = reading.rule.sort(reading.captured, full, outputs)
            residuals.append(range(len(results), len(results) + len(kept)))
            results += kept
        readings.extend(reading._replace(captured=[]) for reading in found)  # no tracer of f leaves it
        return results

    f, captured = jaxpr_of(run, [inputs[i].aval for i in at])
    for reading in readings:
        place = {id(variable): len(inputs) + i for i, variable in enumerate(reading.variables)}
        reading.rule.take([*at, *(place.get(id(c), _NOWHERE) for c in captured)])
    first, *others = readings
    outputs = range(first.rule.outputs)
    jaxprs = [f.only([*outputs, *of_rule]) if others else f for of_rule in residuals]
    argument = {id(c): len(at) + i for i, c in enumerate(captured)}
    choices = [
        Choice(jaxpr, reading.rule, frozenset(argument[id(v)] for v in reading.variables if id(v) in argument))
        for jaxpr, reading in zip(jaxprs[1:], others, strict=True)
    ]
    return Stage(jaxprs[0], first.rule, at, captured, frozenset(map(id, first.variables)), first.refusal, choices)


def _refuse_references(call: Call, readings: Sequence[_Reading]) -> None:
    for reference in filter(is_reference, chain.from_iterable(reading.captured for reading in readings)):
        raise TransformationError(
            sentence(call.name, "a grad_fn that is staged may not read or write a mutable array",
                     f"a captured {reference.aval}", "read it in f, and return from grad_fn what is to be written")
        )  # fmt: skip


def _read(
    author_rule: Rule,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    captured: Sequence[Array],
    constants: Collection[int],
) -> list[_Reading]:
    """The rule staged; once for each choice of variables where nobody knows yet which it is, and not any will do."""
    reading = _stage_rule(author_rule, inputs, outputs, captured, constants)
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
            author_rule.require_variables(variables)
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
        full = list(inputs)
        for i, x in zip(at, tracers, strict=True):
            full[i] = x
        return call(full)[0]

    return jaxpr_of(run, [inputs[i].aval for i in at])[1]


def _without_frames(error: Exception) -> Exception:
    """An error that may be kept: frames keep tracers alive, so that of its origin only the place is left."""
    origin = traceback.extract_tb(error.__traceback__)[-1]
    if hasattr(error, "add_note") and not isinstance(error, CustomGradientError):
        error.add_note(f'Raised by the rule, in "{origin.filename}", line {origin.lineno}')
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
