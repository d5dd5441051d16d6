"""Arrays and trees of arrays. Nothing here imports autograd."""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from typing import Any

import numpy as np
import optree

Array = Any
"""an array, a NumPy scalar, or autograd's box of either"""

_ML_DTYPES = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
)  # NumPy's kind for them is V, as for records


def installed_autograd() -> str:
    """Return autograd's name and version, or "no autograd" if it is not installed."""
    return next(
        (f"autograd {found.version}" for found in distributions(name="autograd")), "no autograd"
    )


def has_autograd(*version: int) -> bool:
    """Return True if autograd is installed in this version or a later one."""
    return [*map(int, re.findall(r"\d+", installed_autograd())[:2])] >= [*version]


def is_box(x: Any) -> bool:
    """Return True for autograd's box of an array, a number or a container."""
    autograd = sys.modules.get("autograd.extend")  # without autograd there are no boxes
    return autograd is not None and isinstance(x, autograd.Box)


def is_tensor(x: Any, /) -> bool:
    if isinstance(x, (np.ndarray, np.generic)):
        is_number = x.dtype.kind in "biufc" or x.dtype.name in _ML_DTYPES
        return is_number and not isinstance(x, np.ma.MaskedArray)
    return is_box(x) and hasattr(type(x), "dtype")  # boxes of containers have none


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
    kind = sys.modules["autograd.builtins"].type(x)  # of the value in the box
    return kind({key: x[key] for key in x} if kind is dict else map(x.__getitem__, range(len(x))))
