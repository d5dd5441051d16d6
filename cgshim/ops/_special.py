"""Functions that NumPy lacks: SciPy's special functions, and functions of jax.nn and jax.lax."""

from __future__ import annotations

import math
from typing import Any

from cgshim.backend import Axis, Tensor
from cgshim.ops._numpy import ops, special
from cgshim.ops._tensors import as_float, cast, stop_gradient


def special_logsumexp(a: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    largest = stop_gradient(ops.max(a, axis=axis, keepdims=True))
    largest = ops.where(ops.isfinite(largest), largest, ops.zeros_like(largest))
    result = ops.log(ops.sum(ops.exp(a - largest), axis=axis, keepdims=True)) + largest
    return result if keepdims else ops.sum(result, axis=axis)


def special_softmax(x: Tensor, axis: Axis = None) -> Tensor:
    powers = ops.exp(x - stop_gradient(ops.max(x, axis=axis, keepdims=True)))
    return powers / ops.sum(powers, axis=axis, keepdims=True)


def special_log_softmax(x: Tensor, axis: Axis = None) -> Tensor:
    return x - special_logsumexp(x, axis, keepdims=True)


def special_expit(x: Tensor) -> Tensor:
    return 0.5 * (ops.tanh(0.5 * x) + 1.0)


def special_logit(x: Tensor) -> Tensor:
    return ops.log(x) - ops.log1p(-x)


def special_xlogy(x: Tensor, y: Tensor) -> Tensor:
    zero = x == 0.0
    return ops.where(zero, ops.zeros_like(x * y), x * ops.log(ops.where(zero, ops.ones_like(y), y)))


def special_xlog1py(x: Tensor, y: Tensor) -> Tensor:
    zero = x == 0.0
    return ops.where(
        zero, ops.zeros_like(x * y), x * ops.log1p(ops.where(zero, ops.zeros_like(y), y))
    )


def special_entr(x: Tensor) -> Tensor:
    """Return -x log(x), 0 at 0, and -inf for negative numbers."""
    inner = ops.where(x > 0, x, ops.ones_like(x))
    return ops.where(x < 0, ops.full_like(x, -math.inf), -x * ops.log(inner))


def special_rel_entr(x: Tensor, y: Tensor) -> Tensor:
    """Return x log(x / y), 0 where x is 0 and y is not negative, and else inf."""
    x, y = as_float(x), as_float(y)
    both = (x > 0) & (y > 0)
    x1, y1 = ops.where(both, x, ops.ones_like(x)), ops.where(both, y, ops.ones_like(y))
    outside = ops.where((x == 0) & (y >= 0), ops.zeros_like(x * y), ops.full_like(x * y, math.inf))
    result = ops.where(both, x1 * (ops.log(x1) - ops.log(y1)), outside)
    return ops.where(ops.isnan(x) | ops.isnan(y), x * y, result)


def special_kl_div(x: Tensor, y: Tensor) -> Tensor:
    x, y = as_float(x), as_float(y)
    return special_rel_entr(x, y) - x + y


def special_log_expit(x: Tensor) -> Tensor:
    return -ops.logaddexp(ops.zeros_like(x), -x)


def special_ndtr(x: Tensor) -> Tensor:
    return 0.5 * special.erfc(x * -math.sqrt(0.5))


# --- Neural networks -------------------------------------------------------------------------------


def softmax(x: Tensor, axis: Axis = -1) -> Tensor:
    return special.softmax(x, axis=axis)


def log_softmax(x: Tensor, axis: Axis = -1) -> Tensor:
    return special.log_softmax(x, axis=axis)


def relu(x: Tensor) -> Tensor:
    """Return the positive part, with derivative 0 at 0; NaN stays NaN."""
    return ops.where(x <= 0, ops.zeros_like(x), x)


def softplus(x: Tensor) -> Tensor:
    return ops.logaddexp(x, ops.zeros_like(x))


def one_hot(x: Tensor, num_classes: int, *, dtype: Any = None, axis: int = -1) -> Tensor:
    """Return ones at the index x, and zeros where x is out of range."""
    classes = ops.arange(num_classes)
    encoded = ops.moveaxis(ops.expand_dims(x, -1) == classes, -1, axis)
    return cast(encoded, ops.ones(()).dtype if dtype is None else dtype)


def top_k(operand: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the largest numbers of the last axis and their indices; of equal ones the first."""
    backwards = ops.argsort(ops.flip(operand, -1), axis=-1, stable=True)
    indices = operand.shape[-1] - 1 - ops.flip(backwards, -1)[..., :k]
    return ops.take_along_axis(operand, indices, axis=-1), indices
