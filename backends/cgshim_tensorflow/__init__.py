"""TensorFlow's backend: a rule is the gradient of a `tf.custom_gradient`.

`_op` runs f and attaches its rule. `_forward` records operations with a gradient, and transposes it
in forward mode. `_vectorized` supports `tf.vectorized_map`, and `_host` supports `op_host`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from cgshim.backend import (
    Call,
    Tensor,
    WithBatches,
    has_no_derivative,
    imported_when_called,
    output_without_rule,
)
from cgshim_tensorflow._forward import count_accumulators, transposed as transposed, vjp as vjp
from cgshim_tensorflow._op import run_op
from cgshim_tensorflow._private import converter
from cgshim_tensorflow._tensors import (
    is_composite,
    is_weak,
    tree_flatten as tree_flatten,
    tree_unflatten as tree_unflatten,
    values_of,
    with_values,
)
from cgshim_tensorflow._vectorized import mapped as mapped

supports_variables = True
vjp_with_variables = vjp
numpy_function = imported_when_called("cgshim_tensorflow._ops", "numpy_function")
numpy_function_of = imported_when_called("cgshim_tensorflow._ops", "numpy_function_of")
host_function = imported_when_called("cgshim_tensorflow._host", "host_function")

_TENSORS = (tf.Tensor, tf.Variable, tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)


def is_tensor(x: object, /) -> bool:
    return isinstance(x, _TENSORS) or is_weak(x)


def convert_to_tensor(x: Any, /, dtype: Any = None) -> Tensor:
    dtype = None if dtype is None else tf.as_dtype(dtype)
    if hasattr(x, "dtype"):  # cast a tensor or an array; read a number in its dtype at once
        x = x if is_composite(x) else tf.convert_to_tensor(x)
        return x if dtype in (None, x.dtype) else tf.cast(x, dtype)
    return tf.convert_to_tensor(x, dtype)


def convert_to_numpy(x: Tensor, /) -> Any:
    x = tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else x
    return x.numpy() if isinstance(x, tf.RaggedTensor) else tf.convert_to_tensor(x).numpy()


def stop_gradient(x: Tensor, /) -> Tensor:
    return with_values(x, tf.stop_gradient(values_of(x)))


def custom_gradient(call: Call, inputs: Sequence[Tensor], /) -> Any:
    """Run f, and return its output with its rule as the gradient."""
    if type(call.f) is not types.FunctionType and has_no_derivative(call.f):
        return output_without_rule(call, inputs)
    if isinstance(call.f, WithBatches) and not (
        tf.executing_eagerly() or any(map(is_composite, inputs))
    ):
        inputs = [*map(tf.convert_to_tensor, inputs)]
        if not count_accumulators(inputs):  # tf.vectorized_map may be around the graph
            return call.f.mapped(call, inputs, converted_as_caller(call.f.held_function))
    return run_op(call, inputs)


def converted_as_caller(function: Any) -> Any:
    return converter()(function)


@dataclass(frozen=True)
class _TypeOfOp(tf.types.experimental.TraceType):  # type: ignore[misc]
    """The type of one op. Methods of an op are equal if they are bound to the same object."""

    op: Any

    def is_subtype_of(self, other: Any) -> bool:
        return bool(self == other)

    def most_specific_common_supertype(self, others: Any) -> Any:
        return self if all(self == other for other in others) else None

    def placeholder_value(self, _: Any) -> Any:
        return self.op


tracing_type = _TypeOfOp


def jvp(
    fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], tangents: Sequence[Tensor], /
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    with tf.autodiff.ForwardAccumulator(list(inputs), list(tangents)) as accumulator:
        outputs = list(fn(*inputs))
    return outputs, accumulator.jvp(outputs, tf.UnconnectedGradients.ZERO)
