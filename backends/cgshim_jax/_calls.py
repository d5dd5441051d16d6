"""Calls of ops: f and its rule as Python functions, or as jaxprs where f captures tracers.

Around known values nothing is traced: f and grad_fn may branch on them. The rule is rebuilt around
the tensors that it reads, which are the op's own outputs and arguments if it reads these.

A jaxpr says how each tensor was made: the constants of the rule's jaxpr are its residuals, and the
constants of f's jaxpr are the tensors that f captures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import jax
from jax.core import eval_jaxpr
from jax.errors import UnexpectedTracerError
from jax.interpreters.partial_eval import dce_jaxpr_consts
from jax.lax import stop_gradient

from cgshim.backend import (
    Call,
    Rebuild,
    Rule,
    closure_convert,
    describe,
    is_in_rule,
    refuse_captured_tangent,
    tensors_inside,
)
from cgshim_jax._op import Run, error_of, pull_by, push_by
from cgshim_jax._tensors import (
    Array,
    as_tensor,
    is_differentiable,
    is_tensor,
    is_tracer,
    typeof,
    value_of,
    zeros_of,
)


class EagerOp:
    """A call whose f captures no tracer, as a function of its inputs."""

    errors: Mapping[int, Exception | None] = {}

    def __init__(self, call: Call) -> None:
        self.call = call

    def run(self, args: Sequence[Array], needed: Sequence[bool]) -> Run:
        """Run f for derivatives by the needed args."""
        call = self.call.with_needs_input_grad(
            [flag and is_differentiable(x) for flag, x in zip(needed, args, strict=True)]
        )
        outputs, rule = call(args)
        if not any(map(is_tracer, args)) and any(map(is_tracer, outputs)):
            raise UnexpectedTracerError("f captures a tracer")
        self.spec = rule.output
        held, rebuild, opaque = closure_convert(rule.grad_fn, call.backend, call.constants)
        hidden = tensors_inside(opaque, _is_float)
        if any(value_of(x) is None for x in hidden):
            return Run(outputs, *_traced_rule(rule, args, outputs, call.variables))
        pull, push = _functions_of(rule, rebuild, len(held), call, args, outputs)
        residuals = [*held, *args] if rule.needs_inputs else held
        return Run(outputs, residuals, pull, push, _hidden_error(call, opaque) if hidden else None)


def _functions_of(
    rule: Rule, rebuild: Rebuild, count: int, call: Call, args: Sequence[Array],
    outputs: Sequence[Array],
) -> tuple[Any, Any]:  # fmt: skip
    """Return ``pull`` and ``push`` of a run; grad_fn closes over the first count residuals."""
    types, input_types, variables = [*map(typeof, outputs)], [*map(typeof, args)], call.variables
    empty = rule.with_grad_fn(not_called)  # JAX keeps the two functions

    def pull(needed: Any, read: Sequence[Array], upstreams: Sequence[Array]) -> list[Array | None]:
        bound = empty.with_grad_fn(rebuild(read[:count]))
        inputs = read[count : count + len(input_types)] if bound.needs_inputs else input_types
        return pull_by(bound, inputs, upstreams, variables, needed)

    def push(_: Any, read: Sequence[Array], tangents: Sequence[Array | None]) -> list[Array]:
        return push_by(empty.with_grad_fn(rebuild(read[:count])), tangents, input_types, types)

    return pull, None if rule.jvp_fn is None else push


def _hidden_error(call: Call, opaque: Sequence[Any]) -> Exception | None:
    """Return the error for the derivative of a float in an attribute of one of these objects."""
    x, tensor = next((x, t) for x in opaque for t in tensors_inside(x, _is_float))
    return error_of(
        call.refuse_unconnected, tensor, f"grad_fn keeps in an attribute of {describe(x)}"
    )


def _is_float(x: object) -> bool:
    return is_tensor(x) and is_differentiable(x)


# --- Calls whose f captures tracers ---------------------------------------------------------------


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
    is_guess = traced.rule.takes_variables and not call.variables
    if is_guess and [*map(id, variables)] != [*map(id, traced.state())]:
        traced = TracedOp(call, inputs, traced.state())
    return traced, traced.take_args()


class TracedOp:
    """A call as a jaxpr.

    Its args are the inputs, then the variables, then the other tensors that f and its rule capture.
    """

    def __init__(self, call: Call, inputs: Sequence[Array], variables: Sequence[Array]) -> None:
        self.call, self.count = call, len(inputs)
        made: list[Any] = []

        def outputs_and_residuals(*tracers: Array) -> list[Array]:
            outputs, rule = call(tracers)
            takes_any = rule.takes_variables or call.arguments.variables is not None
            given = variables if takes_any else ()
            residuals, *functions = _traced_rule(rule, tracers, outputs, given)
            held, rebuild, _ = closure_convert(rule.grad_fn, call.backend)
            # JAX's check for leaks finds what the rule would keep
            made[:] = [rule.with_grad_fn(rebuild([()] * len(held))), *functions]
            return [*outputs, *residuals]

        closed = jax.make_jaxpr(outputs_and_residuals)(*inputs)
        self.rule, *self.functions = made
        self.jaxpr, self.spec = closed.jaxpr, self.rule.output
        captured = {id(x): x for x in (*variables, *closed.consts)}
        index = {of: self.count + at for at, of in enumerate(captured)}
        self.captured_at = [index[id(x)] for x in closed.consts]
        self.args = [*inputs, *captured.values()]

    def run(self, args: Sequence[Array], needed: Sequence[bool]) -> Run:
        """Return the outputs and the residuals, as functions of the args."""
        captured, end = [args[at] for at in self.captured_at], self.spec.count
        results = [*map(as_tensor, eval_jaxpr(self.jaxpr, captured, *args[: self.count]))]
        return Run(results[:end], results[end:], *self.functions)

    def state(self) -> list[Array]:
        """Return the differentiable tensors that f captures, and does not only keep for its rule."""
        _, is_read, _ = dce_jaxpr_consts(
            self.jaxpr, [at < self.spec.count for at in range(len(self.jaxpr.outvars))]
        )
        read = {at for at, flag in zip(self.captured_at, is_read, strict=True) if flag}
        return [
            x for at, x in enumerate(self.args)
            if at in read and is_tracer(x) and is_differentiable(x)
        ]  # fmt: skip

    def take_args(self) -> list[Array]:
        """Return the args, and keep no tracer, because JAX keeps ops in programs."""
        inputs, captured, state = self.args[: self.count], self.args[self.count :], self.state()
        self.errors = {
            at: error_of(self._refuse_undeclared, [x] if self.call.variables else state, inputs)
            for at, x in enumerate(self.args)
            if at >= self.count and any(x is y for y in state)
        }
        self.call = Call(self.call.arguments, not_called, {}, forward_mode=self.call.forward_mode,
                         once_differentiable=self.call.once_differentiable)  # fmt: skip
        self.jaxpr = _without_constants(self.jaxpr)
        del self.args, self.rule
        return [*inputs, *(map(stop_gradient, captured) if is_in_rule() else captured)]

    def _refuse_undeclared(self, found: Sequence[Array], inputs: Sequence[Array]) -> None:
        """Raise the error for captured tensors that are differentiated and are no variables."""
        variables = self.call.captured_variables(found, inputs)
        self.call.require_variables(self.rule, variables)


def not_called(*_: Any) -> NoReturn:
    """Stand for an f that is traced already, or for a grad_fn without its residuals."""
    raise AssertionError


# --- Rules as jaxprs ------------------------------------------------------------------------------


def _traced_rule(
    rule: Rule, inputs: Sequence[Array], outputs: Sequence[Array], variables: Sequence[Array]
) -> tuple[list[Array], Any, Any]:
    """Return the tensors that a rule and its jvp_fn read, ``pull`` and ``push``."""
    types, input_types = [*map(typeof, outputs)], [*map(typeof, inputs)]

    def gradients(*upstreams: Array) -> list[Array | None]:
        return pull_by(rule, inputs, upstreams, variables)

    def tangents(*of_inputs: Array) -> list[Array]:
        return push_by(rule, of_inputs, input_types, types)

    like = [y if is_differentiable(y) else zeros_of(y) for y in outputs]
    residuals, pull = _traced(gradients, like, 0)
    if rule.jvp_fn is None:
        return residuals, pull, None
    op, (others, pushed) = rule.arguments.op, _traced(tangents, inputs, len(residuals))

    def push(needed: Any, read: Any, tangents: Sequence[Array | None]) -> list[Array]:
        if any(needed[len(input_types) :]):
            refuse_captured_tangent(op)
        given = zip(tangents, input_types, strict=False)
        return pushed(needed, read, [zeros_of(k) if t is None else t for t, k in given])  # type: ignore[no-any-return]

    return residuals + others, pull, push


def _traced(
    function: Callable[..., Sequence[Array | None]], like: Sequence[Array], start: int
) -> tuple[list[Array], Any]:
    """Return the tensors that a function reads, and the function of ``(needed, read, vectors)``.

    The tensors begin at start in read. An error that the author raises, or that tracing raises, is
    raised when the function runs.
    """
    try:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*like)
    except Exception as error:  # noqa: BLE001  # to raise may be the author's way to forbid it
        return [], partial(_raise, error.with_traceback(None))
    jaxpr, structure, end = (
        _without_constants(closed.jaxpr), jax.tree.structure(shapes), start + len(closed.consts),
    )  # fmt: skip
    return closed.consts, lambda _, read, vectors: jax.tree.unflatten(
        structure, eval_jaxpr(jaxpr, read[start:end], *vectors)
    )


def _without_constants(jaxpr: Any) -> Any:
    """Return a jaxpr without its constants, which are tracers; it keeps them from JAX 0.12 on."""
    return jaxpr.with_consts([]) if hasattr(jaxpr, "with_consts") else jaxpr


def _raise(error: Exception, *_: Any) -> NoReturn:
    raise error
