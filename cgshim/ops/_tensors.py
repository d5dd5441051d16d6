"""The few functions that every rule needs, and that frameworks spell differently."""

from __future__ import annotations

from typing import Any

import numpy as np

from cgshim.backend import (
    Tensor,
    as_tensor,
    backend_or_numpy,
    backend_to_convert_to,
    dtype_name,
    framework_of,
    load,
    value_of,
)


def convert_to_tensor(x: Any, dtype: Any = None) -> Tensor:
    """Return x as a tensor of the backend.

    Parameters
    ----------
    x : tensor, NumPy array, number or nested list of numbers
        A tensor stays as it is, with its gradient.
    dtype : str or a dtype of the framework, optional
        The dtype of the result; by default the framework decides.

    Returns
    -------
    tensor
        Of the chosen backend, or of x's own. A NumPy array if there is neither; within f and
        grad_fn it is a tensor of the op's backend, on the device of the op's first tensor.

    Raises
    ------
    BackendError
        If x is a tensor of another framework than the chosen backend's.

    Examples
    --------
    >>> convert_to_tensor([1, 2], "float32")
    array([1., 2.], dtype=float32)
    """
    backend = backend_to_convert_to(x)
    tensor = as_tensor("op_convert_to_tensor", backend, x)
    return backend.convert_to_tensor(x if tensor is None else tensor, dtype)


def cast(x: Any, dtype: Any) -> Tensor:
    """Return x, a tensor of any shape, in another dtype (a name such as "float32", or the
    framework's own).

    Examples
    --------
    >>> cast(np.array([1.5]), "int64")
    array([1])
    """
    return convert_to_tensor(x, dtype)


def convert_to_numpy(x: Any) -> np.ndarray[Any, Any]:
    """Return x, a tensor of any framework, shape and dtype, as a NumPy array: on the host, not
    differentiated.

    Examples
    --------
    >>> convert_to_numpy(2.5)
    array(2.5)
    """
    x = value_of(x)
    name = framework_of(x)
    return np.asarray(x) if name is None else load(name).convert_to_numpy(x)


def stop_gradient(x: Any) -> Tensor:
    """Return x, a tensor of any shape, as a constant: the same value, and no gradient.

    Examples
    --------
    >>> stop_gradient(np.array([2.5]))
    array([2.5])
    """
    backend = backend_or_numpy([x])
    return backend.stop_gradient(x if backend.is_tensor(x) else convert_to_tensor(x))


def is_tensor(x: object) -> bool:
    """Return True if x is a tensor of a framework: an array, a tracer, a Variable, a Parameter.

    Examples
    --------
    >>> is_tensor(np.zeros(2)), is_tensor(2.0)
    (True, False)
    """
    return framework_of(x) is not None


def shape(x: Any) -> tuple[Any, ...]:
    """Return the shape of a tensor as a tuple; None stands for a size that a graph does not know
    yet.

    Examples
    --------
    >>> shape(np.zeros((2, 3)))
    (2, 3)
    """
    return tuple(convert_to_tensor(x).shape)


def dtype(x: Any) -> str:
    """Return the name of a tensor's dtype, the same in every framework: "float32", "bfloat16",
    "int64".

    Examples
    --------
    >>> dtype(np.zeros(2))
    'float64'
    """
    return dtype_name(convert_to_tensor(x).dtype)
