"""Calls in jit, and derivatives of batches: f and its rule become jaxprs.

A jaxpr says how each tensor was made: the constants of the rule's jaxpr are its residuals, and the
constants of f's jaxpr are the tensors that f captures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import Literal
from jax.lax import stop_gradient

from cgshim.backend import Call, Rule, closure_convert, is_in_rule, subvals
from cgshim_jax._op import Run, once_differentiable_error, push_by
from cgshim_jax._tensors import (
    Array,
    conjugate,
    is_differentiable,
    is_tracer,
    typeof,
    varies_over,
    zeros_of,
)


class TracedOp:
    """A call as a jaxpr.

    Its args are the inputs at some indices, then the variables, then what else f and its rule
    capture.
    """

    is_traced = True

    def __init__(
        self, call: Call, inputs: Sequence[Array], at: Sequence[int], variables: Sequence[Array] = ()
    ) -> None:  # fmt: skip
        self.call, self.inputs, self.variables = call, inputs, variables
        found: Any = None

        def everything(*tracers: Array) -> tuple[list[Array], list[Array]]:
            nonlocal found
            full = subvals(inputs, at, tracers)
            outputs, rule = call(full)
            takes_any = rule.takes_variables or call.arguments.variables is not None
            found = rule, TracedRule(call, rule, full, outputs, variables if takes_any else ())
            return outputs, found[1].connect(tracers, outputs)

        closed = jax.make_jaxpr(everything)(*[inputs[i] for i in at])
        rule, self.rule = found
        empty = closure_convert(rule.grad_fn, call.backend)
        self.empty_rule = rule.with_grad_fn(empty.rebuild([None] * len(empty.residuals)))
        self.spec = rule.output
        self.jaxpr, self.outputs_end = closed.jaxpr, self.spec.count
        self.captured_at = [i for i, c in enumerate(closed.consts) if is_tracer(c)]
        captured = [closed.consts[i] for i in self.captured_at]
        self.constants = subvals(closed.consts, self.captured_at, [None] * len(captured))
        own = {id(x) for x in captured}
        self.captured = captured + [v for v in variables if is_tracer(v) and id(v) not in own]
        self.args = [*(inputs[i] for i in at), *self.captured]
        index = {id(v): len(inputs) + i for i, v in enumerate(variables)}
        of_captured = [index.get(id(x)) if self.takes_variables else None for x in self.captured]
        self.rule.finish([*at, *of_captured], len(self.jaxpr.outvars))
        self.untied = _untied(self.jaxpr, self.outputs_end, self.captured_at, len(self.captured))

    @property
    def takes_variables(self) -> bool:
        """True if grad_fn has a parameter for variables."""
        return bool(self.empty_rule.takes_variables)

    @property
    def takes_needs_input_grad(self) -> bool:
        """True if f, grad_fn or jvp_fn has a parameter for needs_input_grad."""
        rule = self.empty_rule
        in_rule = rule.takes_needs_input_grad or rule.jvp_takes_needs_input_grad
        return bool(self.call.takes_needs_input_grad or in_rule)

    @property
    def state(self) -> list[Array]:
        """The differentiable tensors that f captures, and does not only keep for its rule."""
        read = _variables_of(self.jaxpr.outvars[: self.outputs_end], self.jaxpr.eqns)
        variables = [self.jaxpr.constvars[i] for i in self.captured_at]
        return [
            x
            for x, v in zip(self.captured, variables, strict=False)
            if v in read and is_differentiable(x)
        ]

    def outputs(self, args: Sequence[Array]) -> list[Array]:
        """Return f's outputs for a call that nothing differentiates."""
        ends = self.jaxpr.outvars[: self.outputs_end]
        return self._tied(self._evaluate(args, [], ends, self.jaxpr.eqns), args)

    def run(self, args: Sequence[Array], needed: Sequence[bool]) -> Run:
        """Return the outputs as constants, and the residuals as functions of the args.

        So f's operations for the outputs may be opaque: a callback, a while loop.
        """
        ends, residual_ends = (
            self.jaxpr.outvars[: self.outputs_end],
            self.jaxpr.outvars[self.outputs_end :],
        )
        first = equations_for(residual_ends, self.jaxpr.eqns)
        own = {id(eqn) for eqn in first}
        rest = [eqn for eqn in self.jaxpr.eqns if id(eqn) not in own]
        read = {v for eqn in rest for v in _variables(eqn.invars)} | set(_variables(ends))
        shared = [v for eqn in first for v in eqn.outvars if v in read]
        known = self._evaluate(args, [], [*residual_ends, *shared], first)
        residuals, known = known[: len(residual_ends)], known[len(residual_ends) :]
        constants = [*map(stop_gradient, args)]
        outputs = self._evaluate([*constants, *map(stop_gradient, known)], shared, ends, rest)
        asked = tuple(needed) if self.takes_needs_input_grad else None
        return Run(self._tied(outputs, constants), residuals, self.rule, asked)

    def _evaluate(
        self, args: Sequence[Array], invars: Sequence[Any], outvars: Sequence[Any], eqns: Any
    ) -> list[Array]:
        """Evaluate some of the equations; the args may have values for invars after them."""
        jaxpr, count = self.jaxpr, len(self.jaxpr.invars)
        rest = args[count:]
        values = subvals(self.constants, self.captured_at, rest[: len(self.captured_at)])
        part = jaxpr.replace(invars=[*jaxpr.invars, *invars], outvars=[*outvars], eqns=[*eqns])
        more = rest[len(self.captured) :]
        return eval_jaxpr(part, values, *args[:count], *more)  # type: ignore[no-any-return]

    def _tied(self, outputs: Sequence[Array], args: Sequence[Array]) -> list[Array]:
        """Return the outputs, as functions of all args.

        A `jax.custom_vjp` counts the gradient of an output without the batch of a vmap once for
        each member of the batch. The outputs of both methods must have the same batches.
        """
        tied = list(outputs)
        for output, arg in self.untied:
            tied[output] = tie(tied[output], args[arg])
        return tied

    def check_captured(self, needed: Sequence[bool]) -> None:
        """Raise an error if a tensor is differentiated that f captures and is no variable."""
        flags = needed[len(self.jaxpr.invars) :]
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
    at = [i for i, x in enumerate(inputs) if is_tracer(x)]
    call = call.with_needs_input_grad([is_tracer(x) and is_differentiable(x) for x in inputs])
    variables = call.variables or [x for x in held if is_differentiable(x)]
    traced = TracedOp(call, inputs, at, variables)
    state = traced.state
    if traced.takes_variables and not call.variables and [*map(id, state)] != [*map(id, variables)]:
        traced = TracedOp(call, inputs, at, state)
    if is_in_rule():
        traced.args[len(at) :] = map(stop_gradient, traced.captured)
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

    def __call__(self, read: Sequence[Array], vectors: Sequence[Array]) -> list[Array | None]:
        if self.error is not None:
            raise self.error
        constants = subvals(self.constants, self.constants_at, [read[i] for i in self.reads])
        return subvals([None] * self.count, self.at, eval_jaxpr(self.jaxpr, constants, *vectors))

    def connect(self, index: dict[int, int]) -> None:
        """Replace the constants whose ids are in index: they will be read from there."""
        self.constants_at = [at for at, c in enumerate(self.constants) if id(c) in index]
        self.reads = [index[id(self.constants[at])] for at in self.constants_at]
        self.constants = subvals(self.constants, self.constants_at, [None] * len(self.reads))


