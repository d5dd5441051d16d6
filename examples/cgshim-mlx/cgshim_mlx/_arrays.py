"""MLX: small questions about arrays, and answers that are not looked at."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx

Array = mx.array
Arrays = Sequence[Array]


def is_tensor(x: object, /) -> bool:
    return isinstance(x, mx.array)


def is_float(x: Array) -> bool:
    return bool(mx.issubdtype(x.dtype, mx.inexact))


def stopped(arrays: Arrays) -> list[Array]:
    return [mx.stop_gradient(x) for x in arrays]


def handle(x: Array) -> Array:
    """The same array as another object of Python: what is done to x in place is not done to this."""
    return mx.broadcast_to(x, x.shape)


def renewed(x: Array) -> Array:
    """The same numbers with the same derivatives, as an operation's result of its own."""
    return mx.contiguous(x, allow_col_major=True)


@contextmanager
def rebound(objects: Sequence[Array], arrays: Arrays) -> Iterator[None]:
    """Let these objects of Python be other arrays for a while, wherever somebody holds them."""
    before = [handle(x) for x in objects]
    try:
        for x, array in zip(objects, arrays, strict=True):
            x[...] = array
        yield
    finally:
        for x, array in zip(objects, before, strict=True):
            x[...] = array


def spoiled(x: Array, ok: Array) -> Array:
    """x, and NaN unless ok, which nobody may look at here: to evaluate an array cuts it off from
    outer derivatives.
    """
    return x * mx.stop_gradient(mx.where(ok, 1.0, mx.nan)).astype(x.dtype) if is_float(x) else x


def all_of(conditions: Iterable[Array]) -> Array:
    return functools.reduce(mx.logical_and, conditions, mx.array(True))


def agree(a: Array, b: Array) -> Array:
    """Whether two arrays are the same but for the order of sums."""
    if not is_float(a):
        return mx.array_equal(a, b)
    return mx.allclose(a, b, rtol=4 * mx.finfo(a.dtype).eps, atol=0.0, equal_nan=True)
