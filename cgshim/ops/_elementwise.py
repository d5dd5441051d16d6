"""NumPy's elementwise and shape functions, SciPy's special functions, and those of jax.nn.

They are defined in terms of other functions, for frameworks that lack them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from cgshim._axes import checked_axis
from cgshim._dispatch import backend_or_numpy
from cgshim._foreign import constant_when_traced
from cgshim.backend import Axis, Backend, Tensor, dtype_name
from cgshim.ops._numpy import ops, special
from cgshim.ops._tensors import (
    INEXACT,
    as_float,
    cast,
    convert_to_numpy,
    convert_to_tensor,
    dtype,
    shape,
    stop_gradient,
)


def clip(
    a: Tensor, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None
) -> Tensor:
    low, high = (a_min if min is None else min), (a_max if max is None else max)
    a = a if low is None else ops.maximum(a, low)
    return a if high is None else ops.minimum(a, high)


def round(a: Tensor, decimals: int = 0) -> Tensor:
    if not dtype(a).startswith(INEXACT):
        return a if decimals >= 0 else cast(round(cast(a, "float64"), decimals), dtype(a))
    return ops.rint(a * 10.0**decimals) / 10.0**decimals


def cbrt(x: Tensor) -> Tensor:
    return ops.sign(x) * ops.power(ops.absolute(x), 1.0 / 3.0)


def nan_to_num(x: Tensor, nan: float = 0.0) -> Tensor:
    if not dtype(x).startswith(INEXACT):
        return x
    largest = float(np.finfo(dtype(x)).max)
    return ops.clip(ops.where(ops.isnan(x), ops.full_like(x, nan), x), -largest, largest)


def divmod(x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    return ops.floor_divide(x1, x2), ops.remainder(x1, x2)


def modf(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = ops.trunc(x)
    return ops.where(ops.isinf(x), ops.zeros_like(x), x - whole), whole


def select(condlist: Sequence[Tensor], choicelist: Sequence[Any], default: Any = 0) -> Tensor:
    chosen = default
    for condition, choice in zip(reversed(condlist), reversed(choicelist), strict=True):
        chosen = ops.where(condition, choice, chosen)
    return chosen


def digitize(x: Tensor, bins: Any, right: bool = False) -> Tensor:
    """Return the index of each number's bin; bins must increase or decrease."""
    bins, side = _numbers_beside(x, bins), "left" if right else "right"
    places = ops.searchsorted(bins, x, side=side)
    if bins.shape[0] < 2:
        return places
    backwards = bins.shape[0] - ops.searchsorted(ops.flip(bins), x, side=side)
    return ops.where(bins[0] <= bins[-1], places, backwards)


def interp(x: Tensor, xp: Any, fp: Any) -> Tensor:
    xp, fp = _numbers_beside(x, xp), _numbers_beside(x, fp)
    after = ops.clip(ops.searchsorted(xp, x), 1, xp.shape[0] - 1)
    x0, x1, y0, y1 = (ops.take(of, at) for of in (xp, fp) for at in (after - 1, after))
    return y0 + (y1 - y0) * (ops.clip(x, xp[0], xp[-1]) - x0) / (x1 - x0)


def _numbers_beside(x: Tensor, numbers: Any) -> Tensor:
    """Return a list of numbers as a tensor, of x's dtype if x has floats; keep a tensor."""
    kind = dtype(x) if dtype(x).startswith(INEXACT) else None
    return convert_to_tensor(numbers, kind) if isinstance(numbers, (list, tuple)) else numbers


def isin(element: Tensor, test_elements: Any) -> Tensor:
    candidates = ops.ravel(_numbers_beside(element, test_elements))
    return ops.any(ops.equal(element[..., None], candidates), axis=-1)


def allclose(a: Tensor, b: Tensor, rtol: float = 1e-5, atol: float = 1e-8) -> Tensor:
    return ops.all(ops.isclose(a, b, rtol, atol))


def fmod(x1: Tensor, x2: Tensor) -> Tensor:
    rest = ops.remainder(ops.where(x1 < 0, -x1, x1), ops.absolute(x2))
    return ops.where(x1 < 0, -rest, rest)


