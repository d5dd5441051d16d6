"""Calls with values that are known below the derivatives: f runs on the tensors below the innermost
derivative.

So Python may branch on them. Under one derivative in reverse mode they are values, and the backward
pass calls the very function that f returned: nothing is traced or replaced. Under several
derivatives, a vmap, or forward mode, the rule is traced when f has run, and all derivatives use the
same jaxpr.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cgshim.backend import (
    Call,
    Mapped,
    Rule,
    RuleScope,
    TransformationError,
    objects_held,
    place_of,
    subvals,
)
from cgshim_jax._graph import depends_only_on
from cgshim_jax._linearity import calls
from cgshim_jax._primitives import Linear, Op, without_derivative, without_f
from cgshim_jax._rules import as_tensor, is_differentiable, is_tensor, message_of, of_tangents
from cgshim_jax._run import (
    TracedRule,
    is_raised_by_jax,
    trace_rule,
    traced,
    watched,
    written,
)
from cgshim_jax._tracing import (
    Array,
    Surroundings,
    holds_constants,
    is_differentiated,
    is_tracer,
    perturbed_by_each_derivative,
    reads_a_value,
    value_below_derivatives,
)

_OPAQUE = (NotImplementedError, TransformationError, ValueError)
"""what JAX raises for an operation that has no derivative"""
_DEPTH = 10
"""at which the parameters of a Flax module in a module lie, in a variable of a function"""
_MOST = 1000
"""of how many items a container may be to be looked into in each call: a vocabulary of 100,000 took 200 ms"""


class NotAsWrittenError(Exception):
    """f reads a tensor that is being differentiated, and that is none of its arguments."""


def closes_over_differentiated(call: Call, inputs: Sequence[Array]) -> bool:
    """Return True if f takes, or holds, a tracer that is differentiated, and that is none of the
    inputs: as a variable, or in a Flax module.

    One that is an input too lies where f's arguments come from, as in a circuit with these
    parameters: f has no need to read it there. In a long container none is looked for: what f reads
    is seen where it has run, too.
    """
    known = {id(x) for x in inputs}
    return any(
        is_differentiated(x) and id(x) not in known for x in _held_by(call, is_tensor, _MOST)
    )


def _held_by(call: Call, is_wanted: Callable[[Any], bool], most: float = math.inf) -> Iterator[Any]:
    """Yield f, its static arguments and its options, and all that these hold of what is wanted."""
    for each in (call.f, *call.static):
        yield each
        yield from objects_held(each, is_wanted, _DEPTH, most)


class Written(Op):
    """A call whose f is a function of Python."""

    def __init__(self, call: Call, inputs: Sequence[Array], around: Surroundings) -> None:
        self.call = call
        self.inputs = inputs
        self.mapped = call.f if isinstance(call.f, Mapped) else None
        self.places = [i for i, x in enumerate(inputs) if self.mapped or is_tracer(x)]
        self.around = around
        self.asked = perturbed_by_each_derivative([inputs[i] for i in self.places])
        """for which of the tracers the derivatives ask, where a traced rule wants to know"""
        if self.mapped is not None:
            self.of_batch, self.in_batch = self.mapped.run, self.mapped.in_batch

    def output(self) -> Any:
        """Return the output, with the rule for its derivative."""
        arguments = [self.inputs[i] for i in self.places]
        # a staged program holds this call: it would keep the tracers of the program alive
        self.inputs = subvals(self.inputs, self.places, [None for _ in self.places])
        outputs = self(arguments)
        return outputs if self.mapped else self.spec.combine(outputs)

    def primal(self, arguments: Sequence[Array]) -> Sequence[Array]:
        if self.of_batch is not None:
            return self.of_batch(None, [False for _ in arguments], *arguments)[0]
        outputs, rule = self.call(subvals(self.inputs, self.places, arguments))
        self.spec = rule.output
        return outputs

    def forward(
        self, arguments: Sequence[Array]
    ) -> tuple[Sequence[Array], Sequence[Array], Linear]:
        inputs = subvals(self.inputs, self.places, [*map(as_tensor, arguments)])
        if self.around is Surroundings.ONE_GRADIENT:  # the rule is called where that is taken
            outputs, rule = self._of_run(inputs)
            if rule.jvp_fn is None and self.call.forward_mode:  # jax.linearize transposes it
                return self._traced(rule, inputs, outputs, None)
            return outputs, [], written(self.call, rule, inputs, outputs, self.places)
        reads: list[_Arrays] = []
        try:
            outputs, rule = _running.run(reads, self._of_run, inputs)
            before = reads[0] if reads else None
        except Exception as error:
            values = [value_below_derivatives(x) for x in inputs]
            if (
                reads_a_value(error)
                and any(map(is_tracer, inputs))
                and not any(x is None for x in values)
            ):  # Python or NumPy reads what is differentiated: then on values
                inputs, before = [*map(as_tensor, values)], _Arrays()
                outputs, rule = self._of_run(inputs)
            elif (
                isinstance(error, _OPAQUE)
                and any(map(is_differentiated, inputs))
                and is_raised_by_jax(error)
            ):  # JAX cannot differentiate what f does: staged, it need not
                raise NotAsWrittenError from None
            else:
                raise
        is_first_order = self.around is Surroundings.ONE_DERIVATIVE
        if is_first_order and rule.is_transpose and not self.call.once_differentiable:
            return outputs, [], written(self.call, rule, inputs, outputs, self.places)
        return self._traced(rule, inputs, outputs, before)

    def _of_run(self, inputs: Sequence[Array]) -> tuple[list[Array], Rule]:
        outputs, rule = self.call(inputs)
        self.spec = rule.output
        return outputs, of_tangents(self.call, rule)

    def _traced(
        self, rule: Rule, inputs: Sequence[Array], outputs: list[Array], before: _Arrays | None
    ) -> tuple[list[Array], list[Array], Linear]:
        """Return what the run leaves; if f ran on values, `before` are the arrays that were alive
        before that.
        """
        call, after = without_f(self.call), None if before is None else _Arrays()
        arguments = [inputs[i] for i in self.places]
        constants = {id(x) for x in inputs}.difference(map(id, arguments))
        # an argument that f returns stays that argument to the rule
        outputs = [jnp.copy(y) if id(y) in constants else y for y in outputs]
        known = [*arguments, *outputs]
        trace = functools.partial(
            trace_rule, rule, inputs, outputs, known, places=self.places, choices=self.asked,
            runs_eagerly=True,
        )  # fmt: skip
        is_pushed = rule.is_transpose and not call.once_differentiable
        rules, forwards = trace(is_pushed=is_pushed)
        first = (rules or forwards)[None]
        refusal = self._refusal(rule, first, before, after)
        if is_pushed and (refusal or first.needs_values):
            rules, forwards = trace(is_pushed=False)
            first = rules[None]
        if first.needs_values:
            residuals: list[Array] = []
            refusal = "" if before is None else _unconnected(self.call, arguments[0])
            linear = watched(
                call, rule, inputs, outputs, self.places, lambda x: _unconnected(self.call, x)
            )
        else:
            if first.error is None and holds_constants(
                first.jaxpr, {id(x) for x in (*arguments, *outputs)}
            ):
                raise NotAsWrittenError
            gradient_of = [i if is_differentiable(inputs[i]) else None for i in self.places]
            residuals, linear_of = traced(call, rules, arguments, outputs, forwards)
            # the rule is a jaxpr: only the host keeps something as long as grad_fn lives
            is_on_host = first.error is None and calls(first.jaxpr.jaxpr, _calls_host)
            owner = rule.grad_fn if is_on_host else None
            linear = dataclasses.replace(linear_of(gradient_of), owner=owner)
        for x in (*outputs, *residuals):
            if is_differentiated(x) and not depends_only_on(x, arguments):
                raise NotAsWrittenError
        return outputs, residuals, _refusing(linear, refusal, len(arguments)) if refusal else linear

    def _refusal(
        self, rule: Rule, traced: TracedRule, before: _Arrays | None, after: _Arrays | None
    ) -> str:
        """Return why the gradient may not be differentiated: it reads what f made where JAX did not
        see.
        """
        if before is None or after is None:
            return ""
        unknown = [
            c for c in traced.constants
            if is_tensor(c) and is_differentiable(c) and c in after and c not in before
        ]  # fmt: skip
        before_f = {_key(x) for x in _held_by(self.call, _is_number)}
        unknown += [
            x for x in objects_held(rule.grad_fn, _is_number, _DEPTH) if _key(x) not in before_f
        ]
        return _unconnected(self.call, unknown[0]) if unknown else ""


def _refusing(linear: Linear, refusal: str, arguments: int) -> Linear:
    """Return the same map whose gradients and tangents may not be differentiated by its arguments."""
    read = len(linear.reads)

    def refusing(function: Callable[..., Sequence[Array | None]]) -> Callable[..., Any]:
        def values(
            residuals: list[Array], moving: list[Array], picked: Sequence[int]
        ) -> Sequence[Array | None]:
            made = function(residuals[:read], moving, picked)
            return without_derivative(linear.call, made, residuals[read:], refusal)

        return values

    return dataclasses.replace(
        linear, rule=refusing(linear.rule), push=linear.push and refusing(linear.push),
        reads=[*linear.reads, *range(arguments)],
    )  # fmt: skip


def _calls_host(eqn: Any) -> bool:
    """Return True for a function on the host, and for an op whose f calls one."""
    f = getattr(eqn.params.get("op"), "f", None)
    return eqn.primitive.name == "cgshim_host" or (f is not None and calls(f.jaxpr, _calls_host))


def _unconnected(call: Call, x: Any) -> str:
    """Return the words for a tensor or number of which nobody knows how f made it."""
    place = place_of(x)
    why = "f made of values that Python read" + (f" (it is kept as {place})" if place else "")
    return message_of(lambda x: call.refuse_unconnected(x, why), x)


_running: RuleScope[list[_Arrays]] = RuleScope("cgshim_jax_reads")
"""the arrays that were alive before the running f first read the value of one that is
differentiated; empty if it has read none"""


def note_read(x: Array) -> None:
    """Note that f reads a value now, if it does: what it makes of it will not be connected."""
    reads = _running.current
    if reads is not None and not reads and is_differentiated(x):
        reads.append(_Arrays())


def _is_number(x: Any) -> bool:
    return isinstance(x, (float, complex, np.ndarray, np.inexact)) and np.issubdtype(
        np.result_type(x), np.inexact
    )


def _key(x: Any) -> Any:
    return x if isinstance(x, (float, complex)) else id(x)


class _Arrays:
    """The arrays that are alive now, held weakly."""

    def __init__(self) -> None:
        self._arrays = {id(x): weakref.ref(x) for x in jax.live_arrays()}

    def __contains__(self, x: Array) -> bool:
        reference = self._arrays.get(id(x))
        return reference is not None and reference() is x