class TracedRule:
    """A rule, and perhaps a jvp_fn, as jaxprs."""

    def __init__(
        self, call: Call, rule: Rule, inputs: Sequence[Array], outputs: Sequence[Array],
        variables: Sequence[Array],
    ) -> None:  # fmt: skip
        self.refusal = once_differentiable_error(call)
        self.has_jvp = rule.jvp_fn is not None
        self.floats = [at for at, y in enumerate(outputs) if is_differentiable(y)]
        self.float_inputs = [at for at, x in enumerate(inputs) if is_differentiable(x)]
        self.input_types = [*map(typeof, inputs)]

        def gradients(*of_floats: Array) -> list[Array | None]:
            upstreams = [y if is_differentiable(y) else zeros_of(y) for y in outputs]
            upstreams = subvals(upstreams, self.floats, [*map(conjugate, of_floats)])
            of_inputs, of_variables = rule(inputs, upstreams, variables)
            return [None if g is None else conjugate(g) for g in (*of_inputs, *of_variables)]

        def tangents(*of_floats: Array) -> list[Array]:
            full = subvals([None] * len(inputs), self.float_inputs, of_floats)
            return push_by(rule, full, inputs, outputs)

        self.pull = TracedMap(gradients, [outputs[at] for at in self.floats])
        self.maps = [self.pull]
        if self.has_jvp:
            self.maps.append(TracedMap(tangents, [inputs[at] for at in self.float_inputs]))

    def connect(self, args: Sequence[Array], outputs: Sequence[Array]) -> list[Array]:
        """Find where the tensors come from that the rule reads; return its residuals."""
        own = {id(x) for x in (*args, *outputs)}
        read = {id(c): c for each in self.maps for c in each.constants}
        residuals = [c for c in read.values() if id(c) not in own and is_tracer(c)]
        index = {id(x): at for at, x in reversed([*enumerate([*outputs, *residuals])])}
        index |= {id(x): len(outputs) + len(residuals) + at for at, x in enumerate(args)}
        found = [identity for identity in read if identity in index]
        self.reads = [index[identity] for identity in found]
        for each in self.maps:
            each.connect({identity: at for at, identity in enumerate(found)})
        return residuals

    def finish(self, gradient_of: Sequence[int | None], first_arg: int) -> None:
        """Let the rule return, for each of the args, the gradient at an index of all gradients."""
        self.gradient_of = gradient_of
        if self.refusal is not None:
            self.reads += range(first_arg, first_arg + len(gradient_of))

    def __call__(self, read: Sequence[Array], upstreams: Sequence[Array]) -> list[Array | None]:
        every = self.pull(read, [upstreams[at] for at in self.floats])
        return [None if at is None else every[at] for at in self.gradient_of]

    def push(self, read: Sequence[Array], tangents: Sequence[Array | None]) -> list[Array]:
        """Return the tangents of the outputs, by the author's jvp_fn."""
        own = {at: t for at, t in zip(self.gradient_of, tangents, strict=True) if t is not None}
        full = [
            own[at] if at in own else zeros_of(self.input_types[at]) for at in self.float_inputs
        ]
        return self.maps[1](read, full)


