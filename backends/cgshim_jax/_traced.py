"""Calls whose f captures tracers: f and its rule become jaxprs.

A jaxpr says how each tensor was made: the constants of the rule's jaxpr are its residuals, and the
constants of f's jaxpr are the tensors that f captures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Literal
from jax.lax import stop_gradient

from cgshim.backend import Call, Rule, closure_convert, is_in_rule, refuse_captured_tangent, subvals
from cgshim_jax._op import Run, error_of, pull_by, push_by
from cgshim_jax._tensors import (
    Array,
    is_differentiable,
    is_tracer,
    typeof,
    zeros_of,
)


class TracedOp:
    """A call as a jaxpr.

    Its args are the inputs, then the variables, then the other tracers that f and its rule capture.
    """

    def __init__(
        self, call: Call, inputs: Sequence[Array], variables: Sequence[Array] = ()
    ) -> None:
        self.call, self.count = call, len(inputs)
        self.rule: Any = None
        self.gradients: Any = None
        self.tangents: Any = None

        def outputs_and_residuals(*tracers: Array) -> list[Array]:
            outputs, rule = call(tracers)
            takes_any = rule.takes_variables or call.arguments.variables is not None
            given = variables if takes_any else ()
            residuals = self._trace_rule(rule, tracers, outputs, given)
            held, rebuild, _ = closure_convert(rule.grad_fn, call.backend)
            # JAX's check for leaks finds what the rule would keep
            self.rule = rule.with_grad_fn(rebuild([()] * len(held)))
            return outputs + residuals

        self.f = Jaxpr(outputs_and_residuals, inputs)
        self.spec = self.rule.output  # type: ignore[attr-defined]
        captured = {id(x): x for x in (*variables, *self.f.tracers)}
        index = {of: self.count + at for at, of in enumerate(captured)}
        self.captured_at = [index[id(x)] for x in self.f.tracers]
        self.args = [*inputs, *captured.values()]
        self.size = len(self.args)

    def _trace_rule(
        self, rule: Rule, inputs: Sequence[Array], outputs: Sequence[Array],
        variables: Sequence[Array],
    ) -> list[Array]:  # fmt: skip
        """Trace the rule, and perhaps a jvp_fn; return the tensors that they read."""
        types, input_types = [*map(typeof, outputs)], [*map(typeof, inputs)]

        def pull(*upstreams: Array) -> list[Array | None]:
            return pull_by(rule, inputs, upstreams, variables)

        def push(*of_inputs: Array) -> list[Array]:
            return push_by(rule, of_inputs, input_types, types)

        like = [y if is_differentiable(y) else zeros_of(y) for y in outputs]
        self.gradients, residuals = traced_map(pull, like, 0)
        if rule.jvp_fn is None:
            return residuals
        self.tangents, others = traced_map(push, inputs, len(residuals))
        return residuals + others

    def run(self, args: Sequence[Array], needed: Sequence[bool]) -> Run:
        """Return the outputs and the residuals, as functions of the args."""
        captured, end = [args[at] for at in self.captured_at], self.spec.count
        results = self.f(captured, args[: self.count])
        push = None if self.tangents is None else self.push
        return Run(results[:end], results[end:], self.pull, push)

    def pull(self, read: Sequence[Array], upstreams: Sequence[Array]) -> list[Array | None]:
        """Return the gradients of the args."""
        gradients = self.gradients(read, upstreams)
        return [*gradients, *[None] * (self.size - len(gradients))]

    def push(self, read: Sequence[Array], tangents: Sequence[Array | None]) -> list[Array]:
        """Return the tangents of the outputs, by the author's jvp_fn."""
        if any(t is not None for t in tangents[self.count :]):
            refuse_captured_tangent(self.call.name)
        given = zip(tangents, self.f.types, strict=False)
        return self.tangents(read, [zeros_of(k) if t is None else t for t, k in given])  # type: ignore[no-any-return]

    # --- What f captures --------------------------------------------------------------------------

    def state(self) -> list[Array]:
        """Return the differentiable tensors that f captures, and does not only keep for its rule."""
        read = self.f.tracers_read_for(self.spec.count)
        found = {at for at, is_read in zip(self.captured_at, read, strict=True) if is_read}
        return [x for at, x in enumerate(self.args) if at in found and is_differentiable(x)]

    def take_args(self) -> list[Array]:
        """Return the args, and keep no tracer, because JAX keeps ops in programs."""
        inputs, captured, state = self.args[: self.count], self.args[self.count :], self.state()
        errors = [error_of(self._refuse_undeclared, x, state, inputs) for x in captured]
        self.errors = [*[None] * self.count, *errors]
        self.call = Call(self.call.arguments, not_called, {}, forward_mode=self.call.forward_mode,
                         once_differentiable=self.call.once_differentiable)  # fmt: skip
        self.f.tracers = []
        del self.args, self.rule
        return [*inputs, *(map(stop_gradient, captured) if is_in_rule() else captured)]

    def _refuse_undeclared(self, x: Array, state: Sequence[Array], inputs: Sequence[Array]) -> None:
        """Raise the error for a captured tensor that is differentiated and is no variable."""
        if any(x is y for y in state):
            found = [x] if self.call.variables else state
            variables = self.call.captured_variables(found, inputs)
            self.call.require_variables(self.rule, variables)

    def check_captured(self, needed: Sequence[bool]) -> None:
        """Raise an error if a tensor is differentiated that f captures and is no variable."""
        for is_needed, error in zip(needed, self.errors, strict=True):
            if is_needed and error is not None:
                raise error


