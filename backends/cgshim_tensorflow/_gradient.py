"""The gradient of one run of f: its rule, as tapes and graphs call it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import tensorflow as tf

from cgshim.backend import Residuals, refuse_hidden, refuse_host_derivative
from cgshim_tensorflow._captured import RunOfF
from cgshim_tensorflow._fits import Fit, Name, fit_of, fit_of_dense
from cgshim_tensorflow._forward import ACCUMULATOR, Transposition, transposition
from cgshim_tensorflow._origins import Differentiated, Following, Origins, in_this_graph, needed_among, running_rule
from cgshim_tensorflow._private import check_numerics_callback, pack_tangents, record, shape_of_eager
from cgshim_tensorflow._rule import attach_gradient, stand_in_for, without_derivative
from cgshim_tensorflow._traceable import reads_no_values
from cgshim_tensorflow._values import (
    detached,
    is_composite,
    is_differentiable,
    is_eager,
    parts_of,
    values_of,
    with_values,
)

if TYPE_CHECKING:
    from cgshim.backend import Call, Rule

Tensor = Any


def attach_rule(
    call: Call,
    run: RunOfF,
    inputs: Sequence[Tensor],
    sources: Sequence[Tensor],
    convert: Callable[[Any], Any],
) -> list[Tensor]:
    """Return f's outputs, with f's rule, converted, as their gradient with respect to the sources."""
    if not may_be_recorded():
        return [*map(detached, run.tensors)]
    values = [*map(values_of, run.tensors)]
    gradient = _Gradient(call, run, inputs, sources)
    if call.once_differentiable:
        gradient.has_no_derivative(sources)

    def make_gradient(attached: Sequence[Tensor]) -> _Gradient:
        rule = run.rule if call.once_differentiable else gradient.rule_around(attached, call, run, inputs)
        converted = convert(rule.grad_fn)
        gradient.rule = rule if converted is rule.grad_fn else rule.with_grad_fn(converted)
        run.origins.add(attached, sources)
        return gradient

    attached = attach_gradient(
        call, sources, values, make_gradient, functools.partial(gradient.transpose, sources, values)
    )
    return [*map(with_values, run.tensors, attached)]


def may_be_recorded() -> bool:
    """Return True if somebody may ask for a derivative of what is computed here."""
    return record.could_possibly_record() or not tf.executing_eagerly()


class _Gradient:
    """A function from an upstream gradient for each output's values, None if it was unused, to one for each source."""

    def __init__(self, call: Call, run: RunOfF, inputs: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self._call = call
        self._variables = run.variables
        self._unknown = run.unknown
        self._origins = run.origins
        self._constants = run.constants
        self._inputs = inputs if run.rule.needs_inputs else ()
        self._needed = needed_among(sources[: len(inputs)]) if run.rule.takes_needed else None
        self._fits = [*map(fit_of, inputs), *map(_fit_of_variable, run.variables, sources[len(inputs) :])]
        self._like = [*map(_Like, run.tensors)]
        self._stand_in: Tensor = None
        self._residuals: Residuals | None = None
        self._outputs: list[tuple[int | None, Tensor]] = []
        self.rule = run.rule

    def has_no_derivative(self, sources: Sequence[Tensor]) -> None:
        """Refuse from now on the derivative of the gradient."""
        self._stand_in = stand_in_for(self._call, sources, self._refuse_second_order)

    def rule_around(self, attached: Sequence[Tensor], call: Call, run: RunOfF, inputs: Sequence[Tensor]) -> Rule:
        """Return the rule around the op's outputs in the place of f's: their derivative is the rule's."""
        composite = [at for at, output in enumerate(run.outputs) if is_composite(output)]
        known = [*run.outputs, *[values_of(run.outputs[at]) for at in composite]]
        self._residuals = kept = Residuals(call, run.rule, call.backend.is_tensor, inputs, known)
        # Outputs of f may be hidden in objects, where nothing can replace them. A variable has no _id.
        names = [getattr(values_of(output), "_id", None) for output in run.outputs]
        self._outputs = list(zip(names, attached, strict=True))
        if not kept.outputs:
            return run.rule
        found = [*map(with_values, run.tensors, attached), *[attached[at] for at in composite]]
        return kept.around(inputs, found, kept.others)

    def _hidden(self) -> list[tuple[Tensor, Tensor]]:
        """Return the outputs of f that the rule holds in objects, which cannot be replaced, and those of the op."""
        hidden = self._residuals.hidden() if self._residuals else []
        tensors = [tensor for tensor in hidden if not isinstance(tensor, tf.Variable)]
        inside = {part._id: tensor for tensor in tensors for part in parts_of([tensor])}
        return [(inside[name], attached) for name, attached in self._outputs if name in inside]

    def __call__(self, *upstreams: Tensor | None) -> Sequence[Tensor | None]:
        given = [like.upstream(upstream) for like, upstream in zip(self._like, upstreams, strict=True)]
        observing = transposition()
        if observing is None:
            self._refuse_constants(beside=0)
        if observing is not None and not (observing.is_of_function and self._has_no_derivative()):
            given = in_this_graph(given)
            return [*observing.observe(self._call, self._apply, given), *self._of_unknown(*given)]
        if self._stand_in is not None:
            gradients = self._without_derivative([self._stand_in], given, self._refuse_second_order)
            return [*gradients, *self._of_unknown()]
        hidden = self._hidden() if may_be_recorded() else []
        if hidden:
            tensor, _ = hidden[0]
            refuse = functools.partial(refuse_hidden, self._call, tensor)
            return [*self._without_derivative([at for _, at in hidden], given, refuse), *self._of_unknown()]
        return [*self._apply(*given), *self._of_unknown()]

    def _has_no_derivative(self) -> bool:
        return self._stand_in is not None or bool(self._hidden())

    def _apply(self, *upstreams: Tensor) -> list[Tensor | None]:
        """Return the gradients of the inputs and of the variables, by the rule."""
        return self._apply_rule(self.rule, self._inputs, upstreams)

    def _apply_rule(self, rule: Rule, inputs: Sequence[Tensor], upstreams: Sequence[Tensor]) -> list[Tensor | None]:
        given = [like.around(upstream) for like, upstream in zip(self._like, upstreams, strict=True)]
        origins = Origins(self._origins, self._call)
        follows = record.could_possibly_record() and tf.executing_eagerly()
        with Following(origins) if follows else _NOT_FOLLOWING, Differentiated(upstreams):
            gradients, of_variables = running_rule.run(origins, rule, inputs, given, self._variables, self._needed)
        return [
            gradient if fit is None and is_eager(gradient) else self._fitting(rule, at, gradient)
            for at, (fit, gradient) in enumerate(zip(self._fits, [*gradients, *of_variables], strict=True))
        ]

    def _fitting(self, rule: Rule, at: int, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient of the input or the variable at this place, checked to fit."""
        variable = at - len(rule.shapes)
        if variable < 0:
            name: Name = functools.partial(self._call.arguments.path, at)
            shape, dtype = rule.shapes[at], rule.dtypes[at]
        else:
            name = f"variables[{variable}]".format
            shape, dtype = self._variables[variable].shape, self._variables[variable].dtype
        fit = self._fits[at] or fit_of_dense(shape, dtype)
        return fit.values(gradient, self._call.name, name)

    def _of_unknown(self, *upstreams: Tensor) -> list[Tensor]:
        """Return NaN for captured tensors of a graph: whether one is differentiated is known when it is too late.

        An accumulator transposes what depends on upstream: so the NaN reaches what has a tangent, and nothing else.
        """
        if not self._unknown:
            return []
        alarms = [tf.fill(tf.shape(x), tf.constant(_alarm(x.dtype), x.dtype)) for x in self._unknown]
        totals = [tf.reduce_sum(upstream) for upstream in upstreams if is_differentiable(upstream)]
        if not totals:
            return alarms
        return [tf.math.multiply_no_nan(alarm, tf.cast(totals[0], alarm.dtype)) for alarm in alarms]

    # --- Without a derivative ---------------------------------------------------------------------------------------

    def _without_derivative(
        self, sources: Sequence[Tensor], upstreams: Sequence[Tensor], refuse: Callable[[], NoReturn]
    ) -> list[Tensor | None]:
        """Return the gradients without derivatives; who asks for one, upstreams included, gets the error."""
        if not may_be_recorded():
            return self._apply(*upstreams)
        gradients = self._apply(*map(detached, upstreams))
        return without_derivative(self._call, [*sources, *upstreams], gradients, refuse)

    def _refuse_second_order(self) -> NoReturn:
        self._call.refuse_second_order("a derivative of the gradient")

    # --- Forward mode -----------------------------------------------------------------------------------------------

    def transpose(self, sources: Sequence[Tensor], values: Sequence[Tensor], transpose: Callable[[], None]) -> None:
        """Let the accumulators transpose the rule, and refuse it if it is not linear."""
        call = self._call
        if self._stand_in is not None:
            several = sum(map(bool, pack_tangents(sources).indices)) > 1
            if several or record.should_record_backprop(sources):
                self._refuse_second_order()
        self._refuse_constants(beside=1)  # the accumulator whose tangents these are
        transposition = Transposition()
        with transposition.going_on():
            transpose()
        transposition.refuse_what_is_not_linear()
        if not call.forward_mode and tf.executing_eagerly() and not self._reads_no_values(values):
            call.refuse_forward_mode(ACCUMULATOR)

    def _refuse_constants(self, beside: int) -> None:
        """Raise an error if a tangent is missing in what the rule keeps, for more accumulators than those `beside`."""
        if not (self._constants and self._residuals):
            return
        kept = [*self._residuals.others, *self._residuals.hidden()]
        tensors = parts_of([x for x in kept if not isinstance(x, tf.Variable)])
        if sum(map(bool, pack_tangents(tensors).indices)) > beside:
            refuse_host_derivative(self._constants[0])

    def _reads_no_values(self, values: Sequence[Tensor]) -> bool:
        def apply(grad_fn: Callable[..., Any], inputs: Sequence[Tensor], *upstreams: Tensor) -> None:
            self._apply_rule(self.rule.with_grad_fn(grad_fn), inputs, upstreams)

        return reads_no_values(apply, self.rule.grad_fn, self._inputs, values, self._call.backend.is_tensor)


def _alarm(dtype: tf.DType) -> float:
    """Return the number that says that a gradient is not known."""
    if not hasattr(check_numerics_callback._state, "check_numerics_callback"):
        return float("nan")
    return float(dtype.real_dtype.max**0.75)  # if every NaN is an error, used or not: a number that no sum can hide


_NOT_FOLLOWING = contextlib.nullcontext()


def _fit_of_variable(variable: Tensor, value: Tensor) -> Fit | None:
    """Return what the gradient of a variable must look like. Its shape may change with its value."""
    return fit_of(value) or (None if variable.shape.is_fully_defined() else fit_of_dense(value.shape, value.dtype))


class _Like:
    """What is needed to make an output's upstream gradient. It does not keep a plain eager tensor alive."""

    def __init__(self, output: Tensor) -> None:
        values = values_of(output)
        self._dtype = values.dtype
        if is_eager(output):
            self._whole, self._shape = None, shape_of_eager(output)
        else:
            self._whole, self._shape = output, values.shape

    def upstream(self, upstream: Tensor | None) -> Tensor:
        """Return an upstream gradient of the output's values: zeros if it was not used, and never sparse."""
        if upstream is None:
            return tf.zeros(self._shape, self._dtype) if self._whole is None else tf.zeros_like(values_of(self._whole))
        return upstream if is_eager(upstream) and tf.executing_eagerly() else tf.convert_to_tensor(upstream)

    def around(self, values: Tensor) -> Tensor:
        """Return the upstream gradient as the rule expects it: structured as the output."""
        return values if self._whole is None else with_values(self._whole, values)
