"""Arrays, trees of arrays, and the import of autograd.

Nothing here imports autograd until a derivative is taken.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from importlib.metadata import distributions
from typing import Any

import numpy as np
import optree

from cgshim.backend import BackendError, refusal

Array = Any
"""an array, a NumPy scalar, or autograd's box of either"""

_ML_DTYPES = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
)  # NumPy's kind for them is V, as for records


import_derivatives: Callable[[], Any] = dict
"""imports `_primitive.py`, which imports this module; the package's __init__ sets it"""

_waiting: list[Callable[[], None]] = []


@functools.cache
def derivatives() -> Any:
    """Import autograd, and return the half of the backend that uses it."""
    installed = installed_autograd()
    if [*map(int, re.findall(r"\d+", installed)[:2])] < [1, 7]:
        raise refusal(BackendError, "cgshim", must="derivatives on NumPy need autograd 1.7 or later",
                      got=f"autograd {installed}" if installed else "no autograd",
                      do="pip install 'autograd>=1.7'")  # fmt: skip
    primitive = import_derivatives()
    for act in _waiting:
        act()
    return primitive


def when_derivatives_exist(act: Callable[[], None]) -> None:
    """Call act when autograd is imported for derivatives; at once if it already is."""
    _waiting.append(act)
    if derivatives.cache_info().currsize:
        act()


def installed_autograd() -> str:
    """Return autograd's version; an empty string if it is not installed."""
    return next((found.version for found in distributions(name="autograd")), "")


def is_box(x: Any) -> bool:
    """Return True for autograd's box of an array, a number or a container."""
    autograd = sys.modules.get("autograd.extend")  # without autograd there are no boxes
    return autograd is not None and isinstance(x, autograd.Box)


def is_tensor(x: Any, /) -> bool:
    if isinstance(x, (np.ndarray, np.generic)):
        is_number = x.dtype.kind in "biufc" or x.dtype.name in _ML_DTYPES
        return is_number and not isinstance(x, np.ma.MaskedArray)
    return is_box(x) and hasattr(type(x), "dtype")  # boxes of containers have none


def is_float(x: Array) -> bool:
    """Return True if x has a gradient: floats, complex numbers, bfloat16 and similar dtypes."""
    return x.dtype.kind in "fcV"


def convert_to_tensor(x: Any, /, dtype: Any = None) -> Array:
    if any(map(is_box, tree_flatten(x)[0])):
        return derivatives().convert_to_tensor(x, dtype)
    return np.asarray(x, dtype=dtype)


def convert_to_numpy(x: Array, /) -> Any:
    return np.asarray(derivatives().read(x) if is_box(x) else x)


def stop_gradient(x: Array, /) -> Array:
    return np.asarray(derivatives().value_of(x) if is_box(x) else x)


# --- Trees: autograd may have put a whole container into one box ----------------------------------


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
    if any(is_box(x) and not is_tensor(x) for x in leaves):
        return tree_flatten(optree.tree_unflatten(structure, map(_opened, leaves)))
    return leaves, structure


tree_unflatten = optree.tree_unflatten


def _opened(x: Any) -> Any:
    """Return the container that a box holds, with a box for each item."""
    if not is_box(x) or is_tensor(x):
        return x
    kind = type(derivatives().value_of(x))
    return kind(
        {key: x[key] for key in x} if hasattr(x, "keys") else map(x.__getitem__, range(len(x)))
    )
