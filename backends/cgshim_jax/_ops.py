"""JAX: NumPy's functions from jax.numpy, and SciPy's special functions from jax.scipy.special."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import jax.scipy.linalg
import jax.scipy.special
import numpy as np

_MODULES = {
    "": jnp,
    "linalg": jnp.linalg,
    "fft": jnp.fft,
    "special": jax.scipy.special,
    "lax": jax.lax,
}
_ELSEWHERE: dict[str, Callable[..., Any] | None] = {
    **{name: getattr(jax.nn, name) for name in ("softmax", "log_softmax", "relu", "softplus", "one_hot")},
    "top_k": jax.lax.top_k,
    "special.log_expit": jax.nn.log_sigmoid,
    "linalg.solve_triangular": jax.scipy.linalg.solve_triangular,
    "index_add": lambda x, index, values, axis: x.at[(slice(None),) * axis + (index,)].add(values),
    "clip": lambda a, a_min=None, a_max=None, *, min=None, max=None: jnp.clip(
        a, a_min if min is None else min, a_max if max is None else max
    ),
    "histogram": None,
}  # fmt: skip
"""what stands elsewhere than in NumPy; None for what jax.numpy has with other parameters, or as floats,
which the front end may define
"""
_OF_LISTS = {
    "take", "repeat", "quantile", "percentile", "nanquantile", "nanpercentile", "compress", "isin", "searchsorted",
    "digitize", "delete", "interp",
}  # fmt: skip
"""where NumPy takes a list of numbers for an array, and jax.numpy does not"""


def numpy_function(name: str, /) -> Callable[..., Any] | None:
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    space, _, own = name.rpartition(".")
    function = getattr(_MODULES[space], own, None)
    return _with_arrays(function) if function is not None and name in _OF_LISTS else function


def numpy_function_of(name: str, types: Sequence[Any], /) -> Callable[..., Any] | None:
    return numpy_function(name)  # jax.numpy takes Python numbers beside arrays


def _with_arrays(of: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with an array for each list."""
    return lambda *args, **kwargs: of(
        *[np.asarray(arg) if isinstance(arg, list) else arg for arg in args], **kwargs
    )
