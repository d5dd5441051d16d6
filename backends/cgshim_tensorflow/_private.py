"""Undocumented names of TensorFlow. Seen in TensorFlow 2.21."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import gradients_util

from cgshim.backend import Tensor

record_operation = record.record_operation
"""`tf.custom_gradient` calls it in eager mode"""


def is_recorded() -> bool:
    """Return True if the derivative of the running code may be taken.

    Without tapes an eager op costs no more than f.
    """
    return bool(record.could_possibly_record()) or not tf.executing_eagerly()


def followers(tensors: Sequence[Tensor]) -> int:
    """Return how many tapes and accumulators follow any of the tensors; 2 stands for more.

    A captured tensor that has a follower is a variable of the op, and `needs_input_grad` is exact.
    """
    return int(gradients_util.PossibleTapeGradientTypes(tensors))


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
