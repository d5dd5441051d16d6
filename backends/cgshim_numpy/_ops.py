"""NumPy's own functions for plain arrays, and autograd's for boxes.

autograd lacks the derivative of some, and has a wrong one of others with some parameters. The front
end or this module defines these in terms of other functions.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cgshim._closure import SIMPLE
from cgshim.backend import Axis, BackendError, axes_of, refusal
from cgshim_numpy._arrays import is_box as isbox

Array = Any


def numpy_function(name: str, /) -> Callable[..., Any] | None:
    """Return the function of arrays and of autograd's boxes."""
    if name in _DEFINED:
        return None
    own = globals().get(f"np_{name}".replace(".", "_"))
    return own or (_named("", name) and functools.partial(_with_boxes, name))


def _with_boxes(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call autograd's copy of a function if autograd is imported: it accepts boxes."""
    function = _named("autograd." if "autograd" in sys.modules else "", name)
    if function is None and any(map(isbox, args)):
        raise refusal(BackendError, f"op_{name}",
                      must="what is differentiated on NumPy must have a derivative in autograd",
                      got=f"scipy.{name}", do="call it in an f of op_custom_gradient, and write its rule")  # fmt: skip
    return (function or _named("", name))(*args, **kwargs)  # type: ignore[misc]


def numpy_function_of(name: str, types: Sequence[Any], /) -> Callable[..., Any] | None:
    """Return NumPy's or SciPy's own function if there are only arrays and numbers."""
    leaves = frozenset().union(*(kind if type(kind) is frozenset else {kind} for kind in types))
    numbers = [kind for kind in leaves if not issubclass(kind, (np.ndarray, np.generic))]
    # NumPy 1 promotes a number beside an array without axes
    if not SIMPLE.issuperset(numbers) or (numbers and np.__version__.startswith("1.")):
        return None
    return _named("", name)


@functools.cache
def _named(root: str, name: str) -> Callable[..., Any] | None:
    """Return a function of NumPy or SciPy, or of autograd's copy of these packages."""
    space, _, own = name.rpartition(".")
    module = "scipy.special" if space == "special" else f"numpy.{space}".rstrip(".")
    with contextlib.suppress(ImportError):
        return getattr(importlib.import_module(root + module), own, None)
    return None


def _anp() -> Any:
    """Return autograd's copy of NumPy if it is imported: its functions accept boxes."""
    return sys.modules.get("autograd.numpy", np)


_NAMES = """
array array_split asarray astype average broadcast_arrays broadcast_to cbrt clip convolve corrcoef correlate cov diag
diagonal diff divmod fft.irfft fft.irfft2 fft.irfftn fft.rfft fft.rfft2 fft.rfftn flip fmod full_like hsplit interp
kron linalg.diagonal linalg.matrix_norm linalg.matrix_power linalg.norm linalg.svdvals linalg.trace linalg.vector_norm
matrix_transpose matvec median meshgrid modf nanmax nanmean nanmin nanprod nansum outer pad percentile polyval ptp
quantile repeat roll sort special.entr special.kl_div special.log_expit special.log_softmax special.ndtr
special.rel_entr special.softmax special.xlog1py special.xlogy std take_along_axis tile trace trapezoid unstack var vdot
vecdot vsplit
"""
_DEFINED = frozenset(_NAMES.split())
"""functions that the front end defines, with a derivative"""


# --- Without the parameters that autograd ignores: where and initial ------------------------------


def _reduction(name: str) -> Callable[..., Array]:
    def reduce(a: Array, axis: Axis = None, dtype: Any = None, *, keepdims: bool = False) -> Array:
        if dtype is not None and isbox(a):
            from cgshim_numpy._vjp import convert_to_tensor

            a, dtype = convert_to_tensor(a, dtype), None
        options = {} if dtype is None else {"dtype": dtype}
        return getattr(_anp(), name)(a, axis, keepdims=keepdims, **options)

    return reduce


np_sum, np_mean, np_max, np_min = map(_reduction, ("sum", "mean", "max", "min"))


# --- By indices, for which autograd has the derivative --------------------------------------------


def np_take(a: Array, indices: Any, axis: int | None = None) -> Array:
    a, before = (_anp().ravel(a), 0) if axis is None else (a, axis % a.ndim)
    at = _anp().asarray(indices)
    at = at.astype(int) if at.dtype == bool else at  # as an index these would be a mask
    return a[(slice(None),) * before + (at,)]


def np_index_add(x: Array, index: Array, values: Array, axis: int) -> Array:
    """Add values at indices: the transpose of a gather."""
    if isbox(x) or isbox(values):
        from autograd import make_vjp

        gather: Any = make_vjp(lambda x: np_take(x, index, axis))
        return x + gather(np.zeros(x.shape, x.dtype))[0](values)
    result = np.array(x)
    np.add.at(np.moveaxis(result, axis, 0), index, np.moveaxis(values, axis, 0))
    return result


def np_positive(x: Array) -> Array:
    return 1 * x


np_copy = np_positive


def np_concatenate(arrays: Sequence[Array], /, axis: int | None = 0) -> Array:
    if axis is None:
        arrays, axis = [_anp().ravel(array) for array in arrays], 0
    return _anp().concatenate(arrays, axis)


# --- Arguments for which autograd has a wrong derivative, or none ---------------------------------


def np_transpose(a: Array, axes: Axis = None) -> Array:
    return _anp().transpose(a, None if axes is None else axes_of(a, axes))


def np_where(condition: Array, *cases: Any) -> Array:
    shape = _anp().broadcast_shapes(*map(_anp().shape, (condition, *cases)))
    wide = [x + _anp().zeros(shape, x.dtype) if isbox(x) and x.shape != shape else x for x in cases]
    return _anp().where(condition, *wide)


def np_linspace(start: Any, stop: Any, num: int = 50, endpoint: bool = True, **options: Any) -> Any:
    if options or not (isbox(start) or isbox(stop)):  # autograd accepts no boxes with options
        return _anp().linspace(start, stop, num, endpoint, **options)
    steps = np.linspace(0.0, 1.0, num, endpoint)
    steps = steps.reshape(-1, *[1] * max(_anp().ndim(start), _anp().ndim(stop)))
    return start * (1.0 - steps) + stop * steps
