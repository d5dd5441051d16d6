"""Functions on the host: run at once on the values of eager tensors, or by `tf.numpy_function`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from cgshim.backend import (
    CustomGradientTypeError,
    CustomGradientValueError,
    Tensor,
    describe,
    is_in_op,
    is_in_rule,
    refusal,
)
from cgshim.host.backend import HostCall, Spec, refuse_host_derivative
from cgshim_tensorflow._forward import count_accumulators, operation, state
from cgshim_tensorflow._private import is_recorded, set_converter
from cgshim_tensorflow._tensors import is_composite


def host_function(
    call: HostCall, inputs: Sequence[Tensor], declared: Sequence[Spec], /
) -> Sequence[Tensor]:
    """Return the results of a function on the host; a derivative of them raises an error."""
    for x in (*inputs, *declared):
        if is_composite(x) or not _is_of_numbers(x.dtype):
            raise refusal(CustomGradientTypeError, call.name,
                          must="what runs on the host takes and returns dense arrays of numbers",
                          got=type(x).__name__ if is_composite(x) else describe(x),
                          do="convert it before")  # fmt: skip
    tensors = [*map(tf.convert_to_tensor, inputs)]
    if tf.executing_eagerly():
        results = [*map(tf.constant, _run(call, [x.numpy() for x in tensors]))]
    else:
        results = _in_graph(call, tensors, declared)
    if not results or not is_recorded():
        return results
    return _without_derivative(call.name, results, tensors)


def _without_derivative(
    name: str, results: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return the results, whose derivative raises an error.

    Forward mode through an op needs no tangents of them: they are constants in f.
    """
    given = state.inputs
    if given is None:
        refuse_host_derivative(name)
    is_made = is_followed = False

    def gradient(*_: Tensor) -> Sequence[Tensor | None]:
        nonlocal is_followed
        is_followed = True
        if is_made or not is_in_op() or is_in_rule():
            refuse_host_derivative(name)
        return [None] * len(inputs)

    outputs = operation(name, results, gradient, inputs)
    is_made = True
    if is_followed and count_accumulators([*given, *inputs]) > count_accumulators(given):
        refuse_host_derivative(name)  # for an accumulator that f has opened
    return outputs


@functools.cache
def _is_of_numbers(dtype: Any) -> bool:
    try:
        dtype = tf.as_dtype(dtype)
    except TypeError:
        return False
    return bool(dtype.is_floating or dtype.is_complex or dtype.is_integer or dtype.is_bool)


def _run(call: HostCall, values: Iterable[Any]) -> list[Any]:
    """Return the results for these values, which f cannot write to."""
    arrays = [np.asarray(value) for value in values]
    for array in arrays:
        array.flags.writeable = False
    return list(call.run(arrays))


def _in_graph(call: HostCall, inputs: Sequence[Tensor], declared: Sequence[Spec]) -> list[Tensor]:
    """Return the results, of these specs, of an operation that will call the host."""
    shapes = [tf.TensorShape(None if ... in y.shape else y.shape) for y in declared]

    def run(*arrays: Any) -> list[Any]:
        results = _run(call, arrays)
        for result, shape in zip(results, shapes, strict=True):
            if not shape.is_compatible_with(result.shape):
                traced = Spec(tuple(shape), result.dtype)
                raise refusal(CustomGradientValueError, call.name,
                              must=f"outputs must return the shape {traced} as when it was traced",
                              got=describe(result), do="return None for what depends on an unknown size")  # fmt: skip
        return results

    if not declared:
        return []
    dtypes = [tf.as_dtype(y.dtype) for y in declared]
    results = tf.numpy_function(run, inputs, dtypes, stateful=False)
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    set_converter(results[0].op, functools.partial(_over_iterations, call, declared))
    return list(results)


def _over_iterations(call: HostCall, declared: Sequence[Spec], pfor_input: Any) -> list[Any]:
    """Return the results of all iterations of a vectorized loop, by one call on the host."""
    inputs = pfor_input.inputs
    over = [Spec((None, *(() if ... in y.shape else y.shape)), y.dtype) for y in declared]
    results = _in_graph(call.over([x.is_stacked for x in inputs]), [x.t for x in inputs], over)
    return [inputs[0]._replace(t=y, is_stacked=True) for y in results]
