"""Functions on the host: run at once in the memory of eager tensors, or later as an operation of a graph."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import tensorflow as tf

from cgshim.backend import (
    CustomGradientTypeError,
    HostCall,
    Spec,
    describe,
    refuse_host_derivative,
    sentence,
)
from cgshim_tensorflow._host_graphs import in_graph, run
from cgshim_tensorflow._origins import note
from cgshim_tensorflow._private import memory_of_eager, record
from cgshim_tensorflow._values import is_composite

Tensor = Any


def host_function(call: HostCall, inputs: Sequence[Tensor], declared: Sequence[Spec], /) -> Sequence[Tensor]:
    """Return the results of a function on the host, or of the operation of a graph that will run it."""
    for x in inputs:
        if is_composite(x) or not _is_of_numbers(x.dtype):
            _refuse_no_numbers(call, type(x).__name__ if is_composite(x) else describe(x))
    for spec in declared:
        if not _is_of_numbers(spec.dtype):
            _refuse_no_numbers(call, repr(spec))
    tensors = [*map(tf.convert_to_tensor, inputs)]
    if tf.executing_eagerly():
        results = [*map(tf.constant, run(call, map(memory_of_eager, tensors)))]
    else:
        results = in_graph(call, tensors, [*map(_tensor_spec, declared)]) if declared else []
    if record.could_possibly_record():
        refuse = lambda *_: refuse_host_derivative(call.name)
        record.record_operation(call.name, results, tensors, refuse, refuse)
        note(results, tensors)
    return results


def _tensor_spec(spec: Spec) -> tf.TensorSpec:
    shape: Any = None if ... in spec.shape else spec.shape
    return tf.TensorSpec(shape, tf.as_dtype(spec.dtype))


def _refuse_no_numbers(call: HostCall, got: str) -> NoReturn:
    raise CustomGradientTypeError(
        sentence(call.name, must="what runs on the host takes and returns dense arrays of numbers", got=got,
                 do="convert it before")
    )  # fmt: skip


@functools.cache
def _is_of_numbers(dtype: Any) -> bool:
    try:
        dtype = tf.as_dtype(dtype)
    except TypeError:
        return False
    return bool(dtype.is_floating or dtype.is_complex or dtype.is_integer or dtype.is_bool)