def array_equal(a1: Tensor, a2: Tensor) -> Tensor:
    return ops.all(a1 == a2) if tuple(a1.shape) == tuple(a2.shape) else cast(False, "bool")


# --- Shapes ---------------------------------------------------------------------------------------


def append(arr: Tensor, values: Tensor, axis: int | None = None) -> Tensor:
    return ops.concatenate([arr, values], axis=axis)


def unstack(x: Tensor, /, *, axis: int = 0) -> tuple[Tensor, ...]:
    x = ops.moveaxis(x, axis, 0)
    return tuple(x[at] for at in range(x.shape[0]))


def expand_dims(a: Tensor, axis: Axis) -> Tensor:
    named = tuple(axis) if isinstance(axis, Iterable) else (axis,)
    ndim = len(a.shape) + len(named)
    new = [checked_axis(ndim, at) for at in named]
    return a[tuple(None if at in new else slice(None) for at in range(ndim))]


def ndim(a: Tensor) -> int:
    return len(shape(a))


def size(a: Tensor, axis: int | None = None) -> int:
    return math.prod(shape(a)) if axis is None else shape(a)[axis]


def flatnonzero(a: Tensor) -> Tensor:
    return ops.nonzero(ops.ravel(a))[0]


def argwhere(a: Tensor) -> Tensor:
    return ops.stack(ops.nonzero(a), axis=-1)


def column_stack(tup: Sequence[Tensor]) -> Tensor:
    return ops.concatenate([x[:, None] if len(x.shape) == 1 else x for x in tup], axis=1)


def pad(
    array: Tensor, pad_width: Any, mode: Any = "constant", *, constant_values: Any = 0
) -> Tensor:
    """Pad in NumPy's modes that repeat elements, and with constants."""
    if mode not in _PAD_MODES:
        raise NotImplementedError(f"mode={mode!r}, which is none of {', '.join(_PAD_MODES)}")
    if hasattr(pad_width, "shape"):
        pad_width = convert_to_numpy(pad_width).tolist()
    widths, values = (_pairs(each, ndim(array)) for each in (pad_width, constant_values))
    for axis, ((before, after), ends) in enumerate(zip(widths, values, strict=True)):
        if before < 0 or after < 0:
            raise ValueError("index can't contain negative values")
        if mode != "constant":
            # int: as str in dtype
            places = [int(at) for at in _padded_places(array.shape[axis], before, after, mode)]
            array = ops.take(array, places, axis=axis)
        elif before or after:
            slab = ops.sum(array, axis=axis, keepdims=True)
            first, last = [cast(ops.full_like(slab, x), dtype(array)) for x in ends]
            array = ops.concatenate([*[first] * before, array, *[last] * after], axis=axis)
    return array


def _pairs(value: Any, count: int) -> list[Any]:
    """Return a pair for each axis, of one number, one pair, or one of these per axis."""
    if not isinstance(value, (list, tuple)):
        return [(value, value)] * count
    pairs = value if isinstance(value[0], (list, tuple)) else [value]
    return [(pair[0], pair[-1]) for pair in pairs] * (count if len(pairs) == 1 else 1)


@constant_when_traced
def _padded_places(size: int, before: int, after: int, mode: Any) -> list[int]:
    """Return the index of the element at each place of a padded axis."""
    return np.pad(np.arange(size), (before, after), mode).tolist()  # type: ignore[no-any-return]


_PAD_MODES = ("constant", "edge", "reflect", "symmetric", "wrap")


def asarray(a: Any, dtype: Any = None) -> Tensor:
    """Return numbers as a tensor; tensors in a list keep their gradients."""
    kind = None if dtype is None else dtype_name(dtype)
    return _as_array(backend_or_numpy([a]), a, kind)


def _as_array(backend: Backend, a: Any, dtype: Any) -> Tensor:
    is_list = isinstance(a, (list, tuple))
    if is_list and any(map(backend.is_tensor, backend.tree_flatten(a)[0])):
        return ops.stack([_as_array(backend, x, dtype) for x in a])
    return backend.convert_to_tensor(a, dtype)


def array(object: Any, dtype: Any = None) -> Tensor:
    return ops.copy(asarray(object, dtype))


def astype(x: Tensor, dtype: Any, /) -> Tensor:
    return cast(x, dtype_name(dtype))


