"""tinygrad, with the gradients of its calls.

f runs once, on constants, and its outputs become one call in tinygrad's graph, whose grad_fxn is
the rule. What it returns shows what it has read: to connect that, the arguments take the places of
the constants in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import optree
from tinygrad import Tensor, dtypes

from cgshim.backend import is_differentiable
from cgshim_tinygrad._ops import numpy_function as numpy_function
from cgshim_tinygrad._run import Run
from cgshim_tinygrad._tensors import (
    dtype_name as dtype_name,
    dtype_named,
    is_tensor as is_tensor,
    on_device,
)
from cgshim_tinygrad._vjp import vjp as vjp

if TYPE_CHECKING:
    from cgshim.backend import Call


supports_variables = True


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
    return leaves, structure


def tree_unflatten(structure: Any, leaves: Sequence[Any], /) -> Any:
    return optree.tree_unflatten(structure, leaves)


def convert_to_tensor(x: Any, /, dtype: Any = None) -> Tensor:
    if isinstance(dtype, str):
        dtype = dtype_named(dtype)
    if isinstance(x, Tensor):
        if dtype is not None and not is_differentiable(dtype):
            x = x.detach()  # what is cut off has no derivative
        return x if dtype is None else x.cast(dtype)
    if not isinstance(x, (np.ndarray, np.generic)):
        x = np.asarray(x, None if dtype is not None else _default_of(x))
    if dtype is None:
        dtype = dtype_named(x.dtype.name)
    if x.dtype.name == "bfloat16":  # tinygrad takes no such array of NumPy's
        x = x.astype("float32")
    return on_device(Tensor(np.ascontiguousarray(x).reshape(x.shape), dtype=dtype))


def _default_of(x: Any) -> str | None:
    """The dtype that tinygrad has for numbers without one."""
    kind = np.asarray(x).dtype.kind
    return {"f": dtype_name(dtypes.default_float), "i": dtype_name(dtypes.default_int)}.get(kind)


def convert_to_numpy(x: Tensor, /) -> Any:
    values = on_device(x).detach()
    return (values.cast(dtypes.float32) if x.dtype == dtypes.bfloat16 else values).numpy()


def stop_gradient(x: Tensor, /) -> Tensor:
    return x.detach()


def custom_gradient(call: Call, inputs: Sequence[Tensor], /) -> Any:
    run = Run(call, inputs)
    return run.rule.output.combine(run.outputs)
