"""SciPy's special functions that can be written with NumPy's."""

from __future__ import annotations

from cgshim.ops._axes import Axis, Tensor
from cgshim.ops._numpy import ops
from cgshim.ops._tensors import stop_gradient


def special_logsumexp(a: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    largest = stop_gradient(ops.max(a, axis=axis, keepdims=True))
    largest = ops.where(ops.isfinite(largest), largest, ops.zeros_like(largest))
    found = ops.log(ops.sum(ops.exp(a - largest), axis=axis, keepdims=True)) + largest
    return found if keepdims else ops.sum(found, axis=axis)


def special_softmax(x: Tensor, axis: Axis = None) -> Tensor:
    return ops.exp(special_log_softmax(x, axis))


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
