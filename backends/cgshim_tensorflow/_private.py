"""Whatever is taken from TensorFlow and is not documented. All of it was seen in TensorFlow 2.18
and 2.21.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import tensorflow as tf


def _python(name: str) -> Any:
    return import_module(f"tensorflow.python.{name}")


# --- Tensors and containers -----------------------------------------------------------------------

EagerTensor: Any = tf.__internal__.EagerTensor
"""the class of all eager tensors; tf.Tensor stands for those of graphs too"""
WeakTensor: Any = _python("framework.weak_tensor").WeakTensor
"""the class of tensors whose dtype gives way to others"""
_structures = _python("trackable.data_structures")
WRAPPERS = (
    (_structures.ListWrapper, list),
    (_structures._DictWrapper, dict),
    (_structures._TupleWrapper, tuple),
)
"""the classes that a tf.Module puts around lists, dicts and tuples in its attributes"""
uid: Any = _python("framework.ops").uid
"""returns a number that is greater than the `_id` of each tensor so far, and less than that of the next ones"""


def shape_of_eager(x: Any) -> tuple[int, ...]:
    """Return the shape of an eager tensor, in a tenth of the time that the first `x.shape` takes."""
    return x._shape_tuple()  # type: ignore[no-any-return]


def memory_of_eager(x: Any) -> Any:
    """Return the memory of an eager tensor as an array, or a scalar; `x.numpy()` copies it."""
    return x._numpy()


def same_memory(x: Any) -> Any:
    """Return another eager tensor in the memory of x, in a seventh of the time that an Identity
    takes.
    """
    return x._copy_to_device(x.backing_device)


# --- Tapes and accumulators -----------------------------------------------------------------------

record: Any = _python("eager.record")
"""whether a tape records; how a gradient is recorded; VariableWatcher"""
tapes: Any = _python("eager.tape")
"""opens the tapes of all. The first op in a graph or in forward mode replaces its `push_new_tape` for
good: nobody else tells of the tapes that a rule opens."""
pack_tangents: Any = _python("eager.forwardprop_util").pack_tangents
"""tells what has tangents; of no tensors, how many accumulators follow what is computed now"""
delete_trace: Any = _python("pywrap_tfe").TFE_Py_TapeSetDeleteTrace
"""lets all tapes that record forget how a tensor was made, as they do when it dies"""
FunctionGradients: Any = _python(
    "eager.polymorphic_function.concrete_function"
)._TapeGradientFunctions
"""builds what an accumulator runs for a tf.function. The first op in a graph replaces its method
`_build_functions_for_outputs` for good: nobody else tells of the rules in a tf.function that is transposed."""

# --- Operations as they are run -------------------------------------------------------------------

context: Any = _python("eager.context")
execute: Any = _python("eager.execute")
"""tell of each operation once `execute.execute` is `execute.execute_with_callbacks`: from the first listener on"""
check_numerics_callback: Any = _python("debug.lib.check_numerics_callback")
"""knows whether every NaN is an error"""

# --- Graphs ---------------------------------------------------------------------------------------

autograph: Any = tf.__internal__.autograph
"""converts a function as its caller was converted"""
default_types: Any = import_module("tensorflow.core.function.trace_type.default_types")
"""what tf.function knows an argument by"""
LegacyGraph: Any = _python("framework.function")._FuncGraph
"""the graph of the legacy Defun, which keeps no gradients"""
gradient_registry: Any = _python("framework.ops").gradient_registry
"""where a gradient is taken out again that nobody can ask for"""
is_compiled_by_xla: Any = _python("ops.control_flow_util").GraphOrParentsInXlaContext
"""tells whether XLA compiles a graph"""
random_operations: Any = _python("framework.auto_control_deps").LEGACY_RANDOM_OPS
"""the types of operations that draw random numbers, but those of a tf.random.Generator"""
wrap_for_pfor: Any = _python("ops.parallel_for.pfor").wrap
"""makes what a converter of tf.vectorized_map returns"""
python_functions: Any = _python("ops.script_ops")._py_funcs._funcs
"""the Python functions that graphs call, by their tokens, as long as they live"""


def function_in(graph: Any, name: str) -> Any:
    """Return the graph of a function that a graph calls; None if it knows none by this name."""
    function = graph._get_function(name)
    return getattr(function, "graph", None)
