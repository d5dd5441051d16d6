"""NumPy: what an array is, the forms in which f, its rule and autograd take one, and trees of
arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optree

from cgshim_numpy._autograd import derivatives, is_differentiating, isbox

Array = Any

BOXES = set[type]()
"""the classes of boxes of arrays, from `_derivatives.py`"""

_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # of kind V, like records, but numbers


def is_tensor(x: Any, /) -> bool:
    if type(x) in BOXES:
        return True
    if (
        type(x) is np.ndarray
        or isinstance(x, np.generic)
        # of which nobody knows a masked gradient
        or (isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray))
    ):
        return x.dtype.kind in "biufc" or x.dtype.name in _ML_DTYPES
    return not BOXES and isbox(x) and type(x) in derivatives().BOXES


def is_float(x: Array) -> bool:
    """Return True if x has a gradient: floats, complex numbers, and bfloat16 and its like."""
    return x.dtype.kind in "fcV"


_OF_PYTHON: dict[type, Callable[[Any], Any]] = {float: np.float64, complex: np.complex128}


def as_arrays(xs: Sequence[Any]) -> Sequence[Array]:
    """Return the same values, with NumPy's numbers for Python's, which autograd boxes as they are."""
    return [_OF_PYTHON[type(x)](x) if type(x) in _OF_PYTHON else x for x in xs]


# --- Trees, in which autograd may have put a container into one box -------------------------------

# in which optree opens boxes of containers; tree_unflatten makes the containers themselves, with
# boxes in them
NAMESPACE = "cgshim_numpy"


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    flat = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    if not BOXES and is_differentiating() and any(map(isbox, flat[0])):
        derivatives()
        return tree_flatten(tree)
    return flat


def tree_unflatten(structure: Any, leaves: Sequence[Any], /) -> Any:
    return optree.tree_unflatten(structure, leaves)


def with_boxes_opened(tree: Any) -> Any:
    """Return a tree with a container in the place of each box of a container."""
    return tree if is_tensor(tree) else tree_unflatten(*reversed(tree_flatten(tree)))
