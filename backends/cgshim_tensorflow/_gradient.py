"""The gradient of one run of f: its rule, as tapes and graphs call it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import tensorflow as tf

from cgshim.backend import place_of
from cgshim_tensorflow._captured import RunOfF
from cgshim_tensorflow._fits import Fit, Name, fit_of, fit_of_dense
from cgshim_tensorflow._forward import ACCUMULATOR, Transposition, transposition
from cgshim_tensorflow._made import Reading
from cgshim_tensorflow._origins import Differentiated, Following, Origins, in_this_graph, needed_among, running_rule
from cgshim_tensorflow._outputs import EagerOutputs, GraphOutputs
from cgshim_tensorflow._private import (
    FuncGraph,
    check_numerics_callback,
    count_accumulators,
    dismantle_func_graph,
    pack_tangents,
    record,
    shape_of_eager,
)
from cgshim_tensorflow._rule import attach_gradient, stand_in_for, without_derivative
from cgshim_tensorflow._values import detached, is_differentiable, is_eager, values_of, with_values

if TYPE_CHECKING:
    from cgshim.backend import Call

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
    eager = tf.executing_eagerly()
    outputs = EagerOutputs(values, run.made) if eager else GraphOutputs(values, run.operations)
    gradient = _Gradient(call, run, inputs, sources, convert, outputs)
    if call.once_differentiable:
        gradient.has_no_derivative(sources)
    elif gradient.returns_variables or (eager and run.rule.output.converted):
        gradient.may_read_values(sources, values if eager else ())
    elif eager and run.made.may_hold_values:
        gradient.may_read_values(sources, ())

    def make_gradient(attached: Sequence[Tensor]) -> _Gradient:
        outputs.attach(attached)
        run.origins.add(attached, sources)
        return gradient

    forward = functools.partial(gradient.transpose, sources, values)
    attached = attach_gradient(call, sources, outputs.values, make_gradient, forward, outputs.attached)
    return [*map(with_values, run.tensors, attached)]


def may_be_recorded() -> bool:
    """Return True if somebody may ask for a derivative of what is computed here."""
    return record.could_possibly_record() or not tf.executing_eagerly()


class _Gradient:
    """A function from an upstream gradient for each output's values, None if it was unused, to one for each source."""

    def __init__(
        self, call: Call, run: RunOfF, inputs: Sequence[Tensor], sources: Sequence[Tensor],
        convert: Callable[[Any], Any], outputs: EagerOutputs | GraphOutputs,
    ) -> None:  # fmt: skip
        self._call = call
        self._variables = run.variables
        self._unknown = run.unknown
        self._origins = run.origins
        self._made = run.made
        self._inputs = inputs if run.rule.needs_inputs else ()
        self._needed = needed_among(sources[: len(inputs)]) if run.rule.takes_needed else None
        self._fits = [*map(fit_of, inputs), *map(_fit_of_variable, run.variables, sources[len(inputs) :])]
        self._like = [*map(_Like, run.tensors)]
        self._stand_in: Tensor = None
        self._stand_ins: Sequence[Tensor] = ()
        self._converted: Sequence[Tensor] = ()
        self._operations = run.operations
        self._tangents = run.tangents
        self._handles = {y.handle._id for y in run.outputs if hasattr(y, "handle")}
        self._outputs: Any = outputs
        converted = convert(run.rule.grad_fn)
        self.rule = run.rule if converted is run.rule.grad_fn else run.rule.with_grad_fn(converted)

    def has_no_derivative(self, sources: Sequence[Tensor]) -> None:
        """Refuse from now on the derivative of the gradient."""
        self._stand_in = stand_in_for(self._call, sources, self._refuse_second_order)

    @property
    def returns_variables(self) -> bool:
        """Whether a variable is among f's outputs."""
        return bool(self._handles)

    def may_read_values(self, sources: Sequence[Tensor], converted: Sequence[Tensor]) -> None:
        """Prepare to refuse the derivative of values: of what f made of them, and of outputs that are no tensors."""
        self._converted = converted
        self._stand_ins = [stand_in_for(self._call, sources, self._refuse_second_order)]

    def __call__(self, *upstreams: Tensor | None) -> Sequence[Tensor | None]:
        given = [like.upstream(upstream) for like, upstream in zip(self._like, upstreams, strict=True)]
        observing = transposition()
        if observing is not None and not (observing.is_of_function and self._stand_in is not None):
            given = in_this_graph(given)
            return [*observing.observe(self._call, self._transposed, given), *self._of_unknown(*given)]
        if self._stand_in is not None:
            return [*self._without_derivative(given), *self._of_unknown()]
        return [*self._apply(*given), *self._of_unknown()]

    def _transposed(self, *upstreams: Tensor) -> list[Tensor | None]:
        return self._apply(*upstreams, accumulators=1)

    def _apply(self, *upstreams: Tensor, accumulators: int = 0) -> list[Tensor | None]:
        """Return the gradients of the inputs and of the variables, by the rule.

        That many accumulators run it to transpose it, and do not follow it.
        """
        with Differentiated(upstreams):
            if not may_be_recorded():
                gradients = self._run(upstreams, Origins(self._origins, self._call))
            elif tf.executing_eagerly():
                gradients = self._run_eagerly(upstreams, accumulators)
            else:
                gradients = self._run_in_graph(upstreams, accumulators)
        return [
            gradient if fit is None and is_eager(gradient) else self._fitting(at, gradient)
            for at, (fit, gradient) in enumerate(zip(self._fits, gradients, strict=True))
        ]

    def _run(self, upstreams: Sequence[Tensor], origins: Origins) -> Sequence[Tensor | None]:
        """Run the rule: the very function that f returned."""
        given = [like.around(upstream) for like, upstream in zip(self._like, upstreams, strict=True)]
        gradients, of_variables = running_rule.run(
            origins, self.rule, self._inputs, given, self._variables, self._needed
        )
        return [*gradients, *of_variables]

    def _run_eagerly(self, upstreams: Sequence[Tensor], accumulators: int) -> Sequence[Tensor | None]:
        """Run the rule while somebody records it, and connect what it reads of f."""
        self._outputs.connect()
        if self._tangents:
            self._tangents.connect([y for y in self._made.alive() if y._id not in self._outputs.numbers])
        origins, reading = Origins(self._origins, self._call), Reading()

        def notice(op_type: str, inputs: Sequence[Tensor], attributes: Any, outputs: Sequence[Tensor]) -> None:
            origins.notice(op_type, inputs, attributes, outputs)
            reading.notice(op_type, inputs, attributes, outputs)

        with Following(notice):
            gradients = self._run(upstreams, origins)
        conflict = self._outputs.connect_read(reading, self._origins, count_accumulators() > accumulators)
        if conflict and self._is_followed(conflict[:1], accumulators):
            return self._without_derivative_of(conflict[1], _MADE_OF_AN_OUTPUT, conflict[0], gradients)
        return self._with_connected_alone([*reading.tensors.values()], gradients, accumulators)

    def _run_in_graph(self, upstreams: Sequence[Tensor], accumulators: int) -> Sequence[Tensor | None]:
        """Run the rule in a graph, and connect what it reads of f."""
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        self._outputs.connect()
        if self._tangents:
            made_by_f = [y for operation in self._operations for y in operation.outputs]
            self._tangents.connect([y for y in made_by_f if y._id not in self._outputs.numbers])
        with self._outputs.moving_edges():
            gradients = self._run(upstreams, Origins(self._origins, self._call))
        made = graph.get_operations()[before:]
        outer = {inner._id: outer for outer, inner in getattr(graph, "captures", ())}
        read = {x._id: outer.get(x._id, x) for operation in made for x in operation.inputs}
        conflict = self._outputs.conflict_in_graph(
            made, read.values(), self._origins, count_accumulators() > accumulators
        )
        if conflict is not None:
            gradients = self._without_derivative_of(conflict[1], _MADE_OF_AN_OUTPUT, conflict[0], gradients)
        elif self._tangents or self._stand_ins or self._outputs.with_tangents:
            gradients = self._with_connected_alone([*read.values()], gradients, accumulators)
        self._outputs.move_edges(graph, made)
        return gradients

    def _with_connected_alone(
        self, read: Sequence[Tensor], gradients: Sequence[Tensor | None], accumulators: int
    ) -> Sequence[Tensor | None]:
        """Return the gradients; their derivative is refused if the rule has read what nobody can connect."""
        if count_accumulators() > accumulators:
            self._refuse_tangents_of(read)
        if not self._stand_ins or self._stand_in is not None or not self._is_followed(self._stand_ins, accumulators):
            return gradients
        for tensor in read:
            why = self._why_unconnected(tensor)
            if why:
                return self._without_derivative_of(tensor, why, self._stand_ins[0], gradients)
        return gradients

    def _without_derivative_of(
        self, tensor: Tensor, why: str, source: Tensor, gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Return gradients whose derivative with respect to the source is refused, because of a tensor."""
        refuse = functools.partial(self._call.refuse_unconnected, tensor, why)
        return without_derivative(self._call, [source], gradients, refuse)

    def _refuse_tangents_of(self, read: Sequence[Tensor]) -> None:
        """Raise an error for a tensor whose tangent is not known, or f's where it is to be the rule's."""
        for tensor in read:
            if self._tangents and tensor._id in self._tangents.refused:
                raise self._tangents.refused[tensor._id]
            if tensor._id in self._outputs.with_tangents:
                self._call.refuse_unconnected(tensor, "has the tangent of what f has captured")

    def _why_unconnected(self, tensor: Tensor) -> str | None:
        """Return why nobody knows the derivative of a tensor that the rule has read; None if it is known."""
        if self._made.is_made_of_values(tensor):
            place = place_of(tensor)
            return "f made of values that Python read" + (f" (it is kept as {place})" if place else "")
        if tensor._id in self._handles:
            return "f returned in a variable"
        if tensor._id not in self._outputs.numbers and any(_equal(tensor, y) for y in self._converted):
            return "f returned as a NumPy array, or in a variable"
        return None

    def _is_followed(self, sources: Sequence[Tensor], accumulators: int) -> bool:
        tangents = sum(map(bool, pack_tangents(sources).indices))
        return record.should_record_backprop(sources) or tangents > accumulators

    def _fitting(self, at: int, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient of the input or the variable at this place, checked to fit."""
        rule = self.rule
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

    def _without_derivative(self, upstreams: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients without derivatives; who asks for one, upstreams included, gets the error."""
        if not may_be_recorded():
            return self._apply(*upstreams)
        gradients = self._apply(*map(detached, upstreams))
        return without_derivative(self._call, [self._stand_in, *upstreams], gradients, self._refuse_second_order)

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
        transposition = Transposition()
        with transposition.going_on():
            transpose()
        transposition.refuse_what_is_not_linear()
        if not call.forward_mode and tf.executing_eagerly() and not self._reads_no_values(values):
            call.refuse_forward_mode(ACCUMULATOR)

    def _reads_no_values(self, values: Sequence[Tensor]) -> bool:
        """Return True if the rule can be traced: it does not read upstream's values in Python, or on the host.

        TensorFlow tells of the operations of a rule, but not of what the rule reads in Python; a graph has no values.
        """
        graph = FuncGraph("cgshim_rule")
        try:
            with graph.as_default():
                upstreams = [tf.compat.v1.placeholder(x.dtype, x.shape) for x in values]
                self._run(upstreams, Origins(self._origins, self._call))
        except Exception:  # noqa: BLE001  # whatever a rule raises that wants a value where a graph has none
            return False
        finally:
            dismantle_func_graph(graph)
        return True


_MADE_OF_AN_OUTPUT = "f computed from an output that grad_fn reads too"


def _alarm(dtype: tf.DType) -> float:
    """Return the number that says that a gradient is not known."""
    if not hasattr(check_numerics_callback._state, "check_numerics_callback"):
        return float("nan")
    return float(dtype.real_dtype.max**0.75)  # if every NaN is an error, used or not: a number that no sum can hide


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(a.dtype == b.dtype and a.shape == b.shape and tf.reduce_all(a == b))


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
