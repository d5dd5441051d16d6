"""The op: f's outputs as those of one operation that has the rule as its gradient."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
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
from cgshim_tensorflow._forward import attach, call_in_transposition, has_tangent, operation
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
    if call.once_differentiable:
        seen_by_f = [with_values(x, tf.stop_gradient(values_of(x))) for x in inputs]
    else:
        seen_by_f = inputs
    with tf.GradientTape() as tape:  # it reports which variables f reads
        outputs, rule = call(seen_by_f)
    variables, sources = call.variables, [*map(plain, call.variables)]
    unknown: Sequence[Tensor] = ()
    if is_in_rule():
        sources = [*map(tf.stop_gradient, sources)]
    else:
        captured, unknown = captured_by_f(call, tape.watched_variables(), [*arguments, *inputs])
        variables = call.captured_variables(captured, arguments)
        sources = [*map(plain, variables)]
    call.require_variables(rule, variables)
    needed = needed_among(inputs) if rule.takes_needs_input_grad else None
    run = Run(call, rule, seen_by_f, [*map(plain, outputs)], variables, unknown, needed, outputs)
    return rule.output.combine(run.attached([*map(values_of, inputs), *sources, *unknown]))


def needed_among(inputs: Sequence[Tensor]) -> list[bool] | None:
    """Return for each input if it is differentiated; None in a graph, whose caller may do that."""
    if not tf.executing_eagerly():
        return None
    return [is_watched(x) or has_tangent(x) for x in map(values_of, inputs)]


def captured_by_f(
    call: Call, read: Sequence[Tensor], given: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the captured tensors that are differentiated, and those that may be.

    The trainable variables that f has read are differentiated. The second list is of tensors of a
    graph: a tape around the graph cannot be seen while it is traced.
    """
    known = {id(x) for x in [*given, *read, *call.variables]}
    held = tensors_inside([call.f, *call.static], _is_plain)
    held = [x for x in held if id(x) not in known and is_differentiable(x.dtype)]
    watched = [x for x in held if is_watched(x)]
    if tf.executing_eagerly():
        return [*read, *watched], []
    return [*read, *watched], [*map(plain, [x for x in held if not is_watched(x)])]


def _is_plain(x: object) -> bool:
    return isinstance(x, (tf.Tensor, tf.Variable))


@dataclass(slots=True, eq=False)
class Run:
    """One run of f: its outputs, and the rule that it returned."""

    call: Call
    rule: Rule
    inputs: Sequence[Tensor]
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
        attached, orders = attach(self.call, self.rule, pullback, values, sources)
        self.keep(attached)
        for _ in range(orders):
            attached, _ = attach(self.call, self.rule, pullback, values, sources)
            self.keep(attached)
        if not (isinstance(self.call.f, Mapped) or tf.executing_eagerly()):
            register(pullback, attached)
        return [*map(with_values, self.outputs, attached)]

    def keep(self, attached: Sequence[Tensor]) -> None:
        """Rebuild the rule around the op's outputs."""
        own = [*map(with_values, self.outputs, attached)]
        arguments = {id(x) for x in self.inputs}
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
        full = [
            tf.zeros_like(y) if u is None else dense(u)
            for y, u in zip(map(values_of, self.outputs), upstreams, strict=True)
        ]
        if self.call.once_differentiable or self.kept_in_object is not None:
            gradients = self.without_derivative(sources, full)
        else:
            gradients = self.gradients_by_rule(full)
        return [*gradients, *[self.not_known(x, full) for x in self.unknown]]

    def gradients_by_rule(self, upstreams: Sequence[Tensor]) -> list[Tensor | None]:
        structured = [*map(with_values, self.outputs, upstreams)]
        of_inputs, of_variables = self.rule(self.inputs, structured, self.variables, self.needed)
        pairs = zip([*of_inputs, *of_variables], [*self.inputs, *self.variables], strict=True)
        return [
            fitting(gradient, x, self.call.name, functools.partial(self.name_of, at))
            for at, (gradient, x) in enumerate(pairs)
        ]

    def name_of(self, at: int) -> str:
        variable = at - len(self.inputs)
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
