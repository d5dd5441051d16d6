"""Calls in jit, and derivatives of batches: f and its rule become jaxprs.

A jaxpr says how each tensor was made: the constants of the rule's jaxpr are its residuals, and the
constants of f's jaxpr are the tensors that f captures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Literal
from jax.lax import stop_gradient

from cgshim.backend import Call, Rule, closure_convert, is_in_rule, subvals
from cgshim_jax._op import Run, known_tensors, once_differentiable_error, push_by
from cgshim_jax._tensors import (
    Array,
    conjugate,
    is_differentiable,
    is_tracer,
    typeof,
    zeros_of,
)


class TracedOp:
    """A call as a jaxpr.

    Its args are the inputs, then what f and its rule capture.
    """

    def __init__(
        self, call: Call, inputs: Sequence[Array], variables: Sequence[Array] = ()
    ) -> None:
        self.call, self.inputs, self.variables = call, inputs, variables
        found: Any = None

        def everything(*tracers: Array) -> tuple[list[Array], list[Array]]:
            nonlocal found
            outputs, rule = call(tracers)
            takes_any = rule.takes_variables or call.arguments.variables is not None
            traced = TracedRule(call, rule, tracers, outputs, variables if takes_any else ())
            residuals = traced.residuals_of(tracers, outputs)
            empty = closure_convert(rule.grad_fn, call.backend)
            # JAX's check for leaks finds what the rule would keep
            found = rule.with_grad_fn(empty.rebuild([()] * len(empty.residuals))), traced
            return outputs, residuals

        self.closed = jax.make_jaxpr(everything)(*inputs)
        self.empty_rule, self.rule = found
        self.spec = self.empty_rule.output
        self.captured_at = [i for i, c in enumerate(self.closed.consts) if is_tracer(c)]
        captured = [self.closed.consts[i] for i in self.captured_at]
        own = {id(x) for x in captured}
        self.captured = captured + [v for v in variables if is_tracer(v) and id(v) not in own]
        self.args = [*inputs, *self.captured]
        index = {id(v): len(inputs) + i for i, v in enumerate(variables)}
        of_captured = [index.get(id(x)) if self.takes_variables else None for x in self.captured]
        self.rule.gradient_of = [*range(len(inputs)), *of_captured]

    @property
    def takes_variables(self) -> bool:
        """True if grad_fn has a parameter for variables."""
        return bool(self.empty_rule.takes_variables)

    @property
    def state(self) -> list[Array]:
        """The differentiable tensors that f captures, and does not only keep for its rule."""
        jaxpr = self.closed.jaxpr
        read = _read_for(jaxpr.outvars[: self.spec.count], jaxpr.eqns)
        variables = [jaxpr.constvars[i] for i in self.captured_at]
        return [
            x
            for x, v in zip(self.captured, variables, strict=False)
            if v in read and is_differentiable(x)
        ]

    def outputs(self, args: Sequence[Array]) -> list[Array]:
        """Return f's outputs for a call that nothing differentiates."""
        return self._evaluate(args)[: self.spec.count]

    def run(self, args: Sequence[Array], needed: Sequence[bool], is_again: bool) -> Run:
        """Return the outputs and the residuals, as functions of the args."""
        results, end = self._evaluate(args), self.spec.count
        self.rule.gradient_of = self.rule.gradient_of[: len(args)]
        return Run(results[:end], results[end:], self.rule)

    def _evaluate(self, args: Sequence[Array]) -> list[Array]:
        inputs, captured = args[: len(self.inputs)], args[len(self.inputs) :] or self.captured
        constants = subvals(self.closed.consts, self.captured_at, captured[: len(self.captured_at)])
        return eval_jaxpr(self.closed.jaxpr, constants, *inputs)  # type: ignore[no-any-return]

    def combined(self, outputs: Sequence[Array]) -> Any:
        """Return the outputs in the structure that f returned."""
        return self.spec.combine(outputs)

    def check_captured(self, needed: Sequence[bool]) -> None:
        """Raise an error if a tensor is differentiated that f captures and is no variable."""
        flags = needed[len(self.inputs) :]
        moving = {id(x) for x, flag in zip(self.captured, flags, strict=True) if flag}
        if not moving:
            return
        found = [x for x in self.state if id(x) in moving]
        variables = self.call.captured_variables(found, self.inputs)
        self.call.require_variables(self.empty_rule, variables)
        if self.takes_variables and {*map(id, variables)} - {*map(id, self.variables)}:
            self.call.refuse_undeclared(self.state)


