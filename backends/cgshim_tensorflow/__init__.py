"""TensorFlow's backend: rules as gradients on tapes, in graphs and in forward mode.

A call comes in by `custom_gradient`. `_run` runs f, of which `_record` notes what it computes, and
finds what it read; `_gradient` makes its rule the gradient of its outputs, which `_rule` records,
and vectorizes. In a second order, and in forward mode, `_outputs` connects what the rule reads of
f. `_fits` checks what the rule returns, and `_forward` whether it is linear.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import tensorflow as tf
from optree import tree_unflatten as tree_unflatten

from cgshim.backend import (
    Call,
    Tensor,
    WithBatches,
    has_no_derivative,
    imported_when_called,
    output_without_rule,
)
from cgshim_tensorflow._gradient import attach_rule
from cgshim_tensorflow._outputs import Tangents
from cgshim_tensorflow._private import (
    EagerTensor,
    WeakTensor,
    default_types,
    pack_tangents,
)
from cgshim_tensorflow._pullback import transposed as transposed, vjp as vjp
from cgshim_tensorflow._record import (
    converted_as_caller as converted_as_caller,
    in_this_graph,
    needed_among,
)
from cgshim_tensorflow._rule import mapped as mapped, run_again as run_again
from cgshim_tensorflow._run import run_f
from cgshim_tensorflow._trees import tree_flatten as tree_flatten
from cgshim_tensorflow._values import detached, is_composite, values_of, with_values

vjp_with_variables = vjp


def is_tensor(x: object, /) -> bool:
    return isinstance(x, _TENSORS)


# tf.is_tensor is true of a Keras Variable too. The class of nearly all of them comes first.
_TENSORS = (
    EagerTensor,
    tf.Tensor,
    tf.Variable,
    WeakTensor,
    tf.RaggedTensor,
    tf.SparseTensor,
    tf.IndexedSlices,
)


def convert_to_tensor(x: Any, /, dtype: Any = None) -> Tensor:
    dtype = None if dtype is None else tf.as_dtype(dtype)
    if hasattr(x, "dtype"):  # a tensor or an array is cast; a number is read in its dtype at once
        x = x if is_composite(x) else tf.convert_to_tensor(x)
        return x if dtype in (None, x.dtype) else tf.cast(x, dtype)
    return tf.convert_to_tensor(x, dtype)


def convert_to_numpy(x: Tensor, /) -> Any:
    x = tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else x
    return x.numpy() if isinstance(x, tf.RaggedTensor) else tf.convert_to_tensor(x).numpy()


def stop_gradient(x: Tensor, /) -> Tensor:
    return with_values(x, tf.stop_gradient(values_of(x)))


numpy_function = imported_when_called("cgshim_tensorflow._ops", "numpy_function")
numpy_function_of = imported_when_called("cgshim_tensorflow._ops", "numpy_function_of")
host_function = imported_when_called("cgshim_tensorflow._host", "host_function")


def custom_gradient(call: Call, inputs: Sequence[Tensor], /) -> Any:
    """Run f, and return its output with its rule as the gradient."""
    if type(call.f) is not FunctionType and has_no_derivative(call.f):
        return output_without_rule(call, inputs)
    converted = in_this_graph(inputs)
    if isinstance(call.f, WithBatches) and not (
        tf.executing_eagerly() or any(map(is_composite, inputs))
    ):
        # a vectorized_map may be around the graph
        if pack_tangents([*map(values_of, converted)]).tangents:
            call.refuse("in a graph, an op with a rule for batches has derivatives in reverse mode",
                        "a ForwardAccumulator", "leave out vmap=, or use reverse mode")  # fmt: skip
        return call.f.mapped(call, converted, converted_as_caller(call.f.held_function))
    call = call.with_f(converted_as_caller(call.f))
    if call.takes_needs_input_grad:
        call = call.with_needs_input_grad(needed_among([*map(values_of, converted)]))
    tensors, tangents = converted, None
    if call.once_differentiable:
        tensors = [*map(detached, converted)]
    elif pack_tangents([*map(values_of, converted)]).tangents:
        tangents = Tangents(call.name, converted)
        tensors = tangents.stand_ins
    run = run_f(call, tensors, inputs, tangents)
    sources = [*map(values_of, converted), *map(tf.convert_to_tensor, run.variables), *run.unknown]
    return run.rule.output.combine(attach_rule(call, run, tensors, sources))


def tracing_type(op: Any) -> Any:
    """Return what tf.function knows an op by that it takes as an argument: the op itself, or what
    a method is bound to.
    """
    is_method = hash(op) != object.__hash__(op)
    return default_types.Literal(op) if is_method else default_types.Weakref(weakref.ref(op))


def jvp(
    fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], tangents: Sequence[Tensor], /
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    with tf.autodiff.ForwardAccumulator(list(inputs), list(tangents)) as accumulator:
        outputs = list(fn(*inputs))
    zero = tf.UnconnectedGradients.ZERO
    return outputs, list(accumulator.jvp(outputs, unconnected_gradients=zero))