def full_like(a: Tensor, fill_value: Any, dtype: Any = None) -> Tensor:
    zeros = ops.zeros_like(a, dtype)
    return cast(ops.add(zeros, fill_value), zeros.dtype)


def eye(N: int, M: int | None = None, k: int = 0, dtype: Any = None) -> Tensor:  # noqa: N803
    return ops.triu(tri(N, M, k, dtype), k)


def tri(N: int, M: int | None = None, k: int = 0, dtype: Any = None) -> Tensor:  # noqa: N803
    return ops.tril(ops.ones((N, N if M is None else M), dtype), k)


def indices(dimensions: Sequence[int]) -> Tensor:
    return ops.stack(list(ops.meshgrid(*[ops.arange(size) for size in dimensions], indexing="ij")))


def identity(n: int, dtype: Any = None) -> Tensor:
    return ops.eye(n, dtype=dtype)


def logspace(
    start: float,
    stop: float,
    num: int = 50,
    endpoint: bool = True,
    base: float = 10.0,
    dtype: Any = None,
) -> Tensor:
    return ops.asarray(ops.power(base, ops.linspace(start, stop, num, endpoint=endpoint)), dtype)


# --- Functions that only move elements: NumPy moves their indices, and one gather the elements -----


def _places(x: Tensor) -> np.ndarray[Any, Any]:
    """Return an array shaped as x, with each element's index in the flattened x."""
    return np.arange(np.prod(np.shape(x), dtype=int)).reshape(np.shape(x))


def _moved(name: str, x: Tensor, *args: Any, **options: Any) -> Any:
    """Apply a NumPy function that moves elements to a tensor, or to a list of tensors."""
    places = getattr(np, name)(_places(x), *args, **options)
    if isinstance(places, list):
        return [ops.take(x, each) for each in places]
    return ops.take(x, places)


def _each_moved(name: str, *xs: Tensor, **options: Any) -> Any:
    """Apply such a function to each of several tensors."""
    places = getattr(np, name)(*map(_places, xs), **options)
    return type(places)([ops.take(x, at) for x, at in zip(xs, places, strict=True)])


def kron(a: Tensor, b: Tensor) -> Tensor:
    """Multiply the elements of a and b that NumPy's product pairs."""
    of_a = np.kron(_places(a), np.ones(np.shape(b), int))
    of_b = np.kron(np.ones(np.shape(a), int), _places(b))
    return ops.take(a, of_a) * ops.take(b, of_b)


def diag(v: Tensor, k: int = 0) -> Tensor:
    """Return a diagonal, or a matrix with this diagonal; other places read a padded zero."""
    flat = ops.ravel(v)
    return ops.take(ops.concatenate([ops.zeros_like(flat[:1]), flat]), np.diag(_places(v) + 1, k))


def sort(
    a: Tensor, axis: int | None = -1, kind: Any = None, *, stable: bool | None = None
) -> Tensor:
    a, axis = (ops.ravel(a), -1) if axis is None else (a, axis)
    return ops.take_along_axis(a, ops.argsort(a, axis, "stable"), axis)


# --- SciPy's special functions ---------------------------------------------------------------------


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


def _times_log(log: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return x log(y), and 0 where x is 0."""
    zero = x == 0.0
    return ops.where(zero, ops.zeros_like(x * y), x * log(ops.where(zero, ops.ones_like(y), y)))


def special_entr(x: Tensor) -> Tensor:
    """Return -x log(x), 0 at 0, and -inf for negative numbers."""
    return ops.where(x < 0, ops.full_like(x, -math.inf), -special.xlogy(x, ops.absolute(x)))


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


_OF_ONE = """
array_split broadcast_to diagonal flip hsplit repeat roll take_along_axis tile vsplit
"""
WITH_PARAMETERS: dict[str, Callable[..., Any]] = {
    **{name: functools.partial(_moved, name) for name in _OF_ONE.split()},
    **{name: functools.partial(_each_moved, name) for name in ("broadcast_arrays", "meshgrid")},
    "special.xlogy": functools.partial(_times_log, ops.log),
    "special.xlog1py": functools.partial(_times_log, ops.log1p),
}
"""functions that are another function with fixed parameters"""
