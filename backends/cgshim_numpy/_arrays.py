"""NumPy: what an array is, the forms in which f, its rule and autograd take one, and trees of arrays."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import optree
from autograd import numpy as anp
from autograd.extend import defjvp

from cgshim_numpy._private import ArrayBox, DictBox, SequenceBox, getval, numpy_wrapper, primitive_jvps

Array = Any

if numpy_wrapper._astype not in primitive_jvps:  # autograd 1.9 has its derivative in reverse mode alone
    defjvp(numpy_wrapper._astype, "same")

_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # of kind V, like records, but numbers


def is_tensor(x: Any, /) -> bool:
    if isinstance(x, ArrayBox):
        return True
    if type(x) is np.ndarray or isinstance(x, np.generic):
        return x.dtype.kind in "biufc" or x.dtype.name in _ML_DTYPES
    if isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray):  # of which nobody knows a masked gradient
        return is_tensor(x.view(np.ndarray))
    return False


def is_float(x: Array) -> bool:
    """Return True if x has a gradient: floats, complex numbers, and bfloat16 and its like."""
    return x.dtype.kind in "fcV"


_OF_PYTHON: dict[type, Callable[[Any], Any]] = {float: np.float64, complex: np.complex128}


def as_arrays(xs: Sequence[Any]) -> Sequence[Array]:
    """Return the same values, with NumPy's numbers for Python's, which autograd boxes as they are."""
    if _OF_PYTHON.keys().isdisjoint(map(type, xs)):
        return xs
    return [_OF_PYTHON[type(x)](x) if type(x) in _OF_PYTHON else x for x in xs]


_kind_of = operator.attrgetter("dtype.kind")


def conjugated(xs: Sequence[Array]) -> Sequence[Array]:
    """Return the conjugates of the complex arrays among xs, and the others as they are."""
    if "c" not in map(_kind_of, xs):
        return xs
    conj = cast(Any, anp).conj  # autograd makes its functions where no type checker looks
    return [conj(x) if _kind_of(x) == "c" else x for x in xs]


# --- Trees, in which autograd may have put a container into one box -----------------------------------------------

# in which optree opens boxes of containers; tree_unflatten makes the containers themselves, with boxes in them
_NAMESPACE = "cgshim_numpy"


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    return optree.tree_flatten(tree, none_is_leaf=True, namespace=_NAMESPACE)


def tree_unflatten(structure: Any, leaves: Sequence[Any], /) -> Any:
    return optree.tree_unflatten(structure, leaves)


def with_boxes_opened(tree: Any) -> Any:
    """Return a tree with a container in the place of each box of a container."""
    return tree if is_tensor(tree) else tree_unflatten(*reversed(tree_flatten(tree)))


def _opened(box: Any) -> tuple[list[Any], None]:
    """Return a container with a box for each item, instead of one box for all."""
    if isinstance(box, DictBox):
        return [{key: box[key] for key in box}], None
    return [type(getval(box))([box[at] for at in range(len(box))])], None


for _kind in (DictBox, SequenceBox):
    optree.register_pytree_node(cast(Any, _kind), _opened, lambda _, content: next(iter(content)), namespace=_NAMESPACE)
