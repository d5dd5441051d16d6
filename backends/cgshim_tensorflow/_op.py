"""The op: f's outputs as those of one operation that has the rule as its gradient."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import tensorflow as tf

from cgshim.backend import (
    Call,
    Mapped,
    Rule,
    Tensor,
    closure_convert,
    is_differentiable,
    is_in_rule,
    tensors_inside,
)
from cgshim_tensorflow._forward import (
    Pullback,
    RunningF,
    attach,
    call_in_transposition,
    check_linear,
    count_accumulators,
    operation,
)
from cgshim_tensorflow._private import is_recorded, is_watched
from cgshim_tensorflow._tensors import dense, fitting, plain, values_of, with_values
from cgshim_tensorflow._vectorized import register


def run_op(call: Call, arguments: Sequence[Tensor]) -> Any:
    """Run f, and return its output with the rule as the gradient.

    The tapes around the op record f: so the residuals are functions of the inputs, and f runs once
    for all orders.
    """
    inputs = [*map(plain, arguments)]
    if not is_recorded():
        return call.output_of(inputs)
    if call.takes_needs_input_grad:
        call = call.with_needs_input_grad(needed_among(inputs))
    seen_by_f = inputs
    if call.once_differentiable:
        seen_by_f = [with_values(x, tf.stop_gradient(values_of(x))) for x in inputs]
    f = RunningF(seen_by_f)
    is_inner = is_in_rule()
    held = [] if is_inner else held_by_f(call, [*arguments, *inputs])
    with tf.GradientTape() as tape:  # it reports which variables f reads
        outputs, rule = f.run(call)
    captured = [] if is_inner else [*tape.watched_variables(), *filter(is_watched, held)]
    variables = call.captured_variables(captured, arguments)
    call.require_variables(rule, variables)
    sources = [*map(plain, variables)]
    if is_inner:  # the rule that runs has the derivatives by what the op captures
        sources = [*map(tf.stop_gradient, sources)]
    unknown = [] if tf.executing_eagerly() else [x for x in held if not is_watched(x)]
    needed = needed_among(inputs) if rule.takes_needs_input_grad else None
    run = Run(call, rule, f, [*map(plain, outputs)], variables, unknown, needed, outputs)
    return rule.output.combine(
        run.attached([*map(values_of, inputs), *sources, *map(plain, unknown)])
    )


def needed_among(inputs: Sequence[Tensor]) -> list[bool] | None:
    """Return for each input if it is differentiated; None in a graph, whose caller may do that."""
    if not tf.executing_eagerly():
        return None
    return [is_watched(x) or count_accumulators([x]) > 0 for x in map(values_of, inputs)]


def held_by_f(call: Call, given: Sequence[Tensor]) -> list[Tensor]:
    """Return the float tensors that f may read without being given them.

    It is called before f runs: f may keep what it has made.
    """
    known = {id(x) for x in [*given, *call.variables]}
    held = tensors_inside([call.f, *call.static], _is_plain)
    return [
        x
        for x in held
        if id(x) not in known
        and is_differentiable(x.dtype)
        and not (isinstance(x, tf.Variable) and x.trainable)  # a tape reports it
    ]


def _is_plain(x: object) -> bool:
    return isinstance(x, (tf.Tensor, tf.Variable))


@dataclass(slots=True, eq=False)
class Run:
    """One run of f: its outputs, and the rule that it returned."""

    call: Call
    rule: Rule
    f: RunningF
    outputs: Sequence[Tensor]
    variables: Sequence[Tensor]
    unknown: Sequence[Tensor]
    """captured tensors of a graph whose gradient nothing defines: it is NaN"""
    needed: Sequence[bool] | None
    kept: Sequence[Tensor]
    """the outputs that the rule may close over: those of f, and then those of the op"""
    kept_in_object: Tensor | None = None
    """an output in an object in which the rule cannot get the one of the op"""

    def attached(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs as those of one operation of the sources.

        A rule that closes over an output reads the op's own from then on. An accumulator has
        transposed the rule before: so the operation is made again for each order of forward mode.
        """
        pullback = functools.partial(self.gradients, sources)
        values = [*map(values_of, self.outputs)]
        attached, transpositions = attach(self.call, self.rule, pullback, values, sources)
        self.keep(attached)
        if transpositions and self.rule.jvp_fn is None and tf.executing_eagerly():
            check_linear(self.of_constants(), *transpositions[0], self.call.refuse_nonlinear)
        for _ in transpositions:
            attached, _ = attach(self.call, self.rule, pullback, values, sources)
            self.keep(attached)
        if not (isinstance(self.call.f, Mapped) or tf.executing_eagerly()):
            register(pullback, attached)
        return [*map(with_values, self.outputs, attached)]

    def keep(self, attached: Sequence[Tensor]) -> None:
        """Rebuild the rule around the op's outputs."""
        own = [*map(with_values, self.outputs, attached)]
        arguments = {id(x) for x in self.f.inputs}
        others = {
            id(y): op_y
            for y, op_y in reversed([*zip(self.kept, own, strict=True)])
            if is_differentiable(op_y.dtype) and id(y) not in arguments
        }
        converted = closure_convert(self.rule.grad_fn, self.call.backend, self.call.constants)
        if any(isinstance(x, tf.GradientTape) for x in converted.opaque):
            return  # it has recorded f's outputs
        residuals = [others.get(id(x), x) for x in converted.residuals]
        if any(x is not y for x, y in zip(residuals, converted.residuals, strict=True)):
            self.rule = self.rule.with_grad_fn(converted.rebuild(residuals))
            self.kept = own
        for x in tensors_inside(converted.opaque, _is_plain) if converted.opaque else ():
            if id(x) in others:
                self.kept_in_object = x

    def gradients(
        self, sources: Sequence[Tensor], *upstreams: Tensor | None
    ) -> Sequence[Tensor | None]:
        """Run the rule, and return a gradient for each of the sources."""
        if self.f.without_tangents and call_in_transposition() is None:
            self.require_tangents()
        full = [
            tf.zeros_like(y) if u is None else dense(u)
            for y, u in zip(map(values_of, self.outputs), upstreams, strict=True)
        ]
        if self.call.once_differentiable or self.kept_in_object is not None:
            gradients = self.without_derivative(sources, full)
        else:
            gradients = self.gradients_by_rule(full)
        return [*gradients, *[self.not_known(x, full) for x in self.unknown]]

    def of_constants(self) -> Pullback:
        """Return the gradients as a function that no outer tape or accumulator follows."""
        stop = self.call.backend.stop_gradient
        residuals, rebuild, _ = closure_convert(self.rule.grad_fn, self.call.backend)
        rule = self.rule.with_grad_fn(rebuild([*map(stop, residuals)]))
        f = RunningF([*map(stop, self.f.inputs)])
        variables = [*map(stop, self.variables)]
        run = replace(self, rule=rule, f=f, variables=variables)
        return functools.partial(run.gradients, [*f.inputs, *variables])

    def require_tangents(self) -> None:
        """Raise an error if an accumulator follows the rule and a residual has no tangent."""
        residuals, *_ = closure_convert(self.rule.grad_fn, self.call.backend)
        for x, refuse in self.f.without_tangents:
            if any(x is y for y in residuals) and count_accumulators(self.f.inputs):
                refuse()

    def gradients_by_rule(self, upstreams: Sequence[Tensor]) -> list[Tensor | None]:
        structured = [*map(with_values, self.outputs, upstreams)]
        of_inputs, of_variables = self.rule(self.f.inputs, structured, self.variables, self.needed)
        pairs = zip([*of_inputs, *of_variables], [*self.f.inputs, *self.variables], strict=True)
        return [
            fitting(gradient, x, self.call.name, functools.partial(self.name_of, at))
            for at, (gradient, x) in enumerate(pairs)
        ]

    def name_of(self, at: int) -> str:
        variable = at - len(self.f.inputs)
        return self.call.arguments.path(at) if variable < 0 else f"variables[{variable}]"

    def without_derivative(
        self, sources: Sequence[Tensor], upstreams: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return gradients whose derivative raises an error."""
        gradients = [*map(dense, self.gradients_by_rule([*map(tf.stop_gradient, upstreams)]))]
        present = [g for g in gradients if g is not None]
        if present:
            present = operation(self.call.name, present, self.refuse, [*sources, *upstreams])
        remaining = iter(present)
        return [None if g is None else next(remaining) for g in gradients]

    def refuse(self, *_: Any) -> NoReturn:
        if self.kept_in_object is not None:
            self.call.refuse_unconnected(self.kept_in_object, "is an attribute of an object of f")
        self.call.refuse_second_order("a derivative of the gradient")

    def not_known(self, x: Tensor, upstreams: Sequence[Tensor]) -> Tensor:
        """Return NaN for the gradient of a captured tensor that only a tape around a graph watches.

        An accumulator transposes what depends on upstream, and has zeros for all tensors that have
        no tangent.
        """
        nan = tf.fill(tf.shape(x), tf.constant(float("nan"), x.dtype))
        if call_in_transposition() is None:
            return nan
        total = tf.add_n([tf.cast(tf.reduce_sum(u), x.dtype) for u in upstreams])
        return tf.math.multiply_no_nan(nan, total)
