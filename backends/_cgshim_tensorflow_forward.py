"""A rule in forward mode: its transpose, where the rule is linear."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

Tensor = Any
Backward = Callable[..., Sequence[Tensor | None]]
"""From one upstream gradient an output, None where it was not used, to one gradient a source."""


def is_linear(backward: Backward, values: Sequence[Tensor]) -> bool:
    """Whether the transpose of a rule can be seen not to depend on where it was taken."""
    with graph_of(values[0]):
        transpose = tf.function(functools.partial(_transpose, backward), autograph=False)
        try:
            graph = transpose.get_concrete_function(*[tf.TensorSpec(v.shape, v.dtype) for v in values]).graph
        except (TypeError, AttributeError, NotImplementedError):  # the rule wants values where a graph has none
            return False
    return not _ancestors(graph.outputs) & {upstream.op for upstream in graph.inputs[: len(values)]}


def _transpose(backward: Backward, *upstreams: Tensor) -> list[Tensor]:
    """What a ForwardAccumulator makes of a rule, for tangents of ones."""
    watched = [upstream for upstream in upstreams if is_differentiable(upstream)]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(watched)
        gradients = [gradient for gradient in backward(*upstreams) if gradient is not None]
    return [tangent for tangent in tape.gradient(gradients, watched) if tangent is not None]


_SHAPES = frozenset(["Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike", "BroadcastGradientArgs"])


def _ancestors(tensors: Iterable[Tensor]) -> set[Any]:
    """The operations whose values, not just whose shapes, the tensors depend on."""
    found: set[Any] = set()
    todo = [tensor.op for tensor in tensors]
    while todo:
        op = todo.pop()
        if op not in found and op.type not in _SHAPES:
            found.add(op)
            todo += [tensor.op for tensor in op.inputs]
    return found


def graph_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """The graph that a tensor was made in, as the one to build on; nothing for an eager tensor."""
    eager = isinstance(tensor, tf.__internal__.EagerTensor)
    return contextlib.nullcontext() if eager else tensor.graph.as_default()


def is_differentiable(tensor: Tensor) -> bool:
    """Whether the tensor has a gradient: the floats and the complex numbers."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)
