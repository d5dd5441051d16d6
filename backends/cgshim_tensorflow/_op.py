"""The op: f's outputs as outputs of one operation that has the rule as its gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from cgshim.backend import (
    Call,
    Mapped,
    Rule,
    Tensor,
    TransformationError,
    closure_convert,
    is_differentiable,
    is_in_rule,
    refuse_captured_tangent,
    subvals,
    tensors_inside,
)
from cgshim_tensorflow._forward import check_linear, operation, state, with_state
from cgshim_tensorflow._private import converter, followers, is_recorded
from cgshim_tensorflow._tensors import (
    dense,
    fitting,
    in_this_graph,
    plain,
    values_of,
    with_values,
)
from cgshim_tensorflow._vectorized import mappable_operation


def run_op(call: Call, arguments: Sequence[Tensor]) -> Any:
    """Run f, and return its output with the rule as the gradient.

    The tapes around the op record f: so the residuals are functions of the inputs, and f runs once
    for all orders.
    """
    convert, inputs = converter(), [*map(plain, arguments)]
    call = call.with_f(convert(call.f))
    if not is_recorded():
        return call.output_of(inputs)
    if not tf.executing_eagerly():
        inputs = [*map(in_this_graph, inputs)]
    if call.takes_needs_input_grad:
        call = call.with_needs_input_grad(needed_among(inputs))
    seen = [*map(call.backend.stop_gradient, inputs)] if call.once_differentiable else inputs
    held = held_by_f(call)
    with tf.GradientTape() as tape:  # it reports the variables that f reads
        outputs, rule = call.read(with_state("inputs", seen, call.run_eagerly, seen), seen)
    captured = [*tape.watched_variables(), *filter(is_followed, held)]
    if is_in_rule():  # the derivatives by what it captures belong to the rule that is running
        variables = call.variables or (captured if rule.takes_variables else ())
        captures = [*map(call.backend.stop_gradient, map(plain, variables))]
    else:
        variables = call.captured_variables(captured, arguments)
        call.require_variables(rule, variables)
        known = set(map(id, [*arguments, *inputs, *captured]))
        captures = [*map(plain, [*variables, *(x for x in held if id(x) not in known)])]
    takes_needed = rule.takes_needs_input_grad or rule.jvp_fn is not None
    run = Run(
        call, rule, convert, inputs=seen, outputs=[*map(plain, outputs)], variables=variables,
        sources=[*map(values_of, [*inputs, *captures])], kept=outputs,
        needed=needed_among(inputs) if takes_needed else None,
    )  # fmt: skip
    return rule.output.combine(run.attached())


def needed_among(inputs: Sequence[Tensor]) -> list[bool] | None:
    """Return for each input if it is differentiated; None in a graph, which cannot tell."""
    return [*map(is_followed, inputs)] if tf.executing_eagerly() else None


def is_followed(x: Tensor) -> bool:
    # an accumulator in a graph follows another handle of a variable
    return followers([values_of(plain(x))]) > 0


def held_by_f(call: Call) -> list[Tensor]:
    """Return the float tensors that f captures.

    It runs before f, because f may keep its own results.
    """
    known = set(map(id, call.variables))
    held = tensors_inside([call.f, *call.static], call.backend.is_tensor)
    return [
        x
        for x in held
        if id(x) not in known
        and is_differentiable(x.dtype)
        and not (isinstance(x, tf.Variable) and x.trainable)  # a tape reports it
    ]


@dataclass(slots=True, eq=False)
class Run:
    """One run of f: its outputs, and the rule that it returned."""

    call: Call
    rule: Rule
    convert: Callable[[Callable[..., Any]], Callable[..., Any]]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    variables: Sequence[Tensor]
    needed: Sequence[bool] | None
    sources: Sequence[Tensor]
    """the tensors that the outputs are differentiated by: inputs, variables, and captured tensors
    that no tape watches; a tape around a graph may, and gets NaN
    """
    kept: Sequence[Tensor]
    """the outputs that the rule may close over: f's, and then the op's"""
    kept_in_object: Tensor | None = None
    """an output in an object in which the rule cannot get the op's output"""

    def attached(self) -> list[Tensor]:
        """Return the outputs as outputs of one operation of the sources."""
        values = [*map(values_of, self.outputs)]
        if isinstance(self.call.f, Mapped) and not tf.executing_eagerly():
            # a vectorized loop replaces the values by the results of the rule for batches
            own = [*tf.custom_gradient(lambda *_: (values, self.gradients))(*self.sources)]
            self.keep(own)
            return own
        attached, orders = mappable_operation(
            self.call, values, self.gradients, self.transposable_gradients,
            self.sources, self.keep,
        )  # fmt: skip
        if orders:
            self.check_forward_mode(orders)
        return [*map(with_values, self.outputs, attached)]

    def keep(self, attached: Sequence[Tensor]) -> None:
        """Rebuild the rule around the op's outputs."""
        own = [*map(with_values, self.outputs, attached)]
        arguments = {id(x) for x in self.inputs}
        pairs = [*zip(self.kept, own, strict=True)]
        pairs += [(values_of(y), values_of(op_y)) for y, op_y in pairs]
        others = {
            id(y): op_y
            for y, op_y in reversed(pairs)
            if is_differentiable(op_y.dtype) and id(y) not in arguments
        }
        converted = closure_convert(self.rule.grad_fn, self.call.backend, self.call.constants)
        if any(isinstance(x, tf.GradientTape) for x in converted.opaque):
            return  # it recorded f's outputs
        residuals = [others.get(id(x), x) for x in converted.residuals]
        self.rule = self.rule.with_grad_fn(converted.rebuild(residuals))
        self.kept = own
        hidden = tensors_inside(converted.opaque, self.call.backend.is_tensor)
        self.kept_in_object = next((x for x in hidden if id(x) in others), None)

    # --- Reverse mode -----------------------------------------------------------------------------

    def gradients(self, *upstreams: Tensor | None) -> Sequence[Tensor | None]:
        """Run the rule, and return a gradient for each of the sources."""
        full = [
            tf.zeros_like(y) if u is None else dense(u, y)
            for y, u in zip(map(values_of, self.outputs), upstreams, strict=True)
        ]
        structured = [*map(with_values, self.outputs, full)]
        if self.call.once_differentiable and state.transposed is None:
            # no outer tape keeps the rule's intermediates
            structured = [*map(self.call.backend.stop_gradient, structured)]
        rule = self.rule.with_grad_fn(self.convert(self.rule.grad_fn))
        of_inputs, of_variables = rule(self.inputs, structured, self.variables, self.needed)
        pairs = zip([*of_inputs, *of_variables], [*self.inputs, *self.variables], strict=True)
        gradients = [
            fitting(gradient, x, self.call.name, functools.partial(self.name_of, at))
            for at, (gradient, x) in enumerate(pairs)
        ]
        return [
            *self.with_checks(gradients, full),
            *[self.not_known(x, full) for x in self.sources[len(gradients) :]],
        ]

    def name_of(self, at: int) -> str:
        variable = at - len(self.inputs)
        return self.call.arguments.path(at) if variable < 0 else f"variables[{variable}]"

    def not_known(self, x: Tensor, upstreams: Sequence[Tensor]) -> Tensor:
        """Return NaN for the gradient of a captured tensor that only a tape around a graph watches.

        An accumulator transposes results that depend on upstream, and has zeros for all tensors
        that have no tangent.
        """
        nan = tf.fill(tf.shape(x), tf.constant(float("nan"), x.dtype))
        total = tf.add_n([tf.cast(tf.reduce_sum(u), x.dtype) for u in upstreams])
        return nan + tf.math.multiply_no_nan(nan, total)

    # --- Derivatives of the gradients -------------------------------------------------------------

    def with_checks(
        self, gradients: Sequence[Tensor | None], upstreams: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Return the gradients, with a check of their derivative where it may be wrong."""
        refuse = None if state.transposed else self.refusal()
        if refuse is None:
            return gradients
        present = [
            dense(g, x) for g, x in zip(gradients, self.sources, strict=False) if g is not None
        ]
        sources = [*present, *self.sources, *upstreams]
        others = [None] * (len(sources) - len(present))

        def derivative(*of_checked: Tensor | None) -> Sequence[Tensor | None]:
            refuse()
            return [*of_checked, *others]

        checked, _ = mappable_operation(self.call, present, derivative, derivative, sources)
        remaining = iter(checked)
        return [None if g is None else next(remaining) for g in gradients]

    def refusal(self) -> Callable[[], None] | None:
        """Return a function that raises for the gradients' derivative; None if they have one.

        It holds only what the error needs, because an outer tape keeps it.
        """
        if self.call.once_differentiable:
            return functools.partial(self.call.refuse_second_order, "a derivative of the gradient")
        if self.kept_in_object is not None:
            return functools.partial(
                self.call.refuse_unconnected,
                self.kept_in_object,
                "is an attribute of an object of f",
            )
        residual = self.unconnected_residual()
        return None if residual is None else functools.partial(self.require_traceable, residual)

    def unconnected_residual(self) -> Tensor | None:
        """Return a residual that f made and that is a constant, though an input is not one."""
        if not (tf.executing_eagerly() and any(map(is_followed, self.inputs))):
            return None
        known = {id(x) for x in [*self.inputs, *self.kept, *self.variables]}
        residuals, *_ = closure_convert(self.rule.grad_fn, self.call.backend, self.call.constants)
        made = [x for x in residuals if id(x) not in known and is_differentiable(x.dtype)]
        return next((x for x in made if not is_followed(x)), None)

    def require_traceable(self, residual: Tensor) -> None:
        """Raise an error if f reads the values of tensors in Python, or calls the host.

        A traceable f makes such a residual by operations whose derivative is zero, such as a
        comparison.
        """
        run = lambda *xs: self.call(xs)[0]
        try:
            is_opaque = with_state("inputs", None, calls_operation, "PyFunc", run, self.inputs)
        except TransformationError:
            raise
        except Exception:  # noqa: BLE001  # of TensorFlow or NumPy
            is_opaque = True
        if is_opaque:
            self.call.refuse_unconnected(residual, "f has made of the values of tensors")

    # --- Forward mode -----------------------------------------------------------------------------

    def transposable_gradients(self, *upstreams: Any) -> Sequence[Tensor | None]:
        """Return gradients whose derivative with respect to the upstreams is the tangent."""
        if self.rule.jvp_fn is not None:
            return self.zeros_with_tangents(upstreams)
        if not self.call.forward_mode:
            self.call.refuse_forward_mode("tf.autodiff.ForwardAccumulator")
        return [
            *map(
                dense, with_state("transposed", self.call, self.gradients, *upstreams), self.sources
            )
        ]

    def zeros_with_tangents(self, upstreams: Sequence[Tensor]) -> list[Tensor | None]:
        """Return zeros whose derivative with respect to the upstreams is the author's jvp_fn."""
        zeros = [*map(tf.zeros_like, self.sources[: len(self.inputs)])]
        floats = [
            at
            for at, zero in enumerate(zeros)
            if is_differentiable(zero.dtype) and (self.needed is None or self.needed[at])
        ]

        def jvp(*tangents: Tensor) -> list[Tensor]:
            full = subvals([None] * len(zeros), floats, tangents)
            outputs = self.with_checks(
                self.rule.tangents(full, upstreams, zeros.__getitem__), tangents
            )
            return [
                tf.zeros_like(u) if t is None else t
                for t, u in zip(outputs, upstreams, strict=True)
            ]

        pushed = operation(self.call.name, [zeros[at] for at in floats], jvp, upstreams)
        return subvals([None] * len(self.sources), floats, pushed)

    def check_forward_mode(self, orders: int) -> None:
        """Raise an error for a captured tensor with a tangent, and for a rule that is not linear."""
        if self.call.once_differentiable and followers(self.sources) > 1:
            self.call.refuse_second_order("a derivative of the tangent")
        if self.rule.jvp_fn is not None and followers(self.sources[len(self.inputs) :]):
            refuse_captured_tangent(self.call.name)
        if tf.executing_eagerly() and state.transposed is None and self.rule.jvp_fn is None:
            ones = [tf.ones_like(values_of(y)) for y in self.outputs]
            rule, refuse = self.of_constants(), self.call.refuse_nonlinear
            with_state("transposed", self.call, check_linear, rule, ones, refuse)
            if orders > 1 and calls_operation("PartitionedCall", rule, ones):
                # An accumulator that transposes a rule eagerly follows no function in it for an
                # outer accumulator (TensorFlow 2.21).
                self.call.refuse("forward mode over forward mode needs a rule without a function",
                                 "a tf.function in it",
                                 "call the op in a tf.function, or use reverse mode")  # fmt: skip

    def of_constants(self) -> Callable[..., Sequence[Tensor]]:
        """Return the gradients as a function that no outer tape or accumulator follows."""
        stop = self.call.backend.stop_gradient
        residuals, rebuild, _ = closure_convert(self.rule.grad_fn, self.call.backend)
        rule = self.rule.with_grad_fn(rebuild([*map(stop, residuals)]))
        inputs, variables = [*map(stop, self.inputs)], [*map(stop, self.variables)]
        sources = self.sources[: len(inputs) + len(variables)]
        run = replace(self, rule=rule, inputs=inputs, variables=variables, sources=sources)
        return lambda *upstreams: [
            tf.zeros_like(x) if g is None else dense(g, x)
            for g, x in zip(run.gradients(*upstreams), sources, strict=True)
        ]


def calls_operation(
    kind: str, function: Callable[..., Sequence[Tensor]], arguments: Sequence[Tensor]
) -> bool:
    """Return True if a function of tensors like these adds such an operation to a graph."""
    specs = map(tf.type_spec_from_value, arguments)
    traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    return any(kind in operation.type for operation in traced.graph.get_operations())
