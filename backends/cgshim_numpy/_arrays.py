"""NumPy: what an array is, and the forms in which f, its rule and autograd take it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from autograd import numpy as anp
from autograd.extend import defjvp

from cgshim_numpy._private import ArrayBox, numpy_wrapper, primitive_jvps

Array = Any

_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # of kind V, like records, but numbers


def is_tensor(x: Any, /) -> bool:
    if type(x) is np.ndarray or isinstance(x, np.generic):
        return x.dtype.kind in "biufc" or x.dtype.name in _ML_DTYPES
    if isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray):  # of which nobody knows a masked gradient
        return is_tensor(x.view(np.ndarray))
    return isinstance(x, ArrayBox)


if numpy_wrapper._astype not in primitive_jvps:  # autograd 1.9 has its derivative in reverse mode alone
    defjvp(numpy_wrapper._astype, "same")

kind_of = operator.attrgetter("dtype.kind")
"""the letter of an array's kind, asked of many arrays without a Python function for each"""

KINDS_OF_FLOATS = frozenset("fcV")
"""the kinds of what has a gradient: floats, complex numbers, and bfloat16 and its like"""


def is_float(x: Array) -> bool:
    """Return True if x has a gradient."""
    return kind_of(x) in KINDS_OF_FLOATS


def is_complex(x: Array) -> bool:
    return bool(kind_of(x) == "c")


_OF_PYTHON: dict[type, Callable[[Any], Any]] = {float: np.float64, complex: np.complex128}


def as_arrays(xs: Sequence[Any]) -> Sequence[Array]:
    """Return the same values, with NumPy's numbers for Python's, which autograd boxes as they are."""
    if _OF_PYTHON.keys().isdisjoint(map(type, xs)):
        return xs
    return [_OF_PYTHON[type(x)](x) if type(x) in _OF_PYTHON else x for x in xs]


def without_file(x: Array) -> Array:
    """Return an array in a file as any other: autograd knows no class that is derived from NumPy's."""
    return np.asarray(x) if isinstance(x, np.memmap) else x


def as_object_of_its_own(x: Array) -> Array:
    """Return the same array under an identity of its own: it may be in two boxes, or a constant of the rule."""
    return x.view() if isinstance(x, np.ndarray) else x.copy()


def conjugated(xs: Sequence[Array]) -> Sequence[Array]:
    """Return the conjugates of the complex arrays among xs, and the others as they are."""
    conj = cast(Any, anp).conj  # autograd makes its functions where no type checker looks
    return [conj(x) if is_complex(x) else x for x in xs]