# --- Jaxprs ---------------------------------------------------------------------------------------


def equations_for(ends: Sequence[Any], equations: Sequence[Any]) -> list[Any]:
    """Return the equations that compute these variables."""
    needed = set(_variables(ends))
    computing = []
    for eqn in reversed(equations):
        if not needed.isdisjoint(eqn.outvars):
            computing.append(eqn)
            needed.update(_variables(eqn.invars))
    return computing[::-1]


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, Literal)]


def _variables_of(ends: Sequence[Any], equations: Sequence[Any]) -> set[Any]:
    """Return the variables that these variables depend on, with themselves."""
    inner = [v for eqn in equations_for(ends, equations) for v in _variables(eqn.invars)]
    return {*_variables(ends), *inner}


def _untied(
    jaxpr: Any, outputs_end: int, captured_at: Sequence[int], captured: int
) -> list[tuple[int, int]]:
    """Return the pairs of an output and an arg, of their indices, that do not depend on each other."""
    args = [*jaxpr.invars, *(jaxpr.constvars[i] for i in captured_at)]
    args += [None] * (captured - len(captured_at))
    pairs = []
    for output, end in enumerate(jaxpr.outvars[:outputs_end]):
        read = _variables_of([end], jaxpr.eqns)
        pairs += [(output, arg) for arg, v in enumerate(args) if v not in read]
    return pairs


def tie(y: Array, x: Array) -> Array:
    """Return y as a function of x, so that it has x's batch; it compiles to y."""
    if not all(isinstance(each.dtype, np.dtype) for each in (x, y)) or varies_over(typeof(x)):
        return y  # a key has no numbers, and y may be the same on all devices of a shard_map
    first = jnp.ravel(x)[0] if x.size else jnp.sum(x)
    like = jnp.broadcast_to(first.real.astype(y.dtype), y.shape)
    return jax.lax.select(jnp.zeros((), bool), like, y)
