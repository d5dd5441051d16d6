"""tinygrad: NumPy's functions, by NumPy's names, with NumPy's parameters.

Tables name what tinygrad has as a method; what differs is a function here. cgshim defines some
others in terms of these, and says of the rest that tinygrad has nothing that gives NumPy's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes

from cgshim_tinygrad._tensors import dtype_named, on_device

Axis = int | tuple[int, ...] | None
Shape = int | Sequence[int]

_SAME = """
exp exp2 log log2 sin cos tan sinh cosh tanh sqrt square sign floor ceil trunc reciprocal abs isnan isinf isfinite
maximum minimum matmul reshape squeeze zeros_like ones_like
"""
_RENAMED = {
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh",
    "negative": "neg", "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "power": "pow",
    "logical_not": "logical_not", "less": "__lt__", "less_equal": "__le__", "greater": "__gt__",
    "greater_equal": "__ge__", "equal": "__eq__", "not_equal": "__ne__", "expand_dims": "unsqueeze",
    "concat": "cat", "special.erf": "erf", "special.expit": "sigmoid",
}  # fmt: skip
_METHODS = {name: name for name in _SAME.split()} | _RENAMED


def numpy_function(name: str, /) -> Callable[..., Any] | None:
    own: Callable[..., Any] | None = globals().get(f"np_{name}")
    return own or getattr(Tensor, _METHODS.get(name, ""), None)


# --- Reductions -----------------------------------------------------------------------------------


def np_sum(a: Tensor, axis: Axis = None, dtype: Any = None, *, keepdims: bool = False) -> Tensor:
    return (a if dtype is None else a.cast(_dtype(dtype))).sum(axis, keepdim=keepdims)


def np_mean(a: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    return a.mean(axis, keepdim=keepdims)


def np_max(a: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    return a.max(axis, keepdim=keepdims)


def np_min(a: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    return a.min(axis, keepdim=keepdims)


def np_prod(a: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    return a.prod(axis, keepdim=keepdims)


# --- Shapes ---------------------------------------------------------------------------------------


def np_transpose(a: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    return a.permute(*(range(a.ndim)[::-1] if axes is None else axes))


def np_swapaxes(a: Tensor, axis1: int, axis2: int) -> Tensor:
    return a.transpose(axis1, axis2)


def np_concatenate(arrays: Sequence[Tensor], axis: int = 0) -> Tensor:
    return Tensor.cat(*arrays, dim=axis)


def np_stack(arrays: Sequence[Tensor], axis: int = 0) -> Tensor:
    return Tensor.stack(*arrays, dim=axis)


def np_ravel(a: Tensor) -> Tensor:
    return a.reshape(-1)


def np_broadcast_to(array: Tensor, shape: Shape) -> Tensor:
    return array.expand(*_shape(shape))


def np_where(condition: Tensor, x: Any, y: Any) -> Tensor:
    return condition.cast(dtypes.bool).where(x, y)


def np_real(val: Tensor) -> Tensor:
    return val  # tinygrad has no complex numbers


def np_conj(x: Tensor) -> Tensor:
    return x


# --- New tensors ----------------------------------------------------------------------------------


def np_zeros(shape: Shape, dtype: Any = None) -> Tensor:
    return np_full(shape, 0.0, dtype)


def np_ones(shape: Shape, dtype: Any = None) -> Tensor:
    return np_full(shape, 1.0, dtype)


def np_full(shape: Shape, fill_value: float, dtype: Any = None) -> Tensor:
    wanted = _dtype(dtype) or (dtypes.default_float if isinstance(fill_value, float) else None)
    return on_device(Tensor.full(_shape(shape), fill_value, dtype=wanted))


def np_eye(n: int, m: int | None = None, *, dtype: Any = None) -> Tensor:
    return on_device(Tensor.eye(n, m, dtype=_dtype(dtype) or dtypes.default_float))


def np_arange(*limits: float, dtype: Any = None) -> Tensor:
    return on_device(Tensor.arange(*limits, dtype=_dtype(dtype)))


def np_linspace(start: float, stop: float, num: int = 50) -> Tensor:
    return Tensor(np.linspace(start, stop, num), dtype=dtypes.default_float)


def _dtype(dtype: Any) -> Any:
    return dtype_named(dtype) if isinstance(dtype, str) else dtype


def _shape(shape: Shape) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)
