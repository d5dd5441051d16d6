"""Calls within jit, scan, ...: f and its rule become jaxprs, each once, and what they close over
arguments.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from jax.extend.core import ClosedJaxpr, Literal

from cgshim.backend import (
    Call,
    CustomGradientTypeError,
    Mapped,
    Rule,
    RuleScope,
    TransformationError,
    TreeSpec,
    refusal,
    subvals,
)
from cgshim_jax._graph import depends_only_on
from cgshim_jax._primitives import Linear, Op, register_with_pallas_and_jet, without_f
from cgshim_jax._rules import (
    as_tensor,
    is_differentiable,
    is_running_rule,
    message_of,
    of_tangents,
    outputs_of_rules,
    refuse_captured,
    upstreams_of_rule,
)
from cgshim_jax._run import TracedRule, trace_rule, traced
from cgshim_jax._tracing import (
    Array,
    NeedsValuesError,
    Surroundings,
    captured_so_far,
    code_of,
    equations_for,
    eval_jaxpr,
    is_differentiated,
    is_reference,
    is_tracer,
    jaxpr_of,
    part_of,
)
from cgshim_jax._written import Written

_staging: RuleScope[tuple[Any, ...]] = RuleScope("cgshim_jax_staging")
"""the codes of the ops that are being staged, one in the rule of the other"""


def run_staged(call: Call, inputs: Sequence[Array], *, values_elsewhere: bool = False) -> Any:
    """Stage f and its rule, and return the output with the rule's gradients.

    If the rule needs values, its error is raised at once where they may be had in another way;
    others come when a gradient is taken.
    """
    register_with_pallas_and_jet()
    _refuse_references(call, inputs)
    upstreams, code = upstreams_of_rule(), code_of(call.f)
    if isinstance(call.f, Mapped):
        return Written(call, inputs, Surroundings.STAGING).output()

    def is_constant(tracer: Array) -> bool:
        """Return True if the op's own rule covers what f closes over: in a rule, it was computed
        from the inputs.

        To the outputs this is a constant; to the rule, whose derivative may be taken in its turn,
        it is what it is.
        """
        return upstreams is not None and depends_only_on(tracer, inputs, upstreams)

    if is_running_rule() and code in (_staging.current or ()):
        return _Later(call, inputs).output(inputs, is_constant)
    staging = _Staging(call, inputs, is_constant)
    op = staging.run()
    if values_elsewhere and staging.rule.needs_values:
        raise NeedsValuesError
    arguments = [inputs[i] for i in staging.at] + staging.closed_over()
    if not op.whole.jaxpr.effects:
        return staging.spec.combine(op(arguments))
    outputs, residuals, linear = op.forward(arguments)  # what f does besides is done here and now
    return staging.spec.combine(linear.attach([*arguments, *residuals, *outputs], first=True))


_FEW = 3
"""of how many arguments a rule is traced for each choice that needs a gradient"""


class _Staging:
    """Stages a call: f runs once, and its rule once."""

    spec: TreeSpec
    rule: TracedRule
    linear_of: Callable[[Sequence[int | None]], Linear]
    refusal: str | None = None
    """why no tracer that f closes over may be differentiated"""

    def __init__(
        self, call: Call, inputs: Sequence[Array], is_constant: Callable[[Array], bool],
        at: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.call, self.inputs, self.is_constant = call, inputs, is_constant
        self.at = [i for i, x in enumerate(inputs) if is_tracer(x)] if at is None else at
        self.variables: list[Array] = []

    def run(self) -> _Staged:
        """Return the call as one operation, of those of the inputs, and of what it closes over."""
        return _staging.run((*(_staging.current or ()), code_of(self.call.f)), self._op)

    def _op(self) -> _Staged:
        call = without_f(self.call)

        def run_f(*tracers: Array) -> list[Array]:
            full = subvals(self.inputs, self.at, tracers)
            outputs, rule = self.call(full)
            self.spec = rule.output
            rule = of_tangents(self.call, rule)
            self._choose_variables(rule)
            known = [*outputs_of_rules(), *outputs]
            rules, forwards = trace_rule(
                rule, full, outputs, known, self.variables, places=self.at, choices=self._choices(),
                is_pushed=rule.is_transpose and not call.once_differentiable,
            )  # fmt: skip
            self.rule = (rules or forwards)[None]
            residuals, self.linear_of = traced(
                call, rules, tracers, outputs, forwards, self.variables
            )
            return [*outputs, *residuals]

        f, self.captured = jaxpr_of(
            run_f, [self.inputs[i].aval for i in self.at], outputs_of_rules(), self.call.f
        )
        place = {id(x): len(self.inputs) + at for at, x in enumerate(self.variables)}
        linear = self.linear_of([*self.at, *(place.get(id(x)) for x in self.captured)])
        _refuse_references(self.call, [*self.captured, *f.consts, *self.rule.constants])
        return _Staged(f, linear)

    def _choices(self) -> list[tuple[int, ...]]:
        """Return for which arguments together a rule that asks is traced: each choice of up to
        three, and each one of more.

        Which are differentiated is known when f's tracers are gone.
        """
        floats = [at for at, i in enumerate(self.at) if is_differentiable(self.inputs[i])]
        sizes = range(1, len(floats)) if len(floats) <= _FEW else [1]
        return [picked for size in sizes for picked in itertools.combinations(floats, size)]

    def _choose_variables(self, rule: Rule) -> None:
        """Find what f closes over and is differentiated; if nothing is known to be, what may be
        later.
        """
        _refuse_references(self.call, captured_so_far())
        closed = [x for x in captured_so_far() if is_differentiable(x) and not self.is_constant(x)]
        variables = [x for x in closed if is_differentiated(x)]
        try:
            self.call.require_variables(rule, variables or closed)
        except CustomGradientTypeError as error:
            if variables:
                raise
            self.refusal = str(error)
        else:
            self.variables = variables or closed

    def closed_over(self) -> list[Array]:
        """Return the tracers that f and the rule close over; to differentiate one that is no
        variable is an error.
        """
        own = {id(x) for x in self.variables}
        return [
            x if id(x) in own or self.is_constant(x)
            else _constant(x, self.refusal or message_of(self.call.refuse_captured, x))
            for x in self.captured
        ]  # fmt: skip


def _refuse_references(call: Call, tensors: Sequence[Any]) -> None:
    """Raise the error if a mutable array is among these."""
    for x in filter(is_reference, tensors):
        raise refusal(TransformationError, call.name,
                      must="an op that is staged may not read or write a mutable array", got=f"{x.aval}",
                      do="read it outside of the op, and return from the op what is to be written")  # fmt: skip


def _constant(tracer: Array, refusal: str) -> Array:
    """Return a tracer that f closes over and that is no variable: if somebody differentiates it,
    that is an error.
    """
    if not is_differentiable(tracer) or is_differentiated(tracer) is False:
        return tracer

    def refuse(primals: Any, tangents: Any) -> NoReturn:
        raise CustomGradientTypeError(refusal)

    constant: Any = jax.custom_jvp(lambda x: x)
    constant.defjvp(refuse)
    return constant(tracer)


class _Staged(Op):
    """A call as jaxprs, which keep no tracer alive: from arguments (what f closes over comes last)
    to outputs.
    """

    def __init__(self, whole: ClosedJaxpr, linear: Linear) -> None:
        self.whole, self.linear, self.call = whole, linear, linear.call
        jaxpr, outputs = whole.jaxpr, whole.jaxpr.outvars[: len(linear.outputs)]
        self.f = whole
        if len(outputs) < len(jaxpr.outvars):  # it has residuals, too
            self.f = part_of(whole, jaxpr.invars, outputs, equations_for(outputs, jaxpr.eqns))

    def forward(
        self, arguments: Sequence[Array]
    ) -> tuple[Sequence[Array], Sequence[Array], Linear]:
        """Return the outputs without derivatives, and the residuals with derivatives through f's
        own operations.

        The derivative of the outputs is the rule's. So what only they need may be opaque: a
        callback, a while loop.
        """
        jaxpr, count = self.whole.jaxpr, len(self.linear.outputs)
        ends, residual_ends = jaxpr.outvars[:count], jaxpr.outvars[count:]
        first = equations_for(residual_ends, jaxpr.eqns)
        of_residuals = {id(eqn) for eqn in first}
        second = [eqn for eqn in jaxpr.eqns if id(eqn) not in of_residuals]
        of_outputs = [v for eqn in second for v in eqn.invars] + ends
        needed = {v for v in of_outputs if not isinstance(v, Literal)}
        between = [v for eqn in first for v in eqn.outvars if v in needed]
        part = part_of(self.whole, jaxpr.invars, [*between, *residual_ends], first)
        known = eval_jaxpr(part, arguments)
        rest = part_of(self.whole, [*jaxpr.invars, *between], ends, second)
        operands = [
            jax.lax.stop_gradient(x) if is_tracer(x) else x
            for x in (*arguments, *known[: len(between)])
        ]
        outputs = eval_jaxpr(rest, operands)
        types = [y.aval for y in outputs]
        return outputs, known[len(between) :], dataclasses.replace(self.linear, outputs=types)


class _Later(Op):
    """A call in its own rule, as where two rules call each other: there would be no end to it.

    It is staged only if somebody differentiates it: then f runs again. What f closes over becomes
    an argument here and now. It outlives the arguments and the rule of this run, and keeps neither.
    """

    spec: TreeSpec
    takes_variables: bool

    def __init__(self, call: Call, inputs: Sequence[Array]) -> None:
        self.call = call
        self.places = [i for i, x in enumerate(inputs) if is_tracer(x)]
        self.inputs = subvals(inputs, self.places, [None] * len(self.places))

    def output(self, inputs: Sequence[Array], is_constant: Callable[[Array], bool]) -> Any:
        """Return the output, of what f closes over too."""
        arguments = [inputs[i] for i in self.places]

        def run_f(*tracers: Array) -> list[Array]:
            outputs, rule = self.call(subvals(inputs, self.places, tracers))
            self.spec, self.takes_variables = rule.output, rule.takes_variables
            return outputs

        types = [x.aval for x in arguments]
        f, self.captured = jaxpr_of(run_f, types, outputs_of_rules(), self.call.f)
        self.f = f
        _refuse_references(self.call, [*self.captured, *f.consts])
        self.constant = {id(x) for x in self.captured if is_constant(x)}
        closed_over = [
            x if self.takes_variables or id(x) in self.constant
            else _constant(x, message_of(self.call.refuse_captured, x))
            for x in self.captured
        ]  # fmt: skip
        return self.spec.combine(self([*arguments, *closed_over]))

    def forward(
        self, arguments: Sequence[Array]
    ) -> tuple[Sequence[Array], Sequence[Array], Linear]:
        """Return what the staged call returns."""
        arguments = [*map(as_tensor, arguments)]
        own, closed_over = arguments[: len(self.places)], arguments[len(self.places) :]
        inputs = subvals(self.inputs, self.places, own)
        staging = _Staging(self.call, inputs, lambda x: id(x) in self.constant, self.places)
        op = staging.run()
        now = {id(x): y for x, y in zip(self.captured, closed_over, strict=True)}
        refuse_captured(self.call.name, [x for x in staging.captured if id(x) not in now])
        return op.forward([*own, *(now[id(x)] for x in staging.captured)])
