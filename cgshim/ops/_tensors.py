"""The few functions that every rule needs, and that frameworks spell differently."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cgshim._dispatch import backend_or_numpy, backend_to_convert_to, framework_of, value_of
from cgshim._errors import describe_spec, describe_tree, shape_of
from cgshim._foreign import converted_as_caller, not_converted
from cgshim._pytree import as_tensor, partition
from cgshim._registry import load
from cgshim.backend import (
    Axis,
    CustomGradientTypeError,
    CustomGradientValueError,
    Tensor,
    axes_of,
    describe,
    dtype_name,
    refusal,
)
from cgshim.ops._numpy import function_of, ops, own_function

Tree = Any


@not_converted
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


@not_converted
def cast(x: Any, dtype: Any) -> Tensor:
    """Return x, a tensor of any shape, in another dtype (the framework's, or a name).

    Examples
    --------
    >>> cast(np.array([1.5]), "int64")
    array([1])
    """
    return convert_to_tensor(x, dtype)


@not_converted
def convert_to_numpy(x: Any) -> np.ndarray[Any, Any]:
    """Return x, a tensor of any framework, shape and dtype, as a detached NumPy array.

    Examples
    --------
    >>> convert_to_numpy(2.5)
    array(2.5)
    """
    x = value_of(x)
    name = framework_of(x)
    return np.asarray(x) if name is None else load(name).convert_to_numpy(x)


@not_converted
def stop_gradient(x: Any) -> Tensor:
    """Return x, a tensor of any shape, as a constant: the same value without a gradient.

    Examples
    --------
    >>> stop_gradient(np.array([2.5]))
    array([2.5])
    """
    backend = backend_or_numpy([x])
    return backend.stop_gradient(x if backend.is_tensor(x) else convert_to_tensor(x))


@not_converted
def is_tensor(x: object) -> bool:
    """Return True if x is a tensor of a framework: an array, a tracer, a Variable, a Parameter.

    Examples
    --------
    >>> is_tensor(np.zeros(2)), is_tensor(2.0)
    (True, False)
    """
    return framework_of(x) is not None


@not_converted
def shape(x: Any) -> tuple[Any, ...]:
    """Return the shape of a tensor as a tuple; None stands for a size that a graph leaves open.

    Examples
    --------
    >>> shape(np.zeros((2, 3)))
    (2, 3)
    """
    return tuple(convert_to_tensor(x).shape)


@not_converted
def dtype(x: Any) -> str:
    """Return the framework-free name of a tensor's dtype: "float32", "bfloat16", "int64".

    Examples
    --------
    >>> dtype(np.zeros(2))
    'float64'
    """
    # str: torch.compile can take the type of a new string, but not of a stored constant
    return str(dtype_name(convert_to_tensor(x).dtype))


# --- Transposes of broadcasting and of gathering --------------------------------------------------


@not_converted
def sum_to_shape(gradient: Tensor, like: Any) -> Tensor:
    """Sum a gradient over the broadcast axes: the transpose of broadcasting ``like``.

    Parameters
    ----------
    gradient : tensor
        Of a shape to which like broadcasts, and any dtype.
    like : tensor or tuple of int
        The tensor that was broadcast, or its shape.

    Returns
    -------
    tensor
        Of like's shape, and of the gradient's dtype.

    Raises
    ------
    CustomGradientValueError
        If like's shape cannot be broadcast to the gradient's.

    Examples
    --------
    >>> import numpy as np
    >>> sum_to_shape(np.ones((2, 3)), np.zeros((2, 1)))
    array([[3.],
           [3.]])

    Notes
    -----
    ``torch.Tensor.sum_to_size``, and TFP's ``fix_gradient_for_broadcasting``.
    """
    backend = backend_or_numpy([gradient, like])
    is_shape = isinstance(like, (tuple, list))
    wanted = shape_of(like if is_shape else convert_to_tensor(like).shape)
    actual = shape_of(convert_to_tensor(gradient).shape)
    is_known = all(size is not None and size is not ... for size in (*wanted, *actual))
    # else the sizes are known only when the graph runs
    if not is_known and (own := own_function(backend, "sum_to_shape")):
        return own(gradient, like)
    extra = len(actual) - len(wanted)
    if extra < 0 or any(size not in (1, actual[extra + at]) for at, size in enumerate(wanted)):
        raise refusal(CustomGradientValueError, "op_sum_to_shape",
                      must=f"like must broadcast to the gradient's shape {list(actual)}",
                      got=describe_spec(wanted, gradient.dtype), do="give what the rule broadcast")  # fmt: skip
    axes = [
        *range(extra),
        *[extra + at for at, size in enumerate(wanted) if size == 1 != actual[extra + at]],
    ]
    summed = ops.sum(gradient, axis=tuple(axes)) if axes else gradient
    return ops.reshape(summed, wanted)


@not_converted
def index_add(x: Tensor, index: Tensor, values: Tensor, axis: int = 0) -> Tensor:
    """Add values to x at indices along an axis: the transpose of a gather.

    Parameters
    ----------
    x : tensor
        Of any shape and float, complex or integer dtype. It stays as it is.
    index : tensor
        One axis of integers, from 0 to the axis's size - 1.
    values : tensor
        Shaped as x, but as index along the axis; of x's dtype.
    axis : int
        The axis of the indices.

    Returns
    -------
    tensor
        Shaped as x.

    Raises
    ------
    CustomGradientValueError
        If the shapes do not fit.

    Examples
    --------
    >>> import numpy as np
    >>> index_add(np.zeros(3), np.array([2, 0, 2]), np.array([1.0, 10.0, 100.0]))
    array([ 10.,   0., 101.])

    Notes
    -----
    ``torch.index_add``, ``x.at[index].add(values)`` in JAX, ``tf.tensor_scatter_nd_add``,
    ``np.add.at``.
    """
    backend = backend_or_numpy([x, index, values])
    x, index, values = (convert_to_tensor(each) for each in (x, index, values))
    axis = axis % len(x.shape)
    wanted = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    if len(index.shape) != 1 or tuple(values.shape) != wanted:
        raise refusal(CustomGradientValueError, "op_index_add",
                      must=f"values must have the shape {list(wanted)}, for one axis of indices",
                      got=f"{describe(values)} and {describe(index)}", do="reshape or broadcast them")  # fmt: skip
    return function_of(backend, "index_add")(x, index, values, axis)


# --- Trees of tensors -----------------------------------------------------------------------------


@not_converted
def tree_map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply fn to each tensor of a tree, and to the tensors at its place in the other trees.

    Parameters
    ----------
    fn : callable
        Takes one tensor for each tree.
    tree, *rest : tree
        Containers of the backend's registry (lists, dicts, modules), of the same structure. A leaf
        of the first that is not a tensor stays as it is.

    Returns
    -------
    tree
        Structured as the first.

    Raises
    ------
    CustomGradientTypeError
        If the trees have different structures.

    Examples
    --------
    >>> import numpy as np
    >>> tree_map(lambda a, b: a + 10 * b, {"w": np.ones(2), "name": "x"}, {"w": np.array([1.0, 2.0]), "name": "y"})
    {'w': array([11., 21.]), 'name': 'x'}
    """
    backend = backend_or_numpy([tree, *rest])
    tensors, spec = partition("op_tree_map", backend, tree)
    columns = []
    for other in rest:
        column, other_spec = partition("op_tree_map", backend, other)
        if other_spec.places != spec.places:
            raise refusal(CustomGradientTypeError, "op_tree_map",
                          must=f"the trees must be structured alike ({describe_tree(tree)})",
                          got=describe_tree(other), do="give trees with tensors at the same places")  # fmt: skip
        columns.append(column)
    fn = converted_as_caller(backend, fn)
    return spec.combine([fn(*each) for each in zip(tensors, *columns, strict=True)])


# --- Shared by the definitions of NumPy's functions: floats and reduced axes ------------------------


INEXACT = ("float", "bfloat", "complex")
"""prefixes of the names of dtypes that have fractions"""


def count_of(x: Tensor, axis: Axis, keepdims: bool) -> Any:
    """Return how many elements a reduction over these axes combines."""
    sizes = [x.shape[at] for at in axes_of(x, axis)]
    if None in sizes:  # a graph leaves the size open
        return ops.sum(ops.ones_like(as_float(x)), axis=axis, keepdims=keepdims)
    return math.prod(sizes)


def free_of(count: Any, ddof: float) -> Any:
    """Return the degrees of freedom, at least 0."""
    free = count - ddof
    return max(free, 0) if isinstance(free, (int, float)) else ops.maximum(free, 0.0)


def as_float(x: Tensor) -> Tensor:
    """Return x; integers and booleans become the dtype of the framework's division."""
    return x if dtype(x).startswith(INEXACT) else ops.true_divide(cast(x, "int64"), 1)


def as_last(x: Tensor, axis: Axis) -> Tensor:
    """Return x with these axes moved to the end and joined into one."""
    axes = axes_of(x, axis)
    moved = ops.moveaxis(x, axes, tuple(range(-len(axes), 0)))
    if len(axes) == 1:
        return moved
    remaining = moved.shape[: len(x.shape) - len(axes)]
    return ops.reshape(moved, (*remaining, math.prod(moved.shape[len(remaining) :])))


def with_axes(reduced: Tensor, x: Tensor, axis: Axis, keepdims: bool) -> Tensor:
    return ops.expand_dims(reduced, axes_of(x, axis)) if keepdims else reduced
