"""An output that a rule reads is the op's own output: its derivative is the rule's, however f has
made it.

A tape knows a tensor by its number, and the last operation recorded for it counts. So in eager mode
the op returns the very tensor that f has made, recorded as made by the rule, and what the rule
reads of it is right wherever f saved it. In a graph the op's output is another tensor, and what the
rule has made reads that one from then on: edges are moved.

What f made of its own output by further operations keeps the derivative of those. One number cannot
have two meanings, so the op returns a copy of such an output, and f's own tensor becomes the copy
when the rule runs in a second order.

In forward mode accumulators do not follow f, because its output has the rule's tangent, and no
other. An accumulator gives each tensor its tangent as it is made, once and for all. So f runs on
inputs without tangents, and a tape of our own records it. Where a rule runs under an accumulator
(forward over reverse, or over forward), what f has made and is still there gets its tangents
before: the transpose of what the tape tells.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from cgshim.backend import Tensor, TransformationError, is_differentiable, sentence
from cgshim_tensorflow._private import context, delete_trace, pack_tangents, record, same_memory
from cgshim_tensorflow._record import (
    OPEN,
    Listening,
    Record,
    identity,
    listening_with,
    running_rule,
    stand_ins,
)
from cgshim_tensorflow._values import detached, is_eager, values_of, with_values


def _with_tangents(values: Sequence[Tensor]) -> frozenset[int]:
    """Return the numbers of those that have a tangent: f has captured what an accumulator follows."""
    if not pack_tangents(values).tangents:
        return frozenset()
    return frozenset([y._id for y in values if pack_tangents([y]).tangents])


def _conflict(
    of_f: Record, of_rule: Record, read: Mapping[int, Tensor], followed: Mapping[int, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Return an output of the op, and a tensor that f made of one of those that are read, or of one
    of the others where a tape follows it, and that the rule has read.
    """
    for tensor in of_rule.read.values() if followed else ():
        if tensor._id in followed or not is_differentiable(tensor.dtype):
            continue
        if of_f.leads_to(tensor, read) or (
            record.should_record_backprop([tensor]) and of_f.leads_to(tensor, followed)
        ):
            return next(iter(followed.values())), tensor
    return None


class EagerOutputs:
    """The outputs of an eager run: as f made them, and as the op returns them."""

    def __init__(self, values: Sequence[Tensor], of_f: Record) -> None:
        self._of_f = of_f
        self._read_in_f: list[weakref.ref[Tensor]] = []
        self.values: list[Tensor] = []
        """as the op returns them"""
        self.numbers = {value._id for value in values}
        self.with_tangents = _with_tangents(values)
        for value in values:
            own = (
                of_f.has_made(value)
                and value._handle_data is None
                and all(value is not y for y in self.values)
            )
            if own and not of_f.reads.get(value._id) and value._id not in self.with_tangents:
                # and with it what f made on the way to it, if nothing else needs that
                delete_trace(value._id)
                self.values.append(value)
                continue
            self.values.append(detached(value))
            if own and record.could_possibly_record():
                # alive as long as the rule, or anybody, may read f's
                value.cgshim_output = self.values[-1]
                self._read_in_f.append(weakref.ref(value))

    def attach(self, attached: Sequence[Tensor]) -> None:
        """Keep no output that the op returns."""
        self.values = []

    def connect(self) -> None:
        """Give f's own outputs the tangents of the op's, before the rule runs.

        One that no tape follows, because f is opaque, becomes the op's now: what the rule reads of
        it would not be recorded. What f made of it has no derivative by it.
        """
        for value in self._alive():
            record.record_operation_forwardprop_only(
                "Identity", [value], [value.cgshim_output], identity, None
            )
            if not record.should_record_backprop([value]):
                _become(value, self._of_f.reads.get(value._id, 0))

    def read_by(self, of_rule: Record) -> contextlib.AbstractContextManager[Any]:
        """While the rule runs: note what it reads."""
        return of_rule.noting()

    def conflict(self, of_rule: Record, with_tangents: bool) -> tuple[Tensor, Tensor] | None:
        """Let f's own outputs be the op's for tapes, if the rule has read them.

        Return an output of the op, and a tensor that f made of it and the rule has read too, if
        there is one: f's own output is known as the op's for the derivative of that, too. So it is
        with tangents, even if it was not read.
        """
        outputs = {value._id: value.cgshim_output for value in self._alive()}
        read = {number: output for number, output in outputs.items() if number in of_rule.read}
        conflict = _conflict(self._of_f, of_rule, read, outputs if with_tangents else read)
        if conflict:
            return conflict
        for value in self._alive():
            if value._id in read:
                _become(value, self._of_f.reads.get(value._id, 0) + of_rule.reads.get(value._id, 0))
        return None

    def _alive(self) -> list[Tensor]:
        return [value for reference in self._read_in_f if (value := reference()) is not None]


