"""One run of f, and what it reads that is no argument: trainable variables, and tensors that are
differentiated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from cgshim.backend import Call, Rule, Tensor, is_differentiable
from cgshim_tensorflow._outputs import Tangents
from cgshim_tensorflow._private import context, pack_tangents, record
from cgshim_tensorflow._record import (
    OPEN,
    Listening,
    Record,
    in_this_graph,
    is_watched,
    may_be_recorded,
    running_rule,
    sources_beyond,
    stand_ins,
)
from cgshim_tensorflow._values import is_eager, parts_of


class Run(NamedTuple):
    """The results of one run of f, and what it read."""

    outputs: list[Tensor]
    """as f returned them; some may be variables"""
    tensors: list[Tensor]
    """the outputs' values, in this graph"""
    rule: Rule
    variables: list[Tensor]
    """what f read and its rule takes: trainable variables, and tensors that a tape or an accumulator follows"""
    unknown: list[Tensor]
    """tensors of a graph that f read, if nobody knows yet whether they are differentiated"""
    record: Record
    """what f has made"""
    tangents: Tangents | None
    """of what f has made, if an accumulator follows its inputs"""


def run_f(
    call: Call,
    inputs: Sequence[Tensor],
    originals: Sequence[Tensor],
    tangents: Tangents | None = None,
) -> Run:
    """Run f on inputs, which hold the values of the originals, and find what else it read."""
    of_f, recorded = Record(call, running_rule.current), may_be_recorded()
    if tangents:
        of_f.add(tangents.values, tangents.sources)
    with (
        record.VariableWatcher() as watcher,
        tangents.following() if tangents else _NOTHING,
        of_f.noting() if recorded else _NOTHING,
    ):
        outputs, rule = call(inputs)
        tensors = in_this_graph(outputs)
    variables = list(watcher.watched_variables())
    watched: list[Tensor] = []
    unknown: list[Tensor] = []
    if recorded:
        own = {x._id for x in parts_of(inputs)}
        read = [x for at, x in of_f.close(parts_of(tensors)).items() if at not in own]
        captured = _captured_eagerly if tf.executing_eagerly() else _captured_in_graph
        watched, unknown = captured(call, of_f, read, inputs, [*inputs, *originals, *variables])
    if watched and not rule.takes_variables:
        call.refuse_captured(watched[0])
    call.require_variables(rule, variables)
    return Run(outputs, tensors, rule, [*variables, *watched], unknown, of_f, tangents)


_NOTHING: Any = contextlib.nullcontext()


def _identities(tensors: Sequence[Tensor]) -> frozenset[int]:
    """Return the identities of tensors and of the handles of variables, and of what they stand for
    in the graphs around theirs.
    """
    parts = parts_of([getattr(x, "handle", x) for x in tensors])
    return frozenset([each._id for part in parts for each in stand_ins(part)])


def _floats(read: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return what f itself has read that may be differentiated: no tangents, which an accumulator
    reads.
    """
    tangents = {tangent._id for tangent in pack_tangents([*parts_of(inputs), *read]).tangents}
    return [x for x in read if is_differentiable(x.dtype) and x._id not in tangents]


def _captured_eagerly(
    call: Call,
    of_f: Record,
    read: Sequence[Tensor],
    inputs: Sequence[Tensor],
    known: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that are differentiated and that f has read: older than its run, and no
    inputs of it. The second list is empty: it is known which these are.

    TensorFlow tells of the variables that are read only if they are trainable. Of others, it tells
    of the handle, or of the value alone, which no operation has made.
    """
    new = [  # what tf.vectorized_map makes in a graph of its own, it tells nobody
        x
        for x in read
        if (x._id > of_f.first or x.dtype == tf.resource) and is_eager(x) and is_watched([x])
    ]
    # no debugger is listening, too
    if new and all(isinstance(each, Listening) for each in context.context().op_callbacks):
        handles = _identities(known)
        for x in new:
            if x.dtype == tf.resource and x._id not in handles:
                with record.stop_recording():
                    value = tf.raw_ops.ReadVariableOp(
                        resource=x, dtype=x._handle_data.shape_and_type[0].dtype
                    )
                call.refuse_captured(value)
            may_be = [
                v
                for v in known
                if isinstance(v, tf.Variable)
                and v.dtype == x.dtype
                and v.shape.is_compatible_with(x.shape)
            ]
            if x.dtype != tf.resource and not may_be:
                call.refuse_captured(x)
    old = [x for x in read if x._id < of_f.first and is_watched([x])]
    watched = _floats(old, inputs) if old else []
    if watched and running_rule.current is not None and is_watched(parts_of(known)):
        identities = _identities(known)
        watched = [x for x in watched if of_f.leads_beyond(x, identities)]
    return watched, []


def _captured_in_graph(
    call: Call,
    of_f: Record,
    read: Sequence[Tensor],
    inputs: Sequence[Tensor],
    known: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that are differentiated other than through the known ones, and those that
    may yet be.

    Such are also what f read from variables that are not trainable: the caller of the graph may
    watch them.
    """
    watched: list[Tensor] = []
    unknown: dict[int, Tensor] = {}
    identities = _identities(known) if read else frozenset()
    for tensor in _floats(read, inputs):
        if running_rule.current is not None:
            sources, may_be = sources_beyond(tensor, identities)
        else:
            sources = list(stand_ins(tensor))
            may_be = (
                [tensor] if len(sources) > 1 or tensor.op.inputs or tensor.op.type in OPEN else []
            )
        if any(is_watched([source]) for source in sources):
            watched.append(tensor)
        else:
            unknown.update(
                {source._id: source for source in may_be if is_differentiable(source.dtype)}
            )
    values = [
        y
        for x in read
        if x.dtype == tf.resource and identities.isdisjoint(each._id for each in stand_ins(x))
        for operation in x.consumers()
        for y in operation.outputs
        if of_f.has_made(y) and is_differentiable(y.dtype)
    ]
    for value in values:
        if is_watched([value]):
            call.refuse_captured(value)
    return watched, [*in_this_graph(list(unknown.values())), *values]
