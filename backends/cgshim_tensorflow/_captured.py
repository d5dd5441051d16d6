"""What f reads without being given it: trainable variables, and tensors that are differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.eager.forwardprop_util import pack_tangents
from tensorflow.python.framework.ops import uid

from cgshim.backend import RuleScope
from cgshim_tensorflow._origins import (
    OPEN,
    Origins,
    in_this_graph,
    is_watched,
    may_be_differentiated,
    sources_beyond,
    stand_ins,
)
from cgshim_tensorflow._values import is_differentiable, parts_of
from cgshim_tensorflow._variables import variables_read

if TYPE_CHECKING:
    from cgshim._call import Call
    from cgshim._convention import Rule

Tensor = Any

running_rule: RuleScope[Origins] = RuleScope("cgshim_tensorflow_running_rule")
"""the rule that is running, and where what it reads comes from"""


class Run(NamedTuple):
    """What one run of f left behind."""

    outputs: list[Tensor]
    """as f returned them: variables among them"""
    tensors: list[Tensor]
    """the outputs' values, in this graph"""
    rule: Rule
    variables: list[Tensor]
    """what f read and its rule takes: trainable variables, and tensors that a tape or an accumulator follows"""
    unknown: list[Tensor]
    """tensors of a graph that f read, of which nobody knows yet if they are differentiated"""
    origins: Origins


def run(call: Call, inputs: Sequence[Tensor], given: Sequence[Tensor]) -> Run:
    """Run f on inputs, which are what the given tensors hold, and find what else it read."""
    origins = Origins(around=running_rule.current)
    eager = tf.executing_eagerly()
    with variables_read() as watcher:
        if not eager:
            ran = _run_in_graph(call, inputs)
        elif record.could_possibly_record():
            ran = _run_eagerly(call, inputs, origins)
        else:
            ran = _Ran(*_results(call, inputs), [])
    variables = list(watcher.watched_variables())  # in the order in which they were made
    speaks_for = _identities([*inputs, *given, *variables])
    read = _without_tangents([tensor for tensor in ran.read if is_differentiable(tensor)], inputs)
    tell_apart = _watched if eager else _watched_in_graph
    watched, unknown = tell_apart(read, speaks_for, origins)
    unknown += _values_of_variables(ran, speaks_for)
    if watched and not ran.rule.takes_variables:
        call.refuse_captured(watched[0])
    ran.rule.require_variables(variables)
    return Run(ran.outputs, ran.tensors, ran.rule, [*variables, *watched], unknown, origins)


def _without_tangents(read: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """What f read itself, and not an accumulator that derived what f computed."""
    tangents = {tangent._id for tangent in pack_tangents([*parts_of(inputs), *read]).tangents}
    return [tensor for tensor in read if tensor._id not in tangents]


def _identities(tensors: Sequence[Tensor]) -> frozenset[int]:
    """What tells tensors and variables from others: in a graph, what they stand for in the graphs around it too."""
    handles = [getattr(x, "handle", None) for x in tensors if isinstance(x, tf.Variable)]
    plain = parts_of([x for x in tensors if not isinstance(x, tf.Variable)])
    known = [*plain, *(handle for handle in handles if handle is not None)]
    return frozenset([each._id for tensor in known for each in stand_ins(tensor)])


def _watched(read: Sequence[Tensor], given: frozenset[int], origins: Origins) -> tuple[list[Tensor], list[Tensor]]:
    watched = [tensor for tensor in read if is_watched([tensor])]
    if running_rule.current is not None:
        watched = [tensor for tensor in watched if origins.leads_beyond(tensor, given)]
    return watched, []


def _watched_in_graph(
    read: Sequence[Tensor], given: frozenset[int], origins: Origins
) -> tuple[list[Tensor], list[Tensor]]:
    watched, unknown = [], {}
    for tensor in read:
        if running_rule.current is not None:
            found = sources_beyond(tensor, given)
            sources = [source.tensor for source in found]
            # What a graph has captured of a source, for the gradient of a tf.cond can not capture it again.
            open_ends = [source.nearest for source in found if may_be_differentiated(source.tensor)]
        else:
            sources = list(stand_ins(tensor))
            open_ends = [tensor] if len(sources) > 1 or tensor.op.inputs or tensor.op.type in OPEN else []
        if any(is_watched([source]) for source in sources):
            watched.append(tensor)
        else:
            unknown.update({source._id: source for source in open_ends if is_differentiable(source)})
    return watched, [in_this_graph(tensor) for tensor in unknown.values()]


# --- What f reads ---------------------------------------------------------------------------------------------------


class _Ran(NamedTuple):
    """What f returned, and what it read."""

    outputs: list[Tensor]
    tensors: list[Tensor]
    rule: Rule
    read: list[Tensor]
    """tensors that are older than the run, and were not given"""
    made: Sequence[Any] = ()
    """the operations of a graph that it made"""


def _results(call: Call, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], Rule]:
    outputs, rule = call(inputs)
    return outputs, [in_this_graph(output) for output in outputs], rule


def _run_eagerly(call: Call, inputs: Sequence[Tensor], origins: Origins) -> _Ran:
    given = {x._id for x in parts_of(inputs)}
    read: dict[int, Tensor] = {}
    start = uid()

    def notice(op_type: str, tensors: Sequence[Tensor], *_: Any) -> None:
        read.update({t._id: t for t in tensors if t._id < start and t._id not in given})

    with origins.followed(notice):
        results = _results(call, inputs)
    notice("output", parts_of(results[1]))
    return _Ran(*results, list(read.values()))


def _run_in_graph(call: Call, inputs: Sequence[Tensor]) -> _Ran:
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    outputs, tensors, rule = _results(call, inputs)
    made = graph.get_operations()[before:]
    known = {t._id for op in made if op.type not in _READ_ONLY for t in op.outputs} | {x._id for x in parts_of(inputs)}
    read = {t._id: t for each in (*[op.inputs for op in made], parts_of(tensors)) for t in each}
    return _Ran(outputs, tensors, rule, [tensor for at, tensor in read.items() if at not in known], made)


_READ_ONLY = ("Const", *OPEN)


def _values_of_variables(ran: _Ran, speaks_for: frozenset[int]) -> list[Tensor]:
    """What f read of variables that are not trainable: whoever calls the graph may watch them all the same."""
    handles = [tensor for tensor in ran.read if tensor.dtype == tf.resource]
    others = {handle._id for handle in handles if speaks_for.isdisjoint(each._id for each in stand_ins(handle))}
    values = [value for op in ran.made if any(x._id in others for x in op.inputs) for value in op.outputs]
    return [value for value in values if is_differentiable(value)]
