"""Functions on the host: run at once in the memory of eager tensors, or later as an operation of a
graph.

The operation is that of tf.numpy_function. But equal calls share an entry in TensorFlow's registry
of Python functions, which has no end; no other process mistakes an entry for its own; and a
vectorized loop calls the host once.
"""

from __future__ import annotations

import functools
import re
import threading
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from cgshim.backend import (
    CustomGradientTypeError,
    CustomGradientValueError,
    Tensor,
    TransformationError,
    describe,
    refusal,
    sentence,
)
from cgshim.host.backend import HostCall, Spec, refuse_host_derivative
from cgshim_tensorflow._private import (
    is_compiled_by_xla,
    memory_of_eager,
    python_functions,
    record,
    wrap_for_pfor,
)
from cgshim_tensorflow._record import note
from cgshim_tensorflow._values import is_composite

Array = Any


def host_function(
    call: HostCall, inputs: Sequence[Tensor], declared: Sequence[Spec], /
) -> Sequence[Tensor]:
    """Return the results of a function on the host, or of the operation of a graph that will run
    it.
    """
    for x in (*inputs, *declared):
        if is_composite(x) or not _is_of_numbers(x.dtype):
            raise refusal(CustomGradientTypeError, call.name,
                          must="what runs on the host takes and returns dense arrays of numbers",
                          got=type(x).__name__ if is_composite(x) else describe(x),
                          do="convert it before")  # fmt: skip
    tensors = [*map(tf.convert_to_tensor, inputs)]
    if tf.executing_eagerly():
        results = [*map(tf.constant, _run(call, map(memory_of_eager, tensors)))]
    else:
        shapes: list[Any] = [None if ... in y.shape else y.shape for y in declared]
        specs = [
            tf.TensorSpec(shape, tf.as_dtype(y.dtype))
            for shape, y in zip(shapes, declared, strict=True)
        ]
        results = _in_graph(call, tensors, specs) if declared else []
    if record.could_possibly_record():
        refuse = lambda *_: refuse_host_derivative(call.name)
        record.record_operation(call.name, results, tensors, refuse, refuse)
        note(results, tensors)
    return results


@functools.cache
def _is_of_numbers(dtype: Any) -> bool:
    try:
        dtype = tf.as_dtype(dtype)
    except TypeError:
        return False
    return bool(dtype.is_floating or dtype.is_complex or dtype.is_integer or dtype.is_bool)


# --- In a graph -----------------------------------------------------------------------------------


def _run(call: HostCall, values: Iterable[Array]) -> list[Array]:
    """Return the results for values in the memory of tensors: f gets locked views, and cannot
    unlock those either.
    """
    arrays = [np.asarray(value) for value in values]  # TensorFlow gives a scalar as no array
    for array in arrays:
        array.flags.writeable = False
    return call.run(arrays)


def _in_graph(
    call: HostCall, inputs: Sequence[Tensor], specs: Sequence[tf.TensorSpec]
) -> list[Tensor]:
    """Return the results, of these specs, of an operation that will call the host."""
    graph = tf.compat.v1.get_default_graph()
    if is_compiled_by_xla(graph):
        raise refusal(TransformationError, call.name, must="XLA cannot call the host",
                      got="jit_compile=True", do="compile without it")  # fmt: skip
    function = _function_of(call, specs)
    # XLA tells this name if it comes to the operation later, in a function that was traced before.
    name = re.sub(r"[^A-Za-z0-9_.]", "_", f"host_function_{call.name}_without_jit_compile")
    with (
        record.stop_recording(),
        graph.gradient_override_map({"PyFuncStateless": _gradient_of(call.name)}),
    ):
        results = tf.raw_ops.PyFuncStateless(
            input=inputs, token=function.token, Tout=[spec.dtype for spec in specs], name=name
        )
    for result, spec in zip(results, specs, strict=True):
        result.set_shape(spec.shape)
        result.op.pfor_converter = functools.partial(_over_iterations, function)
    return list(results)


def _over_iterations(function: _Function, pfor_input: Any) -> list[Any]:
    """Return the results of all iterations of a loop, by one call on the host."""
    call, inputs = function.call, pfor_input.inputs
    if any(x.is_sparse_stacked for x in inputs):
        raise refusal(TransformationError, call.name,
                      must="vectorized_map needs one shape for all iterations",
                      got="the parts of sparse tensors", do="convert them to dense ones before")  # fmt: skip
    specs = [
        tf.TensorSpec(tf.TensorShape([None]).concatenate(y.shape), y.dtype)
        for y in pfor_input.op.outputs
    ]
    results = _in_graph(call.over([x.is_stacked for x in inputs]), [x.t for x in inputs], specs)
    return [wrap_for_pfor(result, True) for result in results]


class _Function:
    """What a graph calls. It finds it by the token, which is what TensorFlow tells if there is no
    such function.
    """

    def __init__(self, call: HostCall, specs: Sequence[tf.TensorSpec]) -> None:
        self.call = call
        self._shapes = [spec.shape for spec in specs]
        elsewhere = _stays_in_its_process(call.name, "a graph of another process")
        self.token = f"{elsewhere} ({uuid.uuid4().hex})"

    def __call__(self, *arrays: Array) -> list[Array]:
        results = _run(self.call, arrays)
        for result, shape in zip(results, self._shapes, strict=True):
            if not shape.is_compatible_with(result.shape):
                traced = Spec(tuple(shape), result.dtype)
                raise refusal(CustomGradientValueError, self.call.name,
                              must=f"outputs must return the shape {traced} as when it was traced",
                              got=describe(result), do="return None for what depends on an unknown size")  # fmt: skip
        return results


_lock = threading.Lock()


def _function_of(call: HostCall, specs: Sequence[tf.TensorSpec]) -> _Function:
    """Return one function for all equal calls. The outermost graph keeps it: any graph may run what
    this one traces.
    """
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    with _lock:
        if not hasattr(graph, "cgshim_host_functions"):
            graph.cgshim_host_functions = {}
    known: dict[Any, _Function] = graph.cgshim_host_functions
    made = _Function(call, specs)
    python_functions[made.token] = made  # for as long as it lives
    return known.setdefault((call, *specs), made)


@functools.cache
def _gradient_of(name: str) -> str:
    """Register a gradient that is an error, and return its name. A SavedModel asks for it too, of
    no operation.
    """

    def refuse(operation: Any, *upstreams: Any) -> NoReturn:
        if operation is not None:
            refuse_host_derivative(name)
        raise TransformationError(_stays_in_its_process(name, "a SavedModel"))

    registered = f"cgshim.op_host.{name}"
    tf.RegisterGradient(registered)(tf.autograph.experimental.do_not_convert(refuse))
    return registered


def _stays_in_its_process(name: str, got: str) -> str:
    return sentence(
        name,
        must="a function on the host stays in its process",
        got=got,
        do="save what does without it",
    )
