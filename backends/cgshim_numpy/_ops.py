"""NumPy's own functions for plain arrays, and autograd's for boxes.

autograd lacks the derivative of some, and has a wrong one of others with some parameters. The front
end or this module defines these in terms of other functions.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cgshim._closure import SIMPLE
from cgshim.backend import Axis, BackendError, axes_of, refusal
from cgshim_numpy._arrays import derivatives, is_box as isbox, when_derivatives_exist

Array = Any
anp: Any = np  # autograd's after the first derivative


def numpy_function(name: str, /) -> Callable[..., Any] | None:
    """Return the function of arrays and of autograd's boxes."""
    if name in _DEFINED:
        return None
    own = globals().get(f"np_{name}".replace(".", "_"))
    if own is not None:
        return own  # type: ignore[no-any-return]
    numpys = _named("", name)
    if name.startswith("special.") and name not in _OF_AUTOGRAD:
        return functools.partial(_of_arrays, numpys) if isinstance(numpys, np.ufunc) else None
    return numpys and (lambda *args, **kwargs: _named(_root, name)(*args, **kwargs))  # type: ignore[misc]


def _of_arrays(function: np.ufunc, *args: Any, **kwargs: Any) -> Any:
    """Return a SciPy function's result; raise for boxes, as autograd has no derivative of it."""
    if any(map(isbox, args)):
        raise refusal(BackendError, f"op_special.{function.__name__}",
                      must="what is differentiated on NumPy must have a derivative in autograd",
                      got=f"scipy.special.{function.__name__}",
                      do="call it in an f of op_custom_gradient, and write its rule")  # fmt: skip
    return function(*args, **kwargs)


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


_root = ""
"""autograd's after the first derivative"""

_NAMES = """
array array_split asarray astype average broadcast_arrays broadcast_to cbrt clip convolve corrcoef correlate cov diag
diagonal diff divmod fft.irfft fft.irfft2 fft.irfftn fft.rfft fft.rfft2 fft.rfftn flip fmod full_like hsplit interp
kron linalg.diagonal linalg.matrix_norm linalg.matrix_power linalg.norm linalg.svdvals linalg.trace linalg.vector_norm
matrix_transpose matvec median meshgrid modf nanmax nanmean nanmin nanprod nansum outer pad percentile polyval ptp
quantile repeat roll sort special.entr special.kl_div special.log_expit special.ndtr special.rel_entr special.xlog1py
special.xlogy std take_along_axis tile trace trapezoid unstack var vdot vecdot vsplit
"""
_DEFINED = frozenset(_NAMES.split())
"""functions that the front end defines, with a derivative"""


_SPECIAL = """
beta betainc betaln digamma erf erfc erfcinv erfinv expit gamma gammainc gammaincc gammaln gammasgn i0 i1 iv ive j0 j1
jn logit logsumexp multigammaln polygamma psi rgamma y0 y1 yn
"""
_OF_AUTOGRAD = frozenset(f"special.{name}" for name in _SPECIAL.split())


# --- Without the parameters that autograd ignores: where and initial ------------------------------


def _reduction(name: str) -> Callable[..., Array]:
    return lambda a, axis=None, *, keepdims=False: getattr(anp, name)(a, axis, keepdims=keepdims)


def _reduction_in(name: str) -> Callable[..., Array]:
    """Return a reduction with a parameter dtype."""
    return lambda a, axis=None, dtype=None, *, keepdims=False: getattr(anp, name)(
        a if dtype is None else derivatives().convert_to_tensor(a, dtype), axis, keepdims=keepdims
    )


np_max, np_min = _reduction("max"), _reduction("min")
np_sum, np_mean = _reduction_in("sum"), _reduction_in("mean")


# --- By indices, for which autograd has the derivative --------------------------------------------


def np_take(a: Array, indices: Any, axis: int | None = None) -> Array:
    a, before = (anp.ravel(a), 0) if axis is None else (a, axis % a.ndim)
    at = anp.asarray(indices)
    at = at.astype(int) if at.dtype == bool else at  # as an index these would be a mask
    return a[(slice(None),) * before + (at,)]


def np_index_add(x: Array, index: Array, values: Array, axis: int) -> Array:
    return index_add(x, index, values, axis)


def index_add(x: Array, index: Array, values: Array, axis: int) -> Array:
    result = np.array(x)
    np.add.at(np.moveaxis(result, axis, 0), index, np.moveaxis(values, axis, 0))
    return result


def np_positive(x: Array) -> Array:
    return 1 * x


np_copy = np_positive


def np_concatenate(arrays: Sequence[Array], /, axis: int | None = 0) -> Array:
    if axis is None:
        arrays, axis = [anp.ravel(array) for array in arrays], 0
    return anp.concatenate(arrays, axis)


# --- Arguments for which autograd has a wrong derivative, or none ---------------------------------


def np_transpose(a: Array, axes: Axis = None) -> Array:
    return anp.transpose(a, None if axes is None else axes_of(a, axes))


def np_where(condition: Array, *cases: Any) -> Array:
    shape = anp.broadcast_shapes(*map(anp.shape, (condition, *cases)))
    wide = [x + anp.zeros(shape, x.dtype) if isbox(x) and x.shape != shape else x for x in cases]
    return anp.where(condition, *wide)


def np_linspace(start: Any, stop: Any, num: int = 50, endpoint: bool = True, **options: Any) -> Any:
    if options or not (isbox(start) or isbox(stop)):  # autograd accepts no boxes with options
        return anp.linspace(start, stop, num, endpoint, **options)
    steps = np.linspace(0.0, 1.0, num, endpoint)
    steps = steps.reshape(-1, *[1] * max(anp.ndim(start), anp.ndim(stop)))
    return start * (1.0 - steps) + stop * steps


# --- As autograd wraps them -----------------------------------------------------------------------


def _use_autograd() -> None:
    """Use autograd's functions, which accept its boxes, from now on."""
    global _root, anp, index_add
    from autograd import numpy
    from autograd.extend import defvjp, primitive

    _root, anp, index_add = "autograd.", numpy, primitive(index_add)
    defvjp(
        index_add,
        lambda ans, x, index, values, axis: lambda upstream: upstream,
        None,
        lambda ans, x, index, values, axis: lambda upstream: np_take(upstream, index, axis),
    )


when_derivatives_exist(_use_autograd)
