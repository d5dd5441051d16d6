"""Undocumented names of TensorFlow. Seen in TensorFlow 2.21."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from cgshim.backend import Tensor

record_operation = record.record_operation
"""`tf.custom_gradient` calls it in eager mode"""


def is_recorded() -> bool:
    """Return True if the derivative of the running code may be taken.

    Without tapes an eager op costs no more than f.
    """
    return bool(record.could_possibly_record()) or not tf.executing_eagerly()


def is_watched(tensor: Tensor) -> bool:
    """Return True if a tape records results of a tensor or a variable.

    A watched tensor that f captures is a variable of the op, and `needs_input_grad` is exact.
    """
    return bool(record.should_record_backprop([getattr(tensor, "handle", tensor)]))


def converter() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return AutoGraph's converter (`if` and `while` on tensors), if the caller was converted.

    `tf.autograph.to_graph` converts in every case. Keras calls these two functions as well.
    """
    if tf.executing_eagerly():
        return lambda function: function
    autograph = tf.__internal__.autograph
    return functools.partial(autograph.tf_convert, ctx=autograph.control_status_ctx())


def set_converter(operation: Any, convert: Callable[[Any], list[Any]]) -> None:
    """Make `tf.vectorized_map` call ``convert(pfor_input)`` for an operation."""
    operation.pfor_converter = convert


def converted(pfor_input: Any, tensor: Tensor) -> tuple[Tensor, bool]:
    """Return a tensor in the body of a vectorized loop, for all iterations.

    The second result is True if the first axis is the iterations. `PFor.convert` would repeat the
    tensors that are the same for all.
    """
    if not hasattr(tensor, "graph"):  # an eager tensor
        return tensor, False
    x = pfor_input.pfor._convert_helper(tensor)
    return x.t, x.is_stacked
