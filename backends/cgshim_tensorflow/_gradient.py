"""The gradient of one run of f: its rule, as tapes and graphs call it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from cgshim.backend import (
    Call,
    Tensor,
    is_differentiable,
    place_of,
    refuse_captured_tangent,
    subvals,
)
from cgshim_tensorflow._fits import equal, fit_of
from cgshim_tensorflow._forward import Transposition, transposition
from cgshim_tensorflow._outputs import EagerOutputs, GraphOutputs
from cgshim_tensorflow._private import (
    check_numerics_callback,
    pack_tangents,
    record,
    shape_of_eager,
)
from cgshim_tensorflow._record import (
    Record,
    converted_as_caller,
    in_this_graph,
    is_watched,
    may_be_recorded,
    needed_among,
    running_rule,
    stand_ins,
)
from cgshim_tensorflow._rule import attach_gradient, stand_in_for, without_derivative
from cgshim_tensorflow._run import Run
from cgshim_tensorflow._values import detached, is_eager, parts_of, values_of, with_values


def attach_rule(
    call: Call, run: Run, inputs: Sequence[Tensor], sources: Sequence[Tensor]
) -> list[Tensor]:
    """Return f's outputs, with f's rule as their gradient with respect to the sources."""
    if not may_be_recorded():
        return [*map(detached, run.tensors)]
    values = [*map(values_of, run.tensors)]
    eager = tf.executing_eagerly()
    outputs = (EagerOutputs if eager else GraphOutputs)(values, run.record)
    gradient = _Gradient(call, run, inputs, sources, outputs, eager)

    def make_gradient(attached: Sequence[Tensor]) -> _Gradient:
        outputs.attach(attached)
        run.record.add(attached, sources)
        return gradient

    attached = attach_gradient(
        call, sources, outputs.values, make_gradient,
        functools.partial(gradient.transpose, sources), are_detached=eager,
    )  # fmt: skip
    return [*map(with_values, run.tensors, attached)]


class _Gradient:
    """A function from an upstream gradient for each output's values, None if it was unused, to one
    for each source.
    """

    def __init__(
        self, call: Call, run: Run, inputs: Sequence[Tensor], sources: Sequence[Tensor],
        outputs: EagerOutputs | GraphOutputs, eager: bool,
    ) -> None:  # fmt: skip
        self._call, self._record, self._outputs = call, run.record, outputs
        self._variables, self._unknown = run.variables, run.unknown
        self._tangents = run.tangents
        self._inputs = inputs if run.rule.needs_inputs else ()
        self._sources = [x._id for x in sources]
        self._kept: set[int] = set()
        """what the rule has made of the sources for an accumulator, which others do not follow"""
        self._needed = (
            needed_among(sources[: len(inputs)]) if run.rule.takes_needs_input_grad else None
        )
        self._fits = [
            *map(fit_of, inputs),
            *map(fit_of, sources[len(inputs) : len(inputs) + len(run.variables)]),
        ]
        # the shape and dtype of an eager output, which need not be alive
        self._like = [(shape_of_eager(y), y.dtype) if is_eager(y) else y for y in run.tensors]
        self.rule = run.rule
        if not eager:
            self.rule = run.rule.with_grad_fn(converted_as_caller(run.rule.grad_fn))

        self._older = {at for at in outputs.numbers if eager and at < run.record.first}
        """the outputs that were there before f ran, and are no inputs: others may read them, too"""
        if self._older:
            self._older.difference_update([x._id for x in parts_of(inputs)])
        self._handles = {y.handle._id for y in run.outputs if isinstance(y, tf.Variable)}
        returns_values = self._handles or (eager and run.rule.output.converted)
        self._converted = [*map(values_of, run.tensors)] if eager and returns_values else ()
        self._stand_in: Tensor = None
        """a number that depends on the sources, if a derivative of the gradient may have to be refused"""
        may_hide = returns_values or self._older or (eager and run.record.may_hold_values)
        if call.once_differentiable or may_hide:
            self._stand_in = stand_in_for(call, sources, self._refuse_second_order)

    def __call__(self, *upstreams: Tensor | None) -> Sequence[Tensor | None]:
        dense = [*map(_dense, upstreams, self._like)]
        # the first order: the very function that f returned, and nothing else
        if not may_be_recorded():
            of_rule = Record(self._call, self._record, dense)
            return self._fitting(running_rule.run(of_rule, self._run, dense))
        once = self._call.once_differentiable
        observing = transposition.current
        if observing is not None and not (observing.is_of_function and once):
            if observing.is_of_function:
                self.require_transpose()
            dense = in_this_graph(dense)
            return [
                *observing.observe(self._call, self._transposed, dense),
                *self._of_unknown(*dense),
            ]
        gradients = self._connected(*(map(detached, dense) if once else dense))
        if once:
            sources = [self._stand_in, *dense]
            gradients = without_derivative(
                self._call, sources, gradients, self._refuse_second_order
            )
        return [*gradients, *self._of_unknown()]

    def _refuse_second_order(self) -> NoReturn:
        self._call.refuse_second_order("a derivative of the gradient")

    # --- The rule, and what it reads --------------------------------------------------------------

    def _run(self, upstreams: Sequence[Tensor]) -> list[Tensor | None]:
        """Run grad_fn."""
        structured = [
            upstream if isinstance(like, tuple) else with_values(like, upstream)
            for like, upstream in zip(self._like, upstreams, strict=True)
        ]
        gradients, of_variables = self.rule(self._inputs, structured, self._variables, self._needed)
        return [*gradients, *of_variables]

    def _run_connected(
        self, tensors: Sequence[Tensor], run: Callable[..., list[Tensor | None]], *args: Any
    ) -> tuple[Record, list[Tensor | None]]:
        """Run grad_fn or jvp_fn, which is given the tensors, while somebody may record it: connect
        what it may read of f, and return what it has read, too.
        """
        of_rule = Record(self._call, self._record, tensors)
        self._outputs.connect()
        if self._tangents:
            self._tangents.connect(self._outputs.numbers)
        with self._outputs.read_by(of_rule):
            returned = running_rule.run(of_rule, run, *args)
        if not tf.executing_eagerly():
            # what is captured is known as it is where it was made
            read = [[*stand_ins(x)][-1] for x in of_rule.read.values()]
            of_rule.read = {x._id: x for x in read}
        return of_rule, returned

    def _connected(self, *upstreams: Tensor, accumulators: int = 0) -> list[Tensor | None]:
        """Run the rule while somebody may record it, and connect what it reads of f.

        That many accumulators run it to transpose it, and do not follow it: one that is busy has no
        tangents for others.
        """
        of_rule, gradients = self._run_connected(upstreams, self._run, upstreams)
        outer = len(pack_tangents(()).indices) - accumulators
        is_derived = outer > 0
        if is_derived:
            self._refuse_tangents_of(of_rule.read.values())
            self._refuse_functions(of_rule, accumulators, outer)
        if accumulators:
            self._kept |= of_rule.made_of(self._sources)
        conflict = self._outputs.conflict(of_rule, is_derived)
        why, source, tensor = None, self._stand_in, None
        both = "f computed from an output that grad_fn reads too"
        eager = tf.executing_eagerly()
        if conflict and is_derived and self._tangents and eager:
            self._call.refuse_unconnected(conflict[1], both)
        if conflict and (not eager or is_watched([conflict[0]])):
            source, tensor, why = *conflict, both
        elif source is not None and not self._call.once_differentiable and is_watched([source]):
            reasons = ((x, self._why_unconnected(x)) for x in of_rule.read.values())
            tensor, why = next(((x, reason) for x, reason in reasons if reason), (None, None))
        if why:
            refuse = functools.partial(self._call.refuse_unconnected, tensor, why)
            if accumulators:  # what has no derivative by the sources would have none by upstream
                refuse()
            gradients = without_derivative(self._call, [source], gradients, refuse)
        return self._fitting(gradients)

    def _transposed(self, *upstreams: Tensor) -> list[Tensor | None]:
        """Run the rule while an accumulator transposes it, which takes no slices."""
        gradients = self._connected(*upstreams, accumulators=1)
        return [fit.dense(gradient) for fit, gradient in zip(self._fits, gradients, strict=True)]

    def _refuse_tangents_of(self, read: Iterable[Tensor]) -> None:
        """Raise an error for a tensor whose tangent is not known, or f's where it is to be the
        rule's.
        """
        for tensor in read:
            if self._tangents and tensor._id in self._tangents.refused:
                raise self._tangents.refused[tensor._id]
            if tensor._id in self._outputs.with_tangents:
                self._call.refuse_unconnected(tensor, "has the tangent of what f has captured")
            if tensor._id in self._kept:
                self._call.refuse_kept(tensor)

    def _refuse_functions(self, of_rule: Record, accumulators: int, outer: int) -> None:
        """Raise an error for a tf.function whose tangent has no tangent: in eager mode TensorFlow 2.21
        loses it where it transposes the function itself, by hand too.
        """
        reads_f = outer > 1 and self._record.calls_functions
        if (accumulators and of_rule.calls_functions) or (
            reads_f and any(map(self._record.has_made, of_rule.read.values()))
        ):
            self._call.refuse("forward mode over forward mode needs an f and a rule without a tf.function",
                              "the call of one", "call its python_function")  # fmt: skip

    def _why_unconnected(self, tensor: Tensor) -> str | None:
        """Return why nobody knows the derivative of a tensor that the rule has read; None if it is
        known.
        """
        if self._record.is_made_of_values(tensor):
            place = place_of(tensor)
            return "f made of values that Python read" + (
                f" (it is kept as {place})" if place else ""
            )
        if tensor._id in self._older and is_differentiable(tensor.dtype):
            return "f returned and has not made"
        if tensor._id in self._handles:
            return "f returned in a variable"
        if tensor._id not in self._outputs.numbers and any(
            tensor.dtype == y.dtype and equal(tensor, y) for y in self._converted
        ):
            return "f returned as a NumPy array, or in a variable"
        return None

    def _fitting(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs and of the variables, checked to fit."""
        return [
            fit.values(gradient, self._call.name, functools.partial(self._name_of, at))
            for at, (fit, gradient) in enumerate(zip(self._fits, gradients, strict=True))
        ]

    def _name_of(self, at: int) -> str:
        variable = at - len(self.rule.shapes)
        return self._call.arguments.path(at) if variable < 0 else f"variables[{variable}]"

    def _of_unknown(self, *upstreams: Tensor) -> list[Tensor]:
        """Return NaN for captured tensors of a graph: whether one is differentiated is known when
        it is too late.

        An accumulator transposes what depends on upstream: so the NaN reaches what has a tangent,
        and nothing else.
        """
        if not self._unknown:
            return []
        alarms = [
            tf.fill(tf.shape(x), tf.constant(_alarm(x.dtype), x.dtype)) for x in self._unknown
        ]
        totals = [
            tf.reduce_sum(upstream) for upstream in upstreams if is_differentiable(upstream.dtype)
        ]
        return (
            [tf.math.multiply_no_nan(x, tf.cast(totals[0], x.dtype)) for x in alarms]
            if totals
            else alarms
        )

    # --- Forward mode -----------------------------------------------------------------------------

    def require_transpose(self) -> None:
        """Raise an error where forward mode transposes grad_fn, and the author gave a jvp_fn, which
        may differ from it.
        """
        if self.rule.jvp_fn is not None and not self._call.forward_mode:
            self._call.refuse("around a tf.function or a vectorized_map, forward mode transposes grad_fn",
                              "a jvp_fn", "watch within it, or say that grad_fn is its transpose: "
                              "op_custom_gradient(forward_mode=True)")  # fmt: skip

    def transpose(
        self,
        sources: Sequence[Tensor],
        transpose: Callable[[], None],
        outputs: Sequence[Tensor],
    ) -> None:
        """Let the accumulators transpose the rule, and refuse it if it is not linear; or give the
        outputs the tangents of jvp_fn.
        """
        if self._call.once_differentiable:
            several = sum(map(bool, pack_tangents(sources).indices)) > 1
            if several or record.should_record_backprop(sources):
                self._refuse_second_order()
        if self.rule.jvp_fn is not None:
            self._push(sources, outputs)
            return
        Transposition().run(transpose)

    def _push(self, sources: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Give the outputs the tangents of the author's jvp_fn.

        An accumulator has no other door than a backward function, which it differentiates by its
        upstreams to transpose it (2.21: ForwardpropFromTape in python/eager/pywrap_tfe_src.cc). So
        this one returns zeros whose derivative by the upstreams is jvp_fn itself.
        """
        count = len(self.rule.shapes)
        if pack_tangents(sources[count:]).tangents:
            refuse_captured_tangent(self._call.name)
        moving = [at for at, x in enumerate(sources[:count]) if pack_tangents([x]).tangents]

        def backward(*upstreams: Tensor) -> list[Tensor | None]:
            zeros = [tf.zeros_like(sources[at]) for at in moving]
            push = functools.partial(self._tangents_of, sources[:count], outputs, moving)
            record.record_operation(self._call.name, zeros, list(upstreams), push)
            return subvals([None] * len(sources), moving, zeros)

        record.record_operation_forwardprop_only(self._call.name, outputs, sources, backward, None)

    def _tangents_of(
        self,
        sources: Sequence[Tensor],
        outputs: Sequence[Tensor],
        moving: Sequence[int],
        *tangents: Tensor | None,
    ) -> list[Tensor | None]:
        """Run jvp_fn while somebody may record it, and connect what it reads of f."""
        of_rule, output_tangents = self._run_connected(
            [t for t in tangents if t is not None],
            self.rule.tangents,
            subvals([None] * len(sources), moving, tangents),
            outputs,
            lambda at: tf.zeros_like(sources[at]),
        )
        if self._stand_in is not None and is_watched([self._stand_in]):
            # the tangents are followed, and nothing of f to what jvp_fn has read
            for tensor in of_rule.read.values():
                if why := self._why_unconnected(tensor):
                    self._call.refuse_unconnected(tensor, why)
        if pack_tangents(()).indices:
            self._refuse_tangents_of(of_rule.read.values())
        self._kept |= of_rule.made_of(self._sources)
        return [None if t is None else values_of(t) for t in output_tangents]


def _alarm(dtype: tf.DType) -> float:
    """Return the number that says that a gradient is not known."""
    if not hasattr(check_numerics_callback._state, "check_numerics_callback"):
        return float("nan")
    # if every NaN is an error, used or not: a number that no sum can hide
    return float(dtype.real_dtype.max**0.75)


def _dense(upstream: Tensor | None, like: Any) -> Tensor:
    """Return an upstream gradient of an output's values: zeros if it was not used, and never
    sparse.
    """
    if upstream is not None:
        in_eager_mode = is_eager(upstream) and tf.executing_eagerly()
        return upstream if in_eager_mode else tf.convert_to_tensor(upstream)
    return tf.zeros(*like) if isinstance(like, tuple) else tf.zeros_like(values_of(like))
