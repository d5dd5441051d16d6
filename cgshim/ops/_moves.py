"""NumPy's functions that only move elements: NumPy itself moves their places, and one gather the
elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from cgshim.backend import Tensor
from cgshim.ops._numpy import ops


def _places(x: Tensor) -> np.ndarray[Any, Any]:
    """Return an array shaped as x, of where each element is in x made flat."""
    return np.arange(np.prod(np.shape(x), dtype=int)).reshape(np.shape(x))


def _moved(name: str, x: Tensor, *args: Any, **options: Any) -> Any:
    """Return what NumPy's function of this name makes of a tensor, or the list of such."""
    places = getattr(np, name)(_places(x), *args, **options)
    if isinstance(places, list):
        return [ops.take(x, each) for each in places]
    return ops.take(x, places)


def _each_moved(name: str, *xs: Tensor, **options: Any) -> Any:
    """Return what NumPy's function of this name makes of each of several tensors."""
    places = getattr(np, name)(*map(_places, xs), **options)
    return type(places)([ops.take(x, at) for x, at in zip(xs, places, strict=True)])


_OF_ONE = """
array_split broadcast_to diagonal flip hsplit repeat roll take_along_axis tile vsplit
"""
MOVES: dict[str, Callable[..., Any]] = {
    **{name: functools.partial(_moved, name) for name in _OF_ONE.split()},
    **{name: functools.partial(_each_moved, name) for name in ("broadcast_arrays", "meshgrid")},
}


def kron(a: Tensor, b: Tensor) -> Tensor:
    """Multiply the elements of a and of b that NumPy's product brings together."""
    of_a = np.kron(_places(a), np.ones(np.shape(b), int))
    of_b = np.kron(np.ones(np.shape(a), int), _places(b))
    return ops.take(a, of_a) * ops.take(b, of_b)


def diag(v: Tensor, k: int = 0) -> Tensor:
    """Return a diagonal, or a matrix of one; the place before all others is a zero's."""
    flat = ops.ravel(v)
    return ops.take(ops.concatenate([ops.zeros_like(flat[:1]), flat]), np.diag(_places(v) + 1, k))


def sort(
    a: Tensor, axis: int | None = -1, kind: Any = None, *, stable: bool | None = None
) -> Tensor:
    a, axis = (ops.ravel(a), -1) if axis is None else (a, axis)
    return ops.take_along_axis(a, ops.argsort(a, axis, "stable"), axis)
