"""Tensors of graphs: what one stands for in the graphs around its own, and what it was made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from cgshim_tensorflow._private import autograph
from cgshim_tensorflow._record import is_watched, running_rule
from cgshim_tensorflow._values import is_eager

Tensor = Any

OPEN = ("Placeholder", "PlaceholderWithDefault")


def in_this_graph(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of the graph that is being built, if one is, and the values of variables."""
    values = [tf.convert_to_tensor(x) if isinstance(x, tf.Variable) else x for x in tensors]
    if tf.executing_eagerly():
        return values
    capture = getattr(tf.compat.v1.get_default_graph(), "capture", None)
    return (
        [tf.nest.map_structure(capture, x, expand_composites=True) for x in values]
        if capture
        else values
    )


def converted_as_caller(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as AutoGraph has converted the caller: `if` and `while` on tensors work in
    a graph, too.
    """
    if tf.executing_eagerly():
        return function
    return autograph.tf_convert(function, ctx=autograph.control_status_ctx())  # type: ignore[no-any-return]


def stand_ins(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor, and what it stands for in the graphs around its own."""
    while tensor is not None:
        yield tensor
        captures = () if is_eager(tensor) else getattr(tensor.graph, "captures", ())
        tensor = next((external for external, internal in captures if internal is tensor), None)


def sources_beyond(tensor: Tensor, given: frozenset[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the ends of all paths back from a tensor but through the given ones, in a rule that is
    running.

    The second list has those that may yet be differentiated: arguments of a graph, and variables.
    They are in it as the graph has captured them in which the path last passed an operation: the
    gradient of a tf.cond cannot do it again.
    """
    rule = running_rule.current
    ends, may_be, seen, todo = [], [], {tensor._id}, [(tensor, tensor)]
    while todo:
        at, nearest = todo.pop()
        if at._id in given or (
            _is_read(at) and any(x._id in given for x in stand_ins(at.op.inputs[0]))
        ):
            continue
        is_end = rule is not None and rule.is_end(at._id)
        back = [] if is_eager(at) or is_end else _one_step_back(at)
        if not back:
            ends.append(at)
            if not is_eager(at) and (is_end or _is_read(at) or at.op.type in OPEN):
                may_be.append(nearest)
        for each in back:
            if each._id not in seen:
                seen.add(each._id)
                todo.append((each, each if at.op.inputs else nearest))
    return ends, may_be


def _one_step_back(tensor: Tensor) -> list[Tensor]:
    """Return what a tensor was made of, or stands for; nothing if a tape follows it from here on."""
    if _is_read(tensor):
        return []
    back = list(tensor.op.inputs) or [*stand_ins(tensor)][1:2]
    return [] if back and is_watched([tensor]) and not is_watched(back) else back


def _is_read(tensor: Tensor) -> bool:
    """Return True if a tensor is what a variable holds."""
    return not is_eager(tensor) and tensor.op.type == "ReadVariableOp"
