"""Arrays, trees of arrays, and the import of autograd.

Nothing here imports autograd until something is differentiated.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
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
)  # NumPy calls their kind V, as for records


@functools.cache
def derivatives() -> Any:
    """Import autograd, and return the half of the backend that uses it."""
    if (installed := installed_autograd()) < [1, 7]:
        raise refusal(BackendError, "cgshim", must="derivatives on NumPy need autograd 1.7 or later",
                      got=f"autograd {'.'.join(map(str, installed))}" if installed else "no autograd",
                      do="pip install 'autograd>=1.7'")  # fmt: skip
    from cgshim_numpy import _ops, _primitive

    _ops.use_autograd()
    return _primitive


def installed_autograd() -> list[int]:
    """Return the numbers of autograd's version; none if it is not installed."""
    try:
        return [*map(int, re.findall(r"\d+", version("autograd"))[:2])]
    except PackageNotFoundError:
        return []


def is_box(x: Any) -> bool:
    """Return True for autograd's box of an array, a number or a container."""
    autograd = sys.modules.get("autograd.extend")  # without it there are no boxes
    return autograd is not None and isinstance(x, autograd.Box)


def is_tensor(x: Any, /) -> bool:
    if isinstance(x, (np.ndarray, np.generic)):
        is_number = x.dtype.kind in "biufc" or x.dtype.name in _ML_DTYPES
        return is_number and not isinstance(x, np.ma.MaskedArray)
    return is_box(x) and hasattr(x, "dtype")  # boxes of containers have none


def is_float(x: Array) -> bool:
    """Return True if x has a gradient: floats, complex numbers, bfloat16 and similar dtypes."""
    return x.dtype.kind in "fcV"


def convert_to_tensor(x: Any, /, dtype: Any = None) -> Array:
    if any(map(is_box, tree_flatten(x)[0])):
        return derivatives().convert_box(x, dtype)
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


def tree_unflatten(structure: Any, leaves: Sequence[Any], /) -> Any:
    return optree.tree_unflatten(structure, leaves)


def _opened(x: Any) -> Any:
    """Return the container that a box holds, with a box for each item."""
    if not is_box(x) or is_tensor(x):
        return x
    if hasattr(x, "keys"):
        return {key: x[key] for key in x}
    return type(derivatives().value_of(x))([x[at] for at in range(len(x))])
