"""Read the dtypes of any framework by the names that NumPy gives them."""

from __future__ import annotations

import functools
import re
from typing import Any

from cgshim._dtype_names import root_of, unchecked_name
from cgshim._errors import BackendError, refusal
from cgshim._foreign import constant_when_traced

_DIFFERENTIABLE = re.compile(r"b?(float|complex)\d+\w*")
_OTHER = re.compile(
    r"bool|q?u?int\d+\w*|bits\d+\w*"  # bits: those of PyTorch that are not numbers yet
    r"|(object|str|bytes|void|datetime64|timedelta64).*"
    r"|string|resource|variant|key<.+>"  # TensorFlow's, and JAX's keys of random numbers
)


@constant_when_traced
def dtype_name(dtype: Any) -> str:
    """Return the framework-free name of a framework's dtype: torch.float32, tf.float32 and
    np.float32 are "float32".

    Raises
    ------
    BackendError
        If the name is not one of those that NumPy gives, or an extension of these such as bfloat16.
    """
    return _checked_name(dtype)


@constant_when_traced
def is_dtype(x: Any) -> bool:
    """Return True for a framework's dtype, or the name of one."""
    try:
        dtype_name(x)
    except (BackendError, TypeError):  # what cannot be hashed is none
        return False
    return True


def is_complex(dtype: object) -> bool:
    """Return True if a framework's dtype is one of its complex ones."""
    return "complex" in dtype_name(dtype)


@constant_when_traced
def is_differentiable(dtype: Any) -> bool:
    """Return True if tensors of this dtype have gradients: the floats and the complex numbers."""
    return _is_differentiable(dtype)


@functools.cache
def _is_differentiable(dtype: Any) -> bool:
    return _DIFFERENTIABLE.fullmatch(dtype_name(dtype)) is not None


@functools.cache
def _checked_name(dtype: Any) -> str:
    name = unchecked_name(dtype)
    if _is_known(name):
        return name
    if isinstance(dtype, (str, type)) and _is_known(in_numpy := _name_in_numpy(dtype)):
        return in_numpy
    framework = root_of(dtype)
    raise refusal(BackendError, "cgshim",
                  must=f"a dtype of {framework} must have a name of NumPy's, such as float32 or bfloat16",
                  got=repr(name), do=f"let dtype_name(dtype) in the backend of {framework} return it")  # fmt: skip


def _is_known(name: str) -> bool:
    return bool(_DIFFERENTIABLE.fullmatch(name) or _OTHER.fullmatch(name))


def _name_in_numpy(dtype: Any) -> str:
    """Return the name of what a user may write for NumPy: "half", "f4", Python's float; "" if it is
    none of these.
    """
    import numpy as np

    try:
        numpy_dtype = np.dtype(dtype)
    except TypeError:
        return ""
    return "" if numpy_dtype.kind == "O" else str(numpy_dtype.name)  # NumPy's dtype for any class
