"""One run of f, and what it reads without being given it: trainable variables, and tensors that are differentiated."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from cgshim_tensorflow._made import Made
from cgshim_tensorflow._origins import (
    OPEN,
    Following,
    Origins,
    in_this_graph,
    is_of_accumulator,
    is_watched,
    may_be_differentiated,
    running_rule,
    sources_beyond,
    stand_ins,
)
from cgshim_tensorflow._private import pack_tangents, record
from cgshim_tensorflow._tangents import Tangents
from cgshim_tensorflow._values import is_differentiable, parts_of
from cgshim_tensorflow._variables import variables_read

if TYPE_CHECKING:
    from cgshim.backend import Call, Rule

Tensor = Any


_NOTHING: Any = contextlib.nullcontext()


class RunOfF(NamedTuple):
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
    origins: Origins
    made: Made
    """what f has made, in eager mode"""
    operations: Sequence[Any]
    """the operations that f has made, in a graph"""
    tangents: Tangents | None
    """of what f has made, if an accumulator follows its inputs"""


def run_f(call: Call, inputs: Sequence[Tensor], given: Sequence[Tensor], tangents: Tangents | None = None) -> RunOfF:
    """Run f on inputs, which hold the values of the given tensors, and find what else it read."""
    origins, made = Origins(running_rule.current), Made(call)
    operations: Sequence[Any] = ()
    if tangents:
        made.remember()
    with variables_read() as watcher, tangents.following() if tangents else _NOTHING:
        if not tf.executing_eagerly():
            results, read, operations = _run_in_graph(call, inputs)
        elif record.could_possibly_record():
            results, read = _run_eagerly(call, inputs, origins, made)
        else:
            results, read = _results(call, inputs), []
    outputs, tensors, rule = results
    variables = list(watcher.watched_variables())  # in the order in which they were made
    watched: list[Tensor] = []
    unknown: list[Tensor] = []
    if read:
        spoken_for = _identities([*inputs, *given, *variables])
        floats = _without_tangents([tensor for tensor in read if is_differentiable(tensor)], inputs)
        watched, unknown = _differentiated_among(floats, spoken_for, origins)
        unknown += _values_of_variables(read, operations, spoken_for)
    if watched and not rule.takes_variables:
        call.refuse_captured(watched[0])
    call.require_variables(rule, variables)
    return RunOfF(outputs, tensors, rule, [*variables, *watched], unknown, origins, made, operations, tangents)


def _differentiated_among(
    read: Sequence[Tensor], given: frozenset[int], origins: Origins
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that are differentiated other than through the given ones, and those that may yet be."""
    return (_watched(read, given, origins), []) if tf.executing_eagerly() else _watched_in_graph(read, given)


def _without_tangents(read: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return what f read itself, without what an accumulator read to derive the operations of f."""
    tangents = {tangent._id for tangent in pack_tangents([*parts_of(inputs), *read]).tangents}
    return [tensor for tensor in read if tensor._id not in tangents]


def _identities(tensors: Sequence[Tensor]) -> frozenset[int]:
    """Return the identities of tensors and variables, and of what they stand for in the graphs around theirs."""
    handles = [getattr(x, "handle", None) for x in tensors if isinstance(x, tf.Variable)]
    plain = parts_of([x for x in tensors if not isinstance(x, tf.Variable)])
    known = [*plain, *(handle for handle in handles if handle is not None)]
    return frozenset([each._id for tensor in known for each in stand_ins(tensor)])


def _watched(read: Sequence[Tensor], given: frozenset[int], origins: Origins) -> list[Tensor]:
    watched = [tensor for tensor in read if is_watched([tensor])]
    if running_rule.current is not None:
        watched = [tensor for tensor in watched if origins.leads_beyond(tensor, given)]
    return watched


def _watched_in_graph(read: Sequence[Tensor], given: frozenset[int]) -> tuple[list[Tensor], list[Tensor]]:
    watched, unknown = [], {}
    for tensor in read:
        if running_rule.current is not None:
            found = sources_beyond(tensor, given)
            sources = [source.tensor for source in found]
            # The source as a graph has captured it: the gradient of a tf.cond cannot capture it again.
            open_ends = [source.nearest for source in found if may_be_differentiated(source.tensor)]
        else:
            sources = list(stand_ins(tensor))
            open_ends = [tensor] if len(sources) > 1 or tensor.op.inputs or tensor.op.type in OPEN else []
        if any(is_watched([source]) for source in sources):
            watched.append(tensor)
        else:
            unknown.update({source._id: source for source in open_ends if is_differentiable(source)})
    return watched, in_this_graph(list(unknown.values()))


# --- What f reads ---------------------------------------------------------------------------------------------------


Results = tuple[list[Tensor], list[Tensor], "Rule"]
"""what f returned, the same as tensors of this graph, and its rule"""


def _results(call: Call, inputs: Sequence[Tensor]) -> Results:
    outputs, rule = call(inputs)
    return outputs, in_this_graph(outputs), rule


def _run_eagerly(call: Call, inputs: Sequence[Tensor], origins: Origins, made: Made) -> tuple[Results, list[Tensor]]:
    """Run f, and return its results and the tensors that it read: older than the run, and not given to it."""
    given = {x._id for x in parts_of(inputs)}
    read: dict[int, Tensor] = {}
    start = made.first

    def look_at(tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor._id < start and tensor._id not in given:
                read[tensor._id] = tensor

    def notice(op_type: str, tensors: Sequence[Tensor], attributes: Any, outputs: Sequence[Tensor]) -> None:
        if not is_of_accumulator(op_type, attributes):
            origins.add(outputs, tensors)
            made.notice(tensors, outputs)
            look_at(tensors)

    with Following(notice):
        results = _results(call, inputs)
    made.close()
    look_at(parts_of(results[1]))
    return results, list(read.values())


def _run_in_graph(call: Call, inputs: Sequence[Tensor]) -> tuple[Results, list[Tensor], Sequence[Any]]:
    """Run f, and return its results, the tensors that it read and did not make, and the operations that it made."""
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    results = _results(call, inputs)
    made = graph.get_operations()[before:]
    known = {t._id for op in made if op.type not in _READ_ONLY for t in op.outputs} | {x._id for x in parts_of(inputs)}
    read = {t._id: t for each in (*[op.inputs for op in made], parts_of(results[1])) for t in each}
    return results, [tensor for at, tensor in read.items() if at not in known], made


_READ_ONLY = ("Const", *OPEN)


def _values_of_variables(read: Sequence[Tensor], made: Sequence[Any], given: frozenset[int]) -> list[Tensor]:
    """Return what f read from variables that are not trainable: the caller of the graph may watch them nevertheless."""
    handles = [tensor for tensor in read if tensor.dtype == tf.resource]
    others = {handle._id for handle in handles if given.isdisjoint(each._id for each in stand_ins(handle))}
    values = [value for op in made if any(x._id in others for x in op.inputs) for value in op.outputs]
    return [value for value in values if is_differentiable(value)]