def _become(value: Tensor, reads: int) -> None:
    """Let tapes know an eager tensor, which was read so often, as a copy of the op's output."""
    if hasattr(value, "cgshim_uses"):
        return
    # A tape forgets what nobody uses any more, and counts the uses anew from here. What has read
    # the tensor will take its uses away when it dies; these are added again, by a tensor that lives
    # as long as the tape.
    delete_trace(value._id)
    uses: list[Tensor] = []
    backward = lambda upstream, uses=uses: [upstream]
    record.record_operation_backprop_only("Identity", [value], [value.cgshim_output], backward)
    with record.stop_recording():
        uses.append(same_memory(value))
    record.record_operation_backprop_only("Uses", uses[:1], [value] * (reads + _MORE), lambda _: [])
    value.cgshim_uses = True


_MORE = 16
"""what was recorded without an operation has read it, too"""


class GraphOutputs:
    """The outputs of f in a graph: as f made them, and as the op returns them."""

    def __init__(self, values: Sequence[Tensor], of_f: Record) -> None:
        self._of_f = of_f
        self.values = values
        """as f made them"""
        self.numbers = {value._id for value in values}
        self.with_tangents = _with_tangents(values)
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        self._read_elsewhere: set[int] = set()
        """those that f has read, or captured: not all that reads them reads the op's"""
        self._called_with: set[int] = set()
        """those that f has read, and with which the rule has called what tapes record by its arguments"""

    def attach(self, attached: Sequence[Tensor]) -> None:
        """Know the outputs that the op returns."""
        for value, output in zip(self.values, attached, strict=True):
            if not is_eager(value) and self._of_f.has_made(value):
                self._own.setdefault(value._id, (value, output))
                if self._of_f.reads.get(value._id) or len([*stand_ins(value)]) > 1:
                    self._read_elsewhere.add(value._id)

    def connect(self) -> None:
        """Let tapes and accumulators know f's own outputs as the op's, before the rule runs."""
        for value, output in self._own.values() if record.could_possibly_record() else ():
            if value._id not in self._read_elsewhere:
                self._become(value._id)
            record.record_operation_forwardprop_only("Identity", [value], [output], identity, None)

    def _become(self, number: int) -> None:
        """Let tapes know f's own output as the op's."""
        value, output = self._own[number]
        delete_trace(number)
        record.record_operation_backprop_only("Identity", [value], [output], identity)

    @contextlib.contextmanager
    def read_by(self, of_rule: Record) -> Iterator[None]:
        """While the rule runs: note what it reads; what it has made reads the op's outputs at the
        end, and not f's.

        Edges are moved as they are made, before a tape sees them, if f itself has read its output.
        """
        at_once = record.could_possibly_record() and bool(self._read_elsewhere)
        with (
            self._captured_by(tf.compat.v1.get_default_graph()),
            Listening(self._notice) if at_once else contextlib.nullcontext(),
            of_rule.noting() as made,
        ):
            yield
        for operation in made:
            self._move_edges_of(operation)

    @contextlib.contextmanager
    def _captured_by(self, graph: Any) -> Iterator[None]:
        """Let a graph capture the op's outputs where the rule reads f's own: it would retain both."""
        if not (self._own and hasattr(graph, "capture")):
            yield
            return
        capture = graph.capture

        def capture_output(tensor: Any, *args: Any, **options: Any) -> Any:
            _, output = self._own.get(getattr(tensor, "_id", -1), (None, tensor))
            return capture(output, *args, **options)

        graph.capture = capture_output
        try:
            yield
        finally:
            if isinstance(capture, types.MethodType):
                del graph.capture
            else:  # that of a rule in which this one runs
                graph.capture = capture

    def conflict(self, of_rule: Record, with_tangents: bool) -> tuple[Tensor, Tensor] | None:
        """Let f's own outputs be the op's for tapes, if the rule has called a function with them.

        Return an output of the op, and a tensor that f made of it, a tape follows and the rule has
        read.
        """
        called = {number: self._own[number][1] for number in self._called_with}
        followed = {
            number: output
            for number, (_, output) in self._own.items()
            if with_tangents and number in self._read_elsewhere
        }
        conflict = _conflict(self._of_f, of_rule, called, called | followed)
        if conflict is None:
            for number in called:
                self._become(number)
        return conflict

    def _notice(
        self, op_type: str, inputs: Any, attributes: Any, outputs: Sequence[Tensor]
    ) -> None:
        if outputs and not is_eager(outputs[0]):
            self._move_edges_of(outputs[0].op)

    def _move_edges_of(self, operation: Any) -> None:
        """Let an operation read the op's outputs where it reads f's own, or what stands for one."""
        graph = operation.graph
        for at, x in enumerate(operation.inputs):
            for y in stand_ins(x) if x.op.type in OPEN else (x,):
                if y._id in self._own:
                    _, output = self._own[y._id]
                    here = graph.capture(output) if hasattr(graph, "capture") else output
                    operation._update_input(at, here)
        if operation.type in _CALLS:
            read = {x._id for x in operation.inputs}
            self._called_with |= {
                number
                for number, (_, output) in self._own.items()
                if output._id in read and number in self._read_elsewhere
            }


