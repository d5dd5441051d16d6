"""MLX, with the gradients of mx.custom_function.

f runs once, on the inputs as they are in the graph, and its outputs are attached to them by a
function of MLX's own whose vjp is the rule, as f returned it. The graph has what the rule reads as
functions of the inputs, for other orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import optree

from cgshim.backend import is_differentiable
from cgshim_mlx._arrays import Array, is_tensor as is_tensor
from cgshim_mlx._run import Run
from cgshim_mlx._vjp import jvp as jvp, vjp as vjp

if TYPE_CHECKING:
    from cgshim.backend import Call


supports_variables = True


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
    return leaves, structure


def tree_unflatten(structure: Any, leaves: Sequence[Any], /) -> Any:
    return optree.tree_unflatten(structure, leaves)


def convert_to_tensor(x: Any, /, dtype: Any = None) -> Array:
    if dtype is None and isinstance(x, (np.ndarray, np.generic)):
        dtype = x.dtype.name
    if isinstance(dtype, str):
        dtype = _dtype_named(dtype)
    if isinstance(x, mx.array):
        if dtype is not None and not is_differentiable(dtype):
            x = mx.stop_gradient(x)  # what is cut off has no derivative
        return x if dtype is None else x.astype(dtype)
    return mx.array(x, dtype)


def _dtype_named(name: str) -> mx.Dtype:
    dtype = getattr(mx, "bool_" if name == "bool" else name, None)
    if not isinstance(dtype, mx.Dtype):
        raise TypeError(f"MLX has no dtype {name}")
    return dtype


def convert_to_numpy(x: Array, /) -> Any:
    # NumPy has no bfloat16 of its own
    return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)


def stop_gradient(x: Array, /) -> Array:
    return mx.stop_gradient(x)


def custom_gradient(call: Call, inputs: Sequence[Array], /) -> Any:
    run = Run(call, inputs)
    return run.rule.output.combine(run.outputs)
