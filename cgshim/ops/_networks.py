"""What networks are made of and NumPy lacks, with the parameters and defaults of jax.nn and
jax.lax, in terms of NumPy's functions.
"""

from __future__ import annotations

from typing import Any

from cgshim.ops._axes import Axis, Tensor
from cgshim.ops._numpy import linalg, ops, special
from cgshim.ops._tensors import cast, dtype


def softmax(x: Tensor, axis: Axis = -1) -> Tensor:
    return special.softmax(x, axis=axis)


def log_softmax(x: Tensor, axis: Axis = -1) -> Tensor:
    return special.log_softmax(x, axis=axis)


def logsumexp(a: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    return special.logsumexp(a, axis=axis, keepdims=keepdims)


def relu(x: Tensor) -> Tensor:
    """Return the positive part, whose derivative at 0 is 0; a nan stays."""
    return ops.where(x <= 0, ops.zeros_like(x), x)


def sigmoid(x: Tensor) -> Tensor:
    return special.expit(x)


def softplus(x: Tensor) -> Tensor:
    return ops.logaddexp(x, ops.zeros_like(x))


def one_hot(x: Tensor, num_classes: int, *, dtype: Any = None, axis: int = -1) -> Tensor:
    """Return ones where the class is x; where x is no class, there are zeros."""
    classes = ops.arange(num_classes)
    found = ops.moveaxis(ops.expand_dims(x, -1) == classes, -1, axis)
    return cast(found, ops.ones(()).dtype if dtype is None else dtype)


def top_k(operand: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the largest numbers of the last axis, and where they are: of equal ones the first."""
    backwards = ops.argsort(ops.flip(operand, -1), axis=-1, stable=True)
    indices = operand.shape[-1] - 1 - ops.flip(backwards, -1)[..., :k]
    return ops.take_along_axis(operand, indices, axis=-1), indices


def linalg_solve_triangular(
    a: Tensor, b: Tensor, trans: Any = 0, lower: bool = False, unit_diagonal: bool = False
) -> Tensor:
    """Solve by the triangle of a alone, with SciPy's parameters."""
    if unit_diagonal:
        one = cast(ops.eye(a.shape[-1]), dtype(a))
        a = a * (1 - one) + one
    triangle = ops.tril(a) if lower else ops.triu(a)
    if trans not in (0, "N"):
        triangle = ops.swapaxes(triangle, -1, -2)
    return linalg.solve(ops.conj(triangle) if trans in (2, "C") else triangle, b)
