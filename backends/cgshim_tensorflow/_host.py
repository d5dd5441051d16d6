"""Functions on the host: run eagerly on the values of tensors, or by `tf.numpy_function`."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from cgshim.backend import (
    CustomGradientTypeError,
    CustomGradientValueError,
    Tensor,
    TransformationError,
    describe,
    dtype_name,
    is_differentiable,
    is_in_op,
    is_in_rule,
    refusal,
)
from cgshim.host.backend import HostCall, Spec, refuse_host_derivative
from cgshim_tensorflow import _tensors
from cgshim_tensorflow._forward import count_accumulators, operation_in_orders, state
from cgshim_tensorflow._private import is_recorded, set_converter


def host_function(call: HostCall, inputs: Sequence[Tensor], /) -> Sequence[Tensor]:
    """Return a host function's results, whose derivative raises an error."""
    for x in (*inputs, *call.results):
        if _tensors.is_composite(x) or not (
            is_differentiable(x.dtype) or dtype_name(x.dtype).startswith(("bool", "int", "uint"))
        ):
            raise refusal(CustomGradientTypeError, call.name,
                          must="what runs on the host takes and returns dense arrays of numbers",
                          got=type(x).__name__ if _tensors.is_composite(x) else describe(x),
                          do="convert it before")  # fmt: skip
    tensors = [*map(tf.convert_to_tensor, inputs)]
    if tf.executing_eagerly():
        # NumPy does not read a scalar bfloat16 tensor (TensorFlow 2.21)
        arrays = [np.asarray(x if x.shape.rank else x.numpy()) for x in tensors]
        results = [*map(tf.constant, call.run(arrays))]
    else:
        results = _in_graph(call, tensors)
    if not is_recorded():
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

    def refuse(*_: Tensor) -> NoReturn:
        refuse_host_derivative(name)

    def constant_in_f(*_: Tensor) -> Sequence[None]:
        if not is_in_op() or is_in_rule():
            refuse_host_derivative(name)
        return [None] * len(inputs)

    outputs, orders = operation_in_orders(name, results, refuse, constant_in_f, inputs)
    if orders and count_accumulators([*given, *inputs]) > count_accumulators(given):
        refuse_host_derivative(name)  # for an accumulator that f opens
    return outputs


def _in_graph(call: HostCall, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the results of an operation that calls the host later."""
    sizes: list[Any] = [None if ... in y.shape else y.shape for y in call.results]
    shapes = [*map(tf.TensorShape, sizes)]
    are_known = all(shape.is_fully_defined() for shape in (*shapes, *[x.shape for x in inputs]))
    own = random.SystemRandom().getrandbits(62)

    def run(number: Any, *arrays: Any) -> list[Any]:
        if number != own:  # TensorFlow numbers such functions from 0 in every process
            raise refusal(TransformationError, call.name,
                          must="a function on the host stays in its process",
                          got="a graph of another process", do="save what does without it")  # fmt: skip
        # a declaration needs only the backend's pytree functions
        known = call if are_known else call.declared(_tensors, arrays)  # type: ignore[arg-type]
        results = known.run([*map(np.asarray, arrays)])
        for result, shape in zip(results, shapes, strict=True):
            if not shape.is_compatible_with(result.shape):
                traced = Spec(tuple(shape), result.dtype)
                raise refusal(CustomGradientValueError, call.name,
                              must=f"the declared outputs must have the shape {traced} as when traced",
                              got=describe(result), do="return None for what depends on an unknown size")  # fmt: skip
        return results

    # XLA names the operation that it cannot compile
    name = re.sub(r"[^A-Za-z0-9_.]", "_", f"host_function_{call.name}_without_jit_compile")
    results = tf.numpy_function(
        run, [tf.constant(own, tf.int64), *inputs], [tf.as_dtype(y.dtype) for y in call.results],
        stateful=False, name=name,
    )  # fmt: skip
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    set_converter(results[0].op, functools.partial(_over_iterations, call))
    return list(results)


def _over_iterations(call: HostCall, pfor_input: Any) -> list[Any]:
    """Return the results of all iterations of a vectorized loop, by one call on the host."""
    inputs = pfor_input.inputs[1:]
    if any(x.is_sparse_stacked for x in inputs):
        raise refusal(TransformationError, call.name,
                      must="vectorized_map needs one shape for all iterations",
                      got="the parts of sparse tensors", do="convert them to dense ones before")  # fmt: skip
    results = _in_graph(call.over([x.is_stacked for x in inputs]), [x.t for x in inputs])
    return [inputs[0]._replace(t=y, is_stacked=True) for y in results]
