"""One run of f, and what it reads that is no argument: trainable variables, and tensors that are
differentiated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from cgshim.backend import Call, Rule, Tensor
from cgshim_tensorflow._outputs import Tangents
from cgshim_tensorflow._private import context, pack_tangents, record
from cgshim_tensorflow._record import (
    OPEN,
    Listening,
    Record,
    in_this_graph,
    is_watched,
    running_rule,
    sources_beyond,
    stand_ins,
)
from cgshim_tensorflow._values import is_differentiable, parts_of


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
    """what f has made, in eager mode"""
    operations: Sequence[Any]
    """the operations that f has made, in a graph"""
    tangents: Tangents | None
    """of what f has made, if an accumulator follows its inputs"""


def run_f(
    call: Call,
    inputs: Sequence[Tensor],
    originals: Sequence[Tensor],
    tangents: Tangents | None = None,
) -> Run:
    """Run f on inputs, which hold the values of the originals, and find what else it read."""
    of_f = Record(call, running_rule.current)
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    before = len(graph.get_operations()) if graph else 0
    is_recorded = graph is None and record.could_possibly_record()
    if tangents:
        of_f.add(*tangents.connected)
    with (
        record.VariableWatcher() as watcher,
        tangents.following() if tangents else contextlib.nullcontext(),
    ):
        with Listening(of_f.notice) if is_recorded else contextlib.nullcontext():
            outputs, rule = call(inputs)
        tensors = in_this_graph(outputs)
    variables = list(watcher.watched_variables())
    operations = graph.get_operations()[before:] if graph else ()
    of_f.note_operations(operations)
    known = [*inputs, *originals, *variables]
    watched: list[Tensor] = []
    unknown: list[Tensor] = []
    if graph:
        watched, unknown = _captured_in_graph(call, operations, inputs, tensors, known)
    elif is_recorded:
        watched = _captured_eagerly(call, of_f, tensors, inputs, known)
    if watched and not rule.takes_variables:
        call.refuse_captured(watched[0])
    call.require_variables(rule, variables)
    return Run(outputs, tensors, rule, [*variables, *watched], unknown, of_f, operations, tangents)


def _identities(tensors: Sequence[Tensor]) -> frozenset[int]:
    """Return the identities of tensors and variables, and of what they stand for in the graphs
    around theirs.
    """
    handles = [getattr(x, "handle", None) for x in tensors if isinstance(x, tf.Variable)]
    plain = parts_of([x for x in tensors if not isinstance(x, tf.Variable)])
    known = [*plain, *(handle for handle in handles if handle is not None)]
    return frozenset([each._id for tensor in known for each in stand_ins(tensor)])


def _floats(read: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return what f itself has read that may be differentiated: no tangents, which an accumulator
    reads.
    """
    tangents = {tangent._id for tangent in pack_tangents([*parts_of(inputs), *read]).tangents}
    return [x for x in read if is_differentiable(x) and x._id not in tangents]


def _captured_eagerly(
    call: Call,
    of_f: Record,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    known: Sequence[Tensor],
) -> list[Tensor]:
    """Return the tensors that are differentiated and that f has read: older than its run, and no
    inputs of it.

    TensorFlow tells of the variables that are read only if they are trainable. Of others, it tells
    of the handle, or of the value alone, which no operation has made.
    """
    read = of_f.close(parts_of(outputs))
    new = [
        x
        for at, x in read.items()
        if (at > of_f.first or x.dtype == tf.resource) and is_watched([x])
    ]
    # no debugger is one, too
    only_ours_listen = all(isinstance(each, Listening) for each in context.context().op_callbacks)
    if new and only_ours_listen:
        specs = [x for x in known if isinstance(x, tf.Variable)]
        handles = _identities(known)
        for x in new:
            if x.dtype == tf.resource and x._id not in handles:
                with record.stop_recording():
                    value = tf.raw_ops.ReadVariableOp(
                        resource=x, dtype=x._handle_data.shape_and_type[0].dtype
                    )
                call.refuse_captured(value)
            may_be = [
                v for v in specs if v.dtype == x.dtype and v.shape.is_compatible_with(x.shape)
            ]
            if x.dtype != tf.resource and not may_be:
                call.refuse_captured(x)
    input_ids = {x._id for x in parts_of(inputs)}
    old = [x for at, x in read.items() if at < of_f.first and at not in input_ids]
    if not old:
        return []
    watched = [x for x in _floats(old, inputs) if is_watched([x])]
    if watched and running_rule.current is not None and is_watched(parts_of(known)):
        identities = _identities(known)
        watched = [x for x in watched if of_f.leads_beyond(x, identities)]
    return watched


def _captured_in_graph(
    call: Call,
    made: Sequence[Any],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    known: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that are differentiated other than through the known ones, and those that
    may yet be.

    Such are also what f read from variables that are not trainable: the caller of the graph may
    watch them.
    """
    own = {y._id for op in made if op.type not in ("Const", *OPEN) for y in op.outputs}
    own |= {x._id for x in parts_of(inputs)}
    read = {
        x._id: x
        for each in (*[op.inputs for op in made], parts_of(outputs))
        for x in each
        if x._id not in own
    }
    watched: list[Tensor] = []
    unknown: dict[int, Tensor] = {}
    identities = _identities(known) if read else frozenset()
    for tensor in _floats([*read.values()], inputs) if read else ():
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
            unknown.update({source._id: source for source in may_be if is_differentiable(source)})
    handles = [x for x in read.values() if x.dtype == tf.resource]
    captured = {x._id for x in handles if identities.isdisjoint(each._id for each in stand_ins(x))}
    values = [
        y
        for op in made
        if any(x._id in captured for x in op.inputs)
        for y in op.outputs
        if is_differentiable(y)
    ]
    for value in values:
        if is_watched([value]):
            call.refuse_captured(value)
    return watched, [*in_this_graph(list(unknown.values())), *values]