def trace_with_captured(
    call: Call, inputs: Sequence[Array], held: Sequence[Array]
) -> tuple[TracedOp, list[Array]]:
    """Return a call whose f captures tracers, and its args; held are the tracers in f's closure.

    Called in a rule, it takes them as constants. A rule may take one variable that is not declared:
    the one that f captures.
    """
    call = call.with_needs_input_grad([is_tracer(x) and is_differentiable(x) for x in inputs])
    variables = call.variables or [x for x in held if is_differentiable(x)]
    traced = TracedOp(call, inputs, variables)
    if traced.rule.takes_variables and not call.variables:
        state = traced.state()
        if [*map(id, state)] != [*map(id, variables)]:
            traced = TracedOp(call, inputs, state)
    return traced, traced.take_args()


def not_called(*_: Any) -> NoReturn:
    """Stand for an f that is traced already, or for a grad_fn without its residuals."""
    raise AssertionError


# --- Functions as jaxprs --------------------------------------------------------------------------


class Jaxpr:
    """A function as a jaxpr, apart from the tracers that it captures."""

    def __init__(self, function: Callable[..., list[Array]], like: Sequence[Array]) -> None:
        closed = jax.make_jaxpr(function)(*like)
        self.jaxpr, self.types = closed.jaxpr, closed.in_avals
        self.at = [at for at, c in enumerate(closed.consts) if is_tracer(c)]
        self.tracers = [closed.consts[at] for at in self.at]
        self.constants = subvals(closed.consts, self.at, [None] * len(self.at))

    def __call__(self, tracers: Sequence[Array], args: Sequence[Array]) -> list[Array]:
        constants = subvals(self.constants, self.at, tracers)
        return eval_jaxpr(self.jaxpr, constants, *args)  # type: ignore[no-any-return]

    def tracers_read_for(self, count: int) -> list[bool]:
        """Return which of the tracers the first results depend on."""
        needed = {v for v in self.jaxpr.outvars[:count] if not isinstance(v, Literal)}
        for eqn in reversed(self.jaxpr.eqns):
            if not needed.isdisjoint(eqn.outvars):
                needed.update(v for v in eqn.invars if not isinstance(v, Literal))
        return [self.jaxpr.constvars[at] in needed for at in self.at]


def traced_map(
    function: Callable[..., Sequence[Array | None]], like: Sequence[Array], start: int
) -> tuple[Callable[[Sequence[Array], Sequence[Array]], list[Array | None]], list[Array]]:
    """Return a rule or a jvp_fn as a function of residuals and vectors, and its residuals.

    They begin at start among all residuals. An error that the author raises, or that tracing raises,
    is raised when the result is used.
    """
    at, count = list[int](), 0

    def given(*vectors: Array) -> list[Array]:
        nonlocal at, count
        results = function(*vectors)
        at, count = [at for at, x in enumerate(results) if x is not None], len(results)
        return [x for x in results if x is not None]

    try:
        jaxpr = Jaxpr(given, like)
    except Exception as error:  # noqa: BLE001  # to raise may be the author's way to forbid it
        return partial(_raise, error.with_traceback(None)), []
    residuals, jaxpr.tracers = jaxpr.tracers, []
    end = start + len(residuals)
    return lambda read, vectors: subvals(
        [None] * count, at, jaxpr(read[start:end], vectors)
    ), residuals


def _raise(error: Exception, *_: Any) -> NoReturn:
    raise error
