"""The gradient of one run of f: its rule, over what tapes and graphs hand around."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import tensorflow as tf
from tensorflow.python.debug.lib import check_numerics_callback
from tensorflow.python.eager import record
from tensorflow.python.eager.forwardprop_util import pack_tangents

from cgshim._convention import input_name
from cgshim.backend import Residuals, refuse_hidden
from cgshim_tensorflow._captured import Run, running_rule
from cgshim_tensorflow._fits import Fit, Name, fit_of, fit_of_dense
from cgshim_tensorflow._forward import ACCUMULATOR, Transposition, transposition
from cgshim_tensorflow._origins import Origins, differentiated, in_this_graph, note
from cgshim_tensorflow._rule import attach, stand_in_for, without_derivative
from cgshim_tensorflow._traceable import reads_no_values
from cgshim_tensorflow._values import is_differentiable, is_eager, parts_of, values_of, with_values

if TYPE_CHECKING:
    from cgshim._call import Call
    from cgshim._convention import Rule

Tensor = Any


def attach_rule(
    call: Call,
    run: Run,
    inputs: Sequence[Tensor],
    sources: Sequence[Tensor],
    follow: Callable[[Any], Any],
) -> list[Tensor]:
    """f's outputs, with f's rule as their gradient with respect to the sources."""
    outputs = run.tensors
    values = [values_of(output) for output in outputs]
    gradient = _Gradient(call, run, inputs, outputs, sources)
    if call.once_differentiable:
        gradient.has_no_derivative(sources)

    def around(attached: Sequence[Tensor]) -> _Gradient:
        """The gradient, whose rule finds f's outputs as the op returns them: their derivative is the rule's."""
        rule = run.rule
        if may_be_recorded() and not call.once_differentiable:
            found = [with_values(output, value) for output, value in zip(outputs, attached, strict=True)]
            kept = Residuals(call, rule, call.backend.is_tensor, inputs, [*run.outputs, *map(values_of, run.outputs)])
            if kept.outputs:
                rule = kept.around(inputs, [*found, *attached], kept.others)
            gradient.keeps(kept, run.outputs, attached)
        gradient.rule = rule.with_grad_fn(follow(rule.grad_fn))
        note(attached, sources, run.origins)
        return gradient

    attached = attach(call, sources, values, around, functools.partial(gradient.transpose, sources, values))
    return [with_values(output, value) for output, value in zip(outputs, attached, strict=True)]


def may_be_recorded() -> bool:
    """Whether somebody may ask for a derivative of what is computed here."""
    return not tf.executing_eagerly() or record.could_possibly_record()


class _Gradient:
    """From one upstream gradient for each output's values, None where it was not used, to one for each source."""

    def __init__(
        self, call: Call, run: Run, inputs: Sequence[Tensor], outputs: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> None:
        self._call = call
        self._variables = run.variables
        self._unknown = run.unknown
        self._origins = run.origins
        self._inputs = inputs if run.rule.needs_inputs else ()
        self._fits = [*map(fit_of, inputs), *map(_fit_of_variable, run.variables, sources[len(inputs) :])]
        self._like = [_Like(output) for output in outputs]
        self._stand_in: Tensor = None
        self._hidden: Callable[[], list[tuple[Tensor, Tensor]]] = list
        self.rule = run.rule

    def has_no_derivative(self, sources: Sequence[Tensor]) -> None:
        """From now on, whoever asks for the derivative of the gradient is refused."""
        self._stand_in = stand_in_for(self._call, sources, self._refuse_second_order) if may_be_recorded() else ()

    def keeps(self, kept: Residuals, outputs: Sequence[Tensor], attached: Sequence[Tensor]) -> None:
        """What the rule holds: outputs of f may be hidden in objects, where nobody can put the op's in their place."""
        names = [getattr(part, "_id", None) for part in map(values_of, outputs)]  # a variable has none

        def hidden() -> list[tuple[Tensor, Tensor]]:
            tensors = [tensor for tensor in kept.hidden() if not isinstance(tensor, tf.Variable)]
            inside = {part._id: tensor for tensor in tensors for part in parts_of([tensor])}
            return [(inside[name], at) for name, at in zip(names, attached, strict=True) if name in inside]

        self._hidden = hidden

    def __call__(self, *upstreams: Tensor | None) -> Sequence[Tensor | None]:
        given = [like.upstream(upstream) for like, upstream in zip(self._like, upstreams, strict=True)]
        looking = transposition()
        if looking is not None and not (looking.is_of_function and self._has_no_derivative()):
            given = [in_this_graph(upstream) for upstream in given]
            return [*looking.run(self._call, self._run, given), *self._of_unknown(*given)]
        if self._stand_in is not None:
            cut = self._without_derivative([self._stand_in], given, self._refuse_second_order)
            return [*cut, *self._of_unknown()]
        hidden = self._hidden() if may_be_recorded() else []
        if hidden:
            tensor, _ = hidden[0]
            refuse = functools.partial(refuse_hidden, self._call, tensor)
            return [*self._without_derivative([at for _, at in hidden], given, refuse), *self._of_unknown()]
        return [*self._run(*given), *self._of_unknown()]

    def _has_no_derivative(self) -> bool:
        return self._stand_in is not None or bool(self._hidden())

    def _run(self, *upstreams: Tensor) -> list[Tensor | None]:
        """The gradients of the inputs and of the variables, by the rule."""
        return self._run_rule(self.rule, self._inputs, upstreams)

    def _run_rule(self, rule: Rule, inputs: Sequence[Tensor], upstreams: Sequence[Tensor]) -> list[Tensor | None]:
        given = [like.around(upstream) for like, upstream in zip(self._like, upstreams, strict=True)]
        origins = Origins(around=self._origins)
        follows = tf.executing_eagerly() and record.could_possibly_record()
        with origins.followed() if follows else contextlib.nullcontext(), differentiated(upstreams):
            gradients, of_variables = running_rule.run(origins, rule, inputs, given, self._variables)
        return [
            gradient if is_eager(gradient) and fit is None else self._fitting(rule, at, gradient)
            for at, (fit, gradient) in enumerate(zip(self._fits, [*gradients, *of_variables], strict=True))
        ]

    def _fitting(self, rule: Rule, at: int, gradient: Tensor | None) -> Tensor | None:
        """A gradient that fits the input or the variable at this place."""
        variable = at - len(rule.shapes)
        if variable < 0:
            name: Name = functools.partial(input_name, self._call, at)
            shape, dtype = rule.shapes[at], rule.dtypes[at]
        else:
            name = f"variables[{variable}]".format
            shape, dtype = self._variables[variable].shape, self._variables[variable].dtype
        fit = self._fits[at] or fit_of_dense(shape, dtype)
        return fit.values(gradient, self._call.name, name)

    def _of_unknown(self, *upstreams: Tensor) -> list[Tensor]:
        """NaN for tensors of a graph that f captured: if one is differentiated, that is known when it is too late.

        An accumulator transposes what depends on upstream: the NaN reaches what has a tangent, and nothing else.
        """
        alarms = [tf.fill(tf.shape(x), tf.constant(_alarm(x.dtype), x.dtype)) for x in self._unknown]
        totals = [tf.reduce_sum(upstream) for upstream in upstreams if is_differentiable(upstream)]
        if not totals:
            return alarms
        return [tf.math.multiply_no_nan(alarm, tf.cast(totals[0], alarm.dtype)) for alarm in alarms]

    # --- Without a derivative ---------------------------------------------------------------------------------------

    def _without_derivative(
        self, sources: Sequence[Tensor], upstreams: Sequence[Tensor], refuse: Callable[[], NoReturn]
    ) -> list[Tensor | None]:
        """The gradients, cut off from what they were computed from; upstreams are sources too."""
        if not may_be_recorded():
            return self._run(*upstreams)
        gradients = self._run(*map(unfollowed, upstreams))
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
        transposition = Transposition()
        with transposition.going_on():
            transpose()
        transposition.refuse_what_is_not_linear()
        if not call.forward_mode and tf.executing_eagerly() and not self._reads_no_values(values):
            call.refuse_forward_mode(ACCUMULATOR)

    def _reads_no_values(self, values: Sequence[Tensor]) -> bool:
        def run(grad_fn: Callable[..., Any], inputs: Sequence[Tensor], *upstreams: Tensor) -> None:
            self._run_rule(self.rule.with_grad_fn(grad_fn), inputs, upstreams)

        return reads_no_values(run, self.rule.grad_fn, self._inputs, values, self._call.backend.is_tensor)


def _alarm(dtype: tf.DType) -> float:
    """The number that says that a gradient is not known."""
    if not hasattr(check_numerics_callback._state, "check_numerics_callback"):
        return float("nan")
    return float(dtype.real_dtype.max**0.75)  # where every NaN is an error, used or not: what no sum can hide


def unfollowed(x: Tensor) -> Tensor:
    """An eager tensor again, which no tape and no accumulator follows; in a graph, the tensor itself."""
    if not tf.executing_eagerly():
        return x
    with record.stop_recording():
        return with_values(x, tf.identity(values_of(x)))


def _fit_of_variable(variable: Tensor, value: Tensor) -> Fit | None:
    """What the gradient of a variable must look like, whose shape may change with its value."""
    return fit_of(value) or (None if variable.shape.is_fully_defined() else fit_of_dense(value.shape, value.dtype))


class _Like:
    """What there is to know of an output to make its upstream gradient; of a plain eager tensor nothing is kept."""

    def __init__(self, output: Tensor) -> None:
        self._whole = None if is_eager(output) else output
        values = values_of(output)
        self._shape, self._dtype = values.shape, values.dtype

    def upstream(self, upstream: Tensor | None) -> Tensor:
        """An upstream gradient of the output's values: zeros where it was not used, and never sparse."""
        if upstream is not None:
            return tf.convert_to_tensor(upstream)
        return tf.zeros(self._shape, self._dtype) if self._whole is None else tf.zeros_like(values_of(self._whole))

    def around(self, values: Tensor) -> Tensor:
        """The upstream gradient as the rule expects it."""
        return values if self._whole is None else with_values(self._whole, values)
