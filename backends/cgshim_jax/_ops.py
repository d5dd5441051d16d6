"""JAX: NumPy's functions are those of jax.numpy, and SciPy's special ones those of
jax.scipy.special.
"""

from __future__ import annotations

import functools
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
_LISTS_AT = {
    "take": 1, "repeat": 1, "quantile": 1, "percentile": 1, "nanquantile": 1, "nanpercentile": 1, "compress": 0,
    "isin": 1, "searchsorted": 1, "digitize": 1, "delete": 1, "interp": 1,
}  # fmt: skip
"""where NumPy takes a list of numbers for an array, and jax.numpy does not"""


def numpy_function(name: str, /) -> Callable[..., Any] | None:
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    space, _, own = name.rpartition(".")
    function = getattr(_MODULES[space], own, None)
    return (
        _with_list_at(_LISTS_AT[name], function)
        if function is not None and name in _LISTS_AT
        else function
    )


def numpy_function_of(name: str, types: Sequence[Any], /) -> Callable[..., Any] | None:
    return numpy_function(name)  # jax.numpy takes Python numbers beside arrays


def _with_list_at(place: int, of: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(of)
    def function(*args: Any, **kwargs: Any) -> Any:
        converted = [
            np.asarray(arg) if at == place and isinstance(arg, list) else arg
            for at, arg in enumerate(args)
        ]
        return of(*converted, **kwargs)

    return function
