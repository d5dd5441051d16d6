"""Forward mode around an op: accumulators do not follow f, because its output has the rule's
tangent, and no other.

An accumulator gives each tensor its tangent as it is made, once and for all. So f runs on inputs
without tangents, and a tape of our own records it. Where a rule runs under an accumulator (forward
over reverse, or over forward), what f has made and is still there gets its tangents before: the
transpose of what the tape tells.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from cgshim.backend import TransformationError, sentence
from cgshim_tensorflow._private import pack_tangents, record
from cgshim_tensorflow._record import Listening, identity
from cgshim_tensorflow._values import detached, is_differentiable, is_eager, values_of, with_values

Tensor = Any


class Tangents:
    """The tangents of what f makes of inputs."""

    def __init__(self, op: str, inputs: Sequence[Tensor]) -> None:
        self._name = op
        self._sources = [*map(values_of, inputs)]
        with record.stop_recording():
            self._values = [
                values_of(detached(x)) if tf.executing_eagerly() else tf.identity(values_of(x))
                for x in inputs
            ]
        self.stand_ins = [*map(with_values, inputs, self._values)]
        """the inputs, without tangents"""
        for value, source in zip(self._values, self._sources, strict=True):
            record.record_operation_backprop_only("Identity", [value], [source], identity)
        self.tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        """records f"""
        self.connected = self._values, self._sources
        self._made: list[weakref.ref[Tensor]] = []
        self._connected: set[int] = set()
        self.refused: dict[int, Exception] = {}
        """by number, the tensors that have no tangent, and why"""

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """While f runs."""
        with self.tape, Listening(self._remember):
            self.tape.watch([value for value in self._values if is_differentiable(value)])
            yield

    def _remember(
        self, op_type: str, inputs: Sequence[Tensor], attributes: Any, outputs: Sequence[Tensor]
    ) -> None:
        graph = None if is_eager(self._values[0]) else self._values[0].graph
        self._made += [
            weakref.ref(y) for y in outputs if (None if is_eager(y) else y.graph) is graph
        ]

    def connect(self, outputs: Collection[int]) -> None:
        """Give the inputs, and what f has made of them but its outputs, their tangents."""
        if not pack_tangents(self._sources).tangents:
            return
        for value, source in zip(self._values, self._sources, strict=True):
            record.record_operation_forwardprop_only("Identity", [value], [source], identity, None)
        for tensor in [reference() for reference in self._made]:
            if (
                tensor is None
                or tensor._id in outputs
                or tensor._id in self.refused
                or not is_differentiable(tensor)
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
        inputs = [value for value in self._values if is_differentiable(value)]
        sources = [source for source in self._sources if is_differentiable(source)]
        zero = tf.UnconnectedGradients.ZERO

        def backward(upstream: Tensor) -> list[Tensor]:
            return self.tape.gradient(tensor, inputs, upstream, zero)  # type: ignore[no-any-return]

        record.record_operation_forwardprop_only("f", [tensor], sources, backward, None)