_CALLS = ("PartitionedCall", "StatefulPartitionedCall", "IdentityN")
"""calls of a tf.function or a tf.custom_gradient: tapes record them with their arguments, wherever edges are moved"""


# --- Forward mode ---------------------------------------------------------------------------------


class Tangents:
    """The tangents of what f makes of inputs."""

    def __init__(self, op: str, inputs: Sequence[Tensor]) -> None:
        self._name = op
        with record.stop_recording():
            values = [
                values_of(detached(x)) if tf.executing_eagerly() else tf.identity(values_of(x))
                for x in inputs
            ]
        self.stand_ins = [*map(with_values, inputs, values)]
        """the inputs, without tangents"""
        self.sources = [values_of(x) for x in inputs if is_differentiable(x.dtype)]
        self.values = [value for value in values if is_differentiable(value.dtype)]
        """of these, without tangents"""
        for value, source in zip(self.values, self.sources, strict=True):
            record.record_operation_backprop_only("Identity", [value], [source], identity)
        self.tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        """records f"""
        self._made: list[weakref.ref[Tensor]] = []
        self._connected: set[int] = set()
        self.refused: dict[int, Exception] = {}
        """by number, the tensors that have no tangent, and why"""

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """While f runs."""
        with contextlib.ExitStack() as stack:
            # none of a rule's own, which may call an op while an accumulator transposes it
            running_rule.run(None, stack.enter_context, self.tape)
            stack.enter_context(listening_with(self._remember))
            self.tape.watch(self.values)
            yield

    def _remember(
        self, op_type: str, inputs: Sequence[Tensor], attributes: Any, outputs: Sequence[Tensor]
    ) -> None:
        graph = None if is_eager(self.values[0]) else self.values[0].graph
        self._made += [
            weakref.ref(y) for y in outputs if (None if is_eager(y) else y.graph) is graph
        ]

    def connect(self, outputs: Collection[int]) -> None:
        """Give the inputs, and what f has made of them but its outputs, their tangents: those of
        eager tensors outlive the graph that their rule may run in.
        """
        if not pack_tangents(self.sources).tangents:
            return
        with context.eager_mode() if is_eager(self.values[0]) else contextlib.nullcontext():
            self._connect_all(outputs)

    def _connect_all(self, outputs: Collection[int]) -> None:
        for value, source in zip(self.values, self.sources, strict=True):
            record.record_operation_forwardprop_only("Identity", [value], [source], identity, None)
        for tensor in [reference() for reference in self._made]:
            if (
                tensor is None
                or tensor._id in outputs
                or tensor._id in self.refused
                or not is_differentiable(tensor.dtype)
            ):
                continue
            # of something captured, too
            if tensor._id not in self._connected and pack_tangents([tensor]).tangents:
                self.refused[tensor._id] = TransformationError(
                    sentence(self._name,
                             must="forward mode over a gradient needs one way to each tensor that grad_fn reads",
                             got="tangents of an argument and of a captured variable",
                             do="pass the variable as an argument")
                )  # fmt: skip
                continue
            try:
                self._connected.add(tensor._id)
                self._connect(tensor)
            except Exception as error:  # noqa: BLE001  # of an operation without a second derivative, or of the host
                self.refused[tensor._id] = error.with_traceback(None)

    def _connect(self, tensor: Tensor) -> None:
        zero = tf.UnconnectedGradients.ZERO

        def backward(upstream: Tensor) -> list[Tensor]:
            return self.tape.gradient(tensor, self.values, upstream, zero)  # type: ignore[no-any-return]

        record.record_operation_forwardprop_only("f", [tensor], self.sources, backward, None)
