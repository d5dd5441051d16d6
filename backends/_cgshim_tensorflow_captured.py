"""What f reads without being given it: trainable variables, and tensors that are differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf
from _cgshim_tensorflow_origins import (
    OPEN,
    Origins,
    in_this_graph,
    is_watched,
    may_be_differentiated,
    sources_beyond,
    stand_ins,
)
from _cgshim_tensorflow_values import is_differentiable, parts_of
from tensorflow.python.eager import record
from tensorflow.python.eager.forwardprop_util import pack_tangents
from tensorflow.python.eager.record import VariableWatcher
from tensorflow.python.framework.ops import uid

from cgshim.backend import RuleScope

if TYPE_CHECKING:
    from cgshim._call import Call
    from cgshim._convention import Rule

Tensor = Any

running_rule: RuleScope[Origins] = RuleScope("cgshim_tensorflow_running_rule")
"""the rule that is running, and where what it reads comes from"""


class Run(NamedTuple):
    """What one run of f left behind."""

    outputs: list[Tensor]
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
    with VariableWatcher() as watcher:
        if not eager:
            outputs, rule, read = _run_in_graph(call, inputs)
        elif record.could_possibly_record():
            outputs, rule, read = _run_eagerly(call, inputs, origins)
        else:
            (outputs, rule), read = call(inputs), []
    variables = sorted(watcher.watched_variables(), key=lambda variable: variable._unique_id)
    speaks_for = _identities([*inputs, *given, *variables])
    read = _without_tangents([tensor for tensor in read if is_differentiable(tensor)], inputs)
    tell_apart = _watched if eager else _watched_in_graph
    watched, unknown = tell_apart(read, speaks_for, origins)
    if watched and not rule.takes_variables:
        call.refuse_captured(watched[0])
    rule.require_variables(variables)
    return Run(outputs, rule, [*variables, *watched], unknown, origins)


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


def _run_eagerly(call: Call, inputs: Sequence[Tensor], origins: Origins) -> tuple[list[Tensor], Rule, list[Tensor]]:
    """f's outputs and rule, and the tensors that it read: older than the run, and not given."""
    given = {x._id for x in parts_of(inputs)}
    read: dict[int, Tensor] = {}
    start = uid()

    def notice(op_type: str, tensors: Sequence[Tensor], *_: Any) -> None:
        read.update({t._id: t for t in tensors if t._id < start and t._id not in given})

    with origins.followed(notice):
        outputs, rule = call(inputs)
    notice("output", parts_of(outputs))
    return outputs, rule, list(read.values())


def _run_in_graph(call: Call, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Rule, list[Tensor]]:
    """f's outputs and rule, and the tensors that it read: not made by its own operations, and not given."""
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    outputs, rule = call(inputs)
    made = graph.get_operations()[before:]
    results = parts_of([in_this_graph(output) for output in outputs])
    known = {t._id for op in made if op.type not in _READ_ONLY for t in op.outputs} | {x._id for x in parts_of(inputs)}
    read = {t._id: t for tensors in (*[op.inputs for op in made], results) for t in tensors}
    return outputs, rule, [tensor for at, tensor in read.items() if at not in known]


_READ_ONLY = ("Const", *OPEN)
