"""Calls whose f captures tracers: f and its rule become jaxprs.

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

from cgshim.backend import Call, Rule, is_in_rule, refuse_captured_tangent, subvals
from cgshim_jax._op import Run, error_of, push_by
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

    Its args are the inputs, then the variables, then the other tracers that f and its rule capture.
    """

    def __init__(
        self, call: Call, inputs: Sequence[Array], variables: Sequence[Array] = ()
    ) -> None:
        self.call, self.count = call, len(inputs)
        rule: Any = None

        def everything(*tracers: Array) -> tuple[list[Array], list[Array]]:
            nonlocal rule
            outputs, rule = call(tracers)
            takes_any = rule.takes_variables or call.arguments.variables is not None
            return outputs, self._trace_rule(rule, tracers, outputs, variables if takes_any else ())

        closed = jax.make_jaxpr(everything)(*inputs)
        self.jaxpr, self.spec, self.rule = closed.jaxpr, rule.output, rule
        args = {id(x): x for x in (*variables, *filter(is_tracer, closed.consts))}
        self.args = [*inputs, *args.values()]
        self.size = len(self.args)
        index = {of: self.count + at for at, of in enumerate(args)}
        self.captured_at = [at for at, x in enumerate(closed.consts) if id(x) in index]
        self.index = [index[id(closed.consts[at])] for at in self.captured_at]
        self.constants = subvals(closed.consts, self.captured_at, [None] * len(self.index))

    def _trace_rule(
        self, rule: Rule, inputs: Sequence[Array], outputs: Sequence[Array],
        variables: Sequence[Array],
    ) -> list[Array]:  # fmt: skip
        """Trace the rule, and perhaps a jvp_fn; return the tensors that they read."""
        types, input_types = [*map(typeof, outputs)], [*map(typeof, inputs)]

        def gradients(*upstreams: Array) -> list[Array | None]:
            of_inputs, of_variables = rule(
                inputs, [*map(conjugate, upstreams)], variables, rule.needed
            )
            return [None if g is None else conjugate(g) for g in (*of_inputs, *of_variables)]

        def tangents(*of_inputs: Array) -> list[Array]:
            return push_by(rule, of_inputs, input_types, types)

        like = [y if is_differentiable(y) else zeros_of(y) for y in outputs]
        self._gradients = TracedMap(gradients, like, 0)
        residuals = self._gradients.take_residuals()
        self._tangents = TracedMap(tangents, inputs, len(residuals)) if rule.jvp_fn else None
        return residuals + (self._tangents.take_residuals() if self._tangents else [])

    def outputs(self, args: Sequence[Array]) -> list[Array]:
        """Return f's outputs for a call that nothing differentiates."""
        return self._evaluate(args)[: self.spec.count]

    def run(self, args: Sequence[Array], needed: Sequence[bool]) -> Run:
        """Return the outputs and the residuals, as functions of the args."""
        results, end = self._evaluate(args), self.spec.count
        push = None if self._tangents is None else self.push
        return Run(results[:end], results[end:], self.pull, push)

    def pull(self, read: Sequence[Array], upstreams: Sequence[Array]) -> list[Array | None]:
        """Return the gradients of the args."""
        gradients = self._gradients(read, upstreams)
        return [*gradients, *[None] * (self.size - len(gradients))]

    def push(self, read: Sequence[Array], tangents: Sequence[Array | None]) -> list[Array]:
        """Return the tangents of the outputs, by the author's jvp_fn."""
        if any(t is not None for t in tangents[self.count :]):
            refuse_captured_tangent(self.call.name)
        assert self._tangents is not None
        kinds = zip(tangents, self._tangents.types, strict=False)
        return self._tangents(read, [zeros_of(k) if t is None else t for t, k in kinds])  # type: ignore[return-value]

    def _evaluate(self, args: Sequence[Array]) -> list[Array]:
        captured = [args[at] for at in self.index]
        constants = subvals(self.constants, self.captured_at, captured)
        return eval_jaxpr(self.jaxpr, constants, *args[: self.count])  # type: ignore[no-any-return]

    def combined(self, outputs: Sequence[Array]) -> Any:
        """Return the outputs in the structure that f returned."""
        return self.spec.combine(outputs)

    # --- What f captures --------------------------------------------------------------------------

    @property
    def state(self) -> list[Array]:
        """The differentiable tensors that f captures, and does not only keep for its rule."""
        read = _read_for(self.jaxpr.outvars[: self.spec.count], self.jaxpr.eqns)
        places = zip(self.index, self.captured_at, strict=True)
        found = {i for i, at in places if self.jaxpr.constvars[at] in read}
        return [x for i, x in enumerate(self.args) if i in found and is_differentiable(x)]

    def take_args(self) -> list[Array]:
        """Return the args, and keep no tracer, because JAX keeps ops in programs."""
        inputs, captured, state = self.args[: self.count], self.args[self.count :], self.state
        errors = [error_of(self._refuse_undeclared, x, state, inputs) for x in captured]
        self.errors = [*[None] * self.count, *errors]
        call = self.call
        self.call = Call(call.arguments, _no_f, {}, forward_mode=call.forward_mode,
                         once_differentiable=call.once_differentiable)  # fmt: skip
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
        state = traced.state
        if [*map(id, state)] != [*map(id, variables)]:
            traced = TracedOp(call, inputs, state)
    return traced, traced.take_args()


def _no_f(*_: Any) -> Any:
    raise AssertionError("f is traced")


def _read_for(ends: Sequence[Any], equations: Sequence[Any]) -> set[Any]:
    """Return the variables that these variables depend on, with themselves."""
    needed = {v for v in ends if not isinstance(v, Literal)}
    for eqn in reversed(equations):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return needed


class TracedMap:
    """A rule or a jvp_fn as a jaxpr: from vectors and residuals to gradients or tangents.

    An error that its author raises, or that tracing raises, is raised when its result is used.
    """

    def __init__(
        self, function: Callable[..., Sequence[Array | None]], like: Sequence[Array], start: int
    ) -> None:
        self.error: Exception | None = None
        self.types = [*map(typeof, like)]
        self.at, self.count = list[int](), 0

        def given(*vectors: Array) -> list[Array]:
            results = function(*vectors)
            self.at = [at for at, x in enumerate(results) if x is not None]
            self.count = len(results)
            return [results[at] for at in self.at]

        constants: Sequence[Array] = ()
        try:
            closed = jax.make_jaxpr(given)(*like)
            self.jaxpr, constants = closed.jaxpr, closed.consts
        except Exception as error:  # noqa: BLE001  # to raise may be the author's way to forbid it
            self.error = error.with_traceback(None)
        self.tracers_at = [at for at, c in enumerate(constants) if is_tracer(c)]
        self.residuals = [constants[at] for at in self.tracers_at]
        self.place = slice(start, start + len(self.residuals))
        self.constants = subvals(constants, self.tracers_at, [None] * len(self.residuals))

    def take_residuals(self) -> list[Array]:
        """Return the constants that are tracers; calls will give them, in this order."""
        residuals, self.residuals = self.residuals, []
        return residuals

    def __call__(self, read: Sequence[Array], vectors: Sequence[Array]) -> list[Array | None]:
        if self.error is not None:
            raise self.error
        constants = subvals(self.constants, self.tracers_at, read[self.place])
        return subvals([None] * self.count, self.at, eval_jaxpr(self.jaxpr, constants, *vectors))
