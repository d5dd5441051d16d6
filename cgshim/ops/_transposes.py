"""What rules need most: the transposes of broadcasting and of gathering."""

from __future__ import annotations

from typing import Any

from cgshim.backend import (
    BackendError,
    CustomGradientValueError,
    backend_or_numpy,
    describe,
    describe_spec,
    not_converted,
    refusal,
)
from cgshim.ops._numpy import ops, own_function
from cgshim.ops._tensors import convert_to_tensor, shape

Tensor = Any


@not_converted
def sum_to_shape(gradient: Tensor, like: Any) -> Tensor:
    """Sum a gradient over what was broadcast: the transpose of broadcasting ``like`` to the
    gradient's shape.

    Parameters
    ----------
    gradient : tensor
        Its shape is one to which like's can be broadcast; any dtype.
    like : tensor or tuple of int
        What was broadcast, or its shape.

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
    wanted = tuple(like) if isinstance(like, (tuple, list)) else shape(like)
    given = shape(gradient)
    # sizes of a graph's run
    if None in (*wanted, *given) and (own := own_function(backend, "sum_to_shape")):
        return own(gradient, like)
    extra = len(given) - len(wanted)
    if extra < 0 or any(size not in (1, given[extra + at]) for at, size in enumerate(wanted)):
        raise refusal(CustomGradientValueError, "op_sum_to_shape",
                      must=f"like must broadcast to the gradient's shape {list(given)}",
                      got=describe_spec(wanted, gradient.dtype), do="give what the rule broadcast")  # fmt: skip
    axes = [
        *range(extra),
        *[extra + at for at, size in enumerate(wanted) if size == 1 != given[extra + at]],
    ]
    summed = ops.sum(gradient, axis=tuple(axes)) if axes else gradient
    return ops.reshape(summed, wanted)


def index_add(x: Tensor, index: Tensor, values: Tensor, axis: int = 0) -> Tensor:
    """Add values to x at indices along an axis, twice at an index that comes twice: the transpose
    of a gather.

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
    own = own_function(backend, "index_add")
    if own is None:
        raise refusal(BackendError, "op_index_add", must="the backend must add at indices",
                      got="none that does", do="call the framework's own function")  # fmt: skip
    return own(x, index, values, axis)
