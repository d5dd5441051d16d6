"""Staging a call: f's jaxpr and its rule's, and what they captured."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from _cgshim_jax_linearity import Linearity, linearity_of
from _cgshim_jax_rules import apply_rule, is_differentiable
from _cgshim_jax_tracing import Jaxpr, captured_so_far, current_trace, is_differentiated, is_tracer, jaxpr_of

from cgshim._errors import CustomGradientError, CustomGradientTypeError

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
    variables: set[int]
    """the identities of those captured that the rule speaks for"""
    refusal: str | None
    """why the others may not be differentiated"""


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
        self, rule: Rule, inputs: Sequence[Array], outputs: Sequence[Array], variables: Sequence[Array]
    ) -> list[Array]:
        """Stage the rule; the tracers that it captured."""

        def backward(*of_floats: Array) -> list[Array]:
            upstreams = dict(zip(self.float_at, of_floats, strict=True))
            gradients = apply_rule(rule, inputs, outputs, upstreams, variables)
            self.returned = [i for i, gradient in enumerate(gradients) if gradient is not None]
            return [gradients[i] for i in self.returned]

        try:
            self.jaxpr, captured = jaxpr_of(backward, [outputs[i].aval.update(weak_type=False) for i in self.float_at])
        except CustomGradientError:
            raise
        except Exception as error:  # noqa: BLE001  # the author's own: to say so is a way to forbid gradients
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


_NOWHERE = -1


def stage(call: Call, inputs: Sequence[Array], constants: Collection[int]) -> Stage:
    """Stage a call: f runs once, and the rule once unless it alone captured a variable.

    constants are the identities of captured tracers that are no variables.
    """
    at = [i for i, x in enumerate(inputs) if is_tracer(x)]
    staged: list[tuple[StagedRule, list[Array], str | None]] = []

    def run(*tracers: Array) -> list[Array]:
        full = list(inputs)
        for i, x in zip(at, tracers, strict=True):
            full[i] = x
        outputs, author_rule = call(full)
        captured = captured_so_far()
        if captured is None:
            captured = _captured_by_f(call, inputs, at)
        rule, residuals, variables, refusal = _stage_rule(author_rule, full, outputs, captured, constants)
        staged.append((rule, variables, refusal))
        return [*outputs, *rule.sort(residuals, full, outputs)]

    f, captured = jaxpr_of(run, [inputs[i].aval for i in at])
    rule, variables, refusal = staged.pop()
    place = {id(variable): len(inputs) + i for i, variable in enumerate(variables)}
    gradient_at = [*at, *(place.get(id(c), _NOWHERE) for c in captured)]
    rule.taking = [i for i, gradient in enumerate(gradient_at) if gradient in rule.returned]
    rule.taken = [gradient_at[i] for i in rule.taking]
    return Stage(f, rule, at, captured, set(place), refusal)


def _stage_rule(
    author_rule: Rule,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    captured: Sequence[Array],
    constants: Collection[int],
) -> tuple[StagedRule, list[Array], list[Array], str | None]:
    """The rule, staged with the variables among what was captured, by f and by itself; what it kept; the variables."""
    trace = current_trace()
    captured = [c for c in captured if id(c) not in constants]
    while True:
        variables = _choose_variables(captured)
        rule = StagedRule(outputs)
        try:
            author_rule.require_variables(variables)
            residuals = rule.stage(author_rule, inputs, outputs, variables)
        except CustomGradientTypeError as error:
            if not variables or any(map(is_differentiated, variables)):
                raise
            rule = StagedRule(outputs)
            return rule, rule.stage(author_rule, inputs, outputs, []), [], str(error)
        known = {id(c) for c in captured}.union(constants)
        captured += [c for c in residuals if c._trace is not trace and id(c) not in known]
        if list(map(id, _choose_variables(captured))) == list(map(id, variables)):
            return rule, residuals, variables, None


def _choose_variables(captured: Sequence[Array]) -> list[Array]:
    """The captured tracers that are being differentiated, failing that those that may be later."""
    floats = [c for c in captured if is_differentiable(c)]
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
    if hasattr(error, "add_note"):
        error.add_note(f'Raised by the rule, in "{origin.filename}", line {origin.lineno}')
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