def trace_with_captured(call: Call, inputs: Sequence[Array], held: Sequence[Array]) -> TracedOp:
    """Return a call whose f captures tracers; held are the tracers in f's closure.

    Called in a rule, it takes them as constants. A rule may take one variable that is not declared:
    the one that f captures.
    """
    call = call.with_needs_input_grad([is_tracer(x) and is_differentiable(x) for x in inputs])
    variables = call.variables or [x for x in held if is_differentiable(x)]
    traced = TracedOp(call, inputs, variables)
    state = traced.state
    if traced.takes_variables and not call.variables and [*map(id, state)] != [*map(id, variables)]:
        traced = TracedOp(call, inputs, state)
    if is_in_rule():
        traced.args[len(inputs) :] = map(stop_gradient, traced.captured)
    return traced


# --- The rule -------------------------------------------------------------------------------------


class TracedMap:
    """A rule or a jvp_fn as a jaxpr: from vectors and residuals to gradients or tangents.

    An error that its author raises, or that tracing raises, is raised when its result is used.
    """

    def __init__(
        self, function: Callable[..., Sequence[Array | None]], like: Sequence[Array]
    ) -> None:
        self.error: Exception | None = None
        self.at, self.count = list[int](), 0

        def given(*vectors: Array) -> list[Array]:
            results = function(*vectors)
            self.at = [at for at, x in enumerate(results) if x is not None]
            self.count = len(results)
            return [results[at] for at in self.at]

        try:
            closed = jax.make_jaxpr(given)(*like)
            self.jaxpr, self.constants = closed.jaxpr, list(closed.consts)
        except Exception as error:  # noqa: BLE001  # to raise may be the author's way to forbid it
            self.error, self.constants = error.with_traceback(None), []

    def take_tracers(self) -> list[Array]:
        """Return the constants that are tracers; calls will give them, in this order."""
        self.tracers_at = [at for at, c in enumerate(self.constants) if is_tracer(c)]
        tracers = [self.constants[at] for at in self.tracers_at]
        self.constants = subvals(self.constants, self.tracers_at, [None] * len(tracers))
        return tracers

    def __call__(self, tracers: Sequence[Array], vectors: Sequence[Array]) -> list[Array | None]:
        if self.error is not None:
            raise self.error
        constants = subvals(self.constants, self.tracers_at, tracers)
        return subvals([None] * self.count, self.at, eval_jaxpr(self.jaxpr, constants, *vectors))


class TracedRule:
    """A rule, and perhaps a jvp_fn, as jaxprs."""

    gradient_of: Sequence[int | None]
    """for each of the args the index of its gradient among all gradients"""

    def __init__(
        self, call: Call, rule: Rule, inputs: Sequence[Array], outputs: Sequence[Array],
        variables: Sequence[Array],
    ) -> None:  # fmt: skip
        self.refusal = once_differentiable_error(call)
        self.has_jvp = rule.jvp_fn is not None
        self.floats = [at for at, y in enumerate(outputs) if is_differentiable(y)]
        self.input_types = [*map(typeof, inputs)]

        def gradients(*of_floats: Array) -> list[Array | None]:
            upstreams = [y if is_differentiable(y) else zeros_of(y) for y in outputs]
            upstreams = subvals(upstreams, self.floats, [*map(conjugate, of_floats)])
            of_inputs, of_variables = rule(inputs, upstreams, variables, rule.needed)
            return [None if g is None else conjugate(g) for g in (*of_inputs, *of_variables)]

        def tangents(*of_inputs: Array) -> list[Array]:
            return push_by(rule, of_inputs, inputs, outputs)

        self.pull = TracedMap(gradients, [outputs[at] for at in self.floats])
        self.jvp = TracedMap(tangents, inputs) if self.has_jvp else None

    def residuals_of(self, args: Sequence[Array], outputs: Sequence[Array]) -> list[Array]:
        """Return the tracers that the rule reads; calls will give it others."""
        residuals = self.pull.take_tracers()
        self.count = len(residuals)
        if self.jvp is not None:
            residuals += self.jvp.take_tracers()
        self.known = known_tensors(residuals, args, outputs)
        return residuals

    def __call__(self, read: Sequence[Array], upstreams: Sequence[Array]) -> list[Array | None]:
        every = self.pull(read[: self.count], [upstreams[at] for at in self.floats])
        return [None if at is None else every[at] for at in self.gradient_of]

    def push(self, read: Sequence[Array], tangents: Sequence[Array | None]) -> list[Array]:
        """Return the tangents of the outputs, by the author's jvp_fn."""
        full = [
            zeros_of(kind) if t is None else t
            for t, kind in zip(tangents, self.input_types, strict=False)
        ]
        assert self.jvp is not None
        end = self.count + len(self.jvp.tracers_at)
        return self.jvp(read[self.count : end], full)


def _read_for(ends: Sequence[Any], equations: Sequence[Any]) -> set[Any]:
    """Return the variables that these variables depend on, with themselves."""
    needed = {v for v in ends if not isinstance(v, Literal)}
    for eqn in reversed(equations):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return needed
