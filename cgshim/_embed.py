"""op_embed_gradient: give a value its known gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cgshim._dispatch import backend_or_numpy, beside
from cgshim._dtypes import is_complex, is_differentiable
from cgshim._errors import (
    CustomGradientTypeError,
    CustomGradientValueError,
    describe,
    describe_tree,
    refusal,
    shape_of,
)
from cgshim._foreign import not_converted
from cgshim._gradients import check_gradient, fits
from cgshim._op import CustomGradient
from cgshim._protocol import Backend, Tensor
from cgshim._pytree import as_tensor, partition
from cgshim._transforms import floats_to_tensors


@not_converted
def op_embed_gradient(
    fx: Any, gx: Any, x: Any, fx_gx_manually_stopped: bool = False, name: str | None = None
) -> Tensor:
    """Return a value with a known gradient.

    Parameters
    ----------
    fx : tensor
        The value: a scalar, one element, or a batch of values, whose shape is the beginning of the
        shape of each x.
    gx : tree of tensors
        The gradient of fx with respect to each x, in its shape; a scalar stands for the same
        gradient in every element, None for no gradient. If fx is a batch, each value depends only
        on its own part of x. For a complex x it is dfx/dRe(x) + i dfx/dIm(x), as in rules, on every
        backend.
    x : tree of tensors
        The tensors that fx was computed from, of any float or complex dtype.
    fx_gx_manually_stopped : bool
        By default fx and gx are constants: the gradient of fx is gx with respect to x and zero
        otherwise, and the derivative of this gradient is zero. If True, cgshim does not stop them:
        fx keeps its own gradients too (stop the gradients through x), and the second derivative is
        the gradient of gx.
    name : str, optional
        The op's name in messages.

    Returns
    -------
    tensor
        fx, whose gradient with respect to each x is upstream times gx, in reverse and in forward
        mode.

    Raises
    ------
    CustomGradientTypeError
        If x holds an integer tensor or no tensor at all, or gx is not structured as x.
    CustomGradientValueError
        If shapes or dtypes do not fit.

    Examples
    --------
    >>> import numpy as np
    >>> from cgshim import op_grad
    >>> loss = lambda x: 3.0 * op_embed_gradient((x * x).sum(), 7.0 * x, x)
    >>> op_grad(loss)(np.array([1.0, 10.0]))
    array([ 21., 210.])

    Notes
    -----
    The parameters follow ``tfp.math.custom_gradient``. It is ``set_gradients(value, x, gx)`` of
    POT.
    """
    op = name or "op_embed_gradient"
    backend = backend_or_numpy([fx, gx, x])
    tensors, spec = partition(op, backend, floats_to_tensors(backend, x))
    if not (tensors and all(is_differentiable(t.dtype) for t in tensors)):
        raise refusal(CustomGradientTypeError, op, must="x must hold only float or complex tensors",
                      got=describe_tree(x), do="give what fx was computed from")  # fmt: skip
    aligned = spec.align(gx)
    if aligned is None:
        raise refusal(CustomGradientTypeError, op, must="gx must be structured as x",
                      got=f"{describe_tree(gx)} for x {describe_tree(x)}",
                      do="give one gradient for each tensor of x")  # fmt: skip
    value = _value(op, backend, fx, tensors[0])
    sources, gradients, indices = [], [], []
    for at, (source, gradient) in enumerate(zip(tensors, aligned, strict=True)):
        if gradient is not None:
            path = partial(spec.path, "x", at)
            sources.append(source)
            gradients.append(_gradient(op, backend, gradient, source, path))
            indices.append(_index(op, value, source, path))
    if not fx_gx_manually_stopped:
        value, *gradients = map(backend.stop_gradient, [value, *gradients])
    embed = _embed if name is None else CustomGradient(_with_gradients, forward_mode=True, name=op)
    return embed(value, *gradients, *sources, backend=backend, indices=indices)


@not_converted
def _with_gradients(
    fx: Tensor, *gx_and_x: Tensor, backend: Backend, indices: Sequence[tuple[Any, ...]]
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Return fx and its rule. gx is an argument, so that second derivatives include it."""
    gx = gx_and_x[: len(indices)]

    @not_converted
    def grad_fn(upstream: Tensor) -> Any:
        spread = [upstream[at] if at else upstream for at in indices]
        of_x = [backend.convert_to_tensor(u, g.dtype) * g for u, g in zip(spread, gx, strict=True)]
        return upstream, *[None] * len(gx), *of_x

    return fx, grad_fn


_embed = CustomGradient(_with_gradients, forward_mode=True, name="op_embed_gradient")


def _value(op: str, backend: Backend, fx: Any, x: Tensor) -> Tensor:
    value = as_tensor(op, backend, fx, x)
    if value is None and isinstance(fx, (int, float, complex)):
        dtype = None if isinstance(fx, complex) and not is_complex(x.dtype) else x.dtype
        value = beside(backend, x, backend.convert_to_tensor, fx, dtype)
    if value is None or not is_differentiable(value.dtype):
        raise refusal(CustomGradientTypeError, op, must="fx must be one float or complex tensor",
                      got=describe_tree(fx), do="call it for each value")  # fmt: skip
    return value


def _gradient(
    op: str, backend: Backend, gradient: Any, x: Tensor, path: Callable[[], str]
) -> Tensor:
    """Return a gradient in the shape and the dtype of x; a scalar applies to every element."""
    tensor = as_tensor(op, backend, gradient, x)
    if tensor is None:
        tensor = backend.convert_to_tensor(gradient)
    if is_complex(tensor.dtype) and not is_complex(x.dtype):
        raise refusal(CustomGradientValueError, op,
                      must=f"the gradient gx for {path()} must be real as it is",
                      got=f"{describe(tensor)} for {describe(x)}", do="take its real part")  # fmt: skip
    if shape_of(tensor.shape) == () != shape_of(x.shape):
        from cgshim import ops  # imports NumPy, which `import cgshim` does not

        tensor = ops.ones_like(x) * backend.convert_to_tensor(tensor, x.dtype)
    return check_gradient(op, backend, tensor, x.shape, x.dtype, path)


def _index(op: str, fx: Tensor, x: Tensor, path: Callable[[], str]) -> tuple[Any, ...]:
    """Return the index that broadcasts a tensor like fx against one like x."""
    batch, shape = shape_of(fx.shape), shape_of(x.shape)
    is_value = all(size == 1 for size in batch)  # one value broadcasts as a scalar
    is_batch = ... not in (*batch, *shape) and fits(shape[: len(batch)], batch)
    if not (is_value or is_batch) or (is_complex(fx.dtype) and not is_complex(x.dtype)):
        raise refusal(CustomGradientValueError, op,
                      must=f"fx must be a scalar or one value for each leading index of {path()}, and real if that is",
                      got=f"{describe(x)} for fx {describe(fx)}",
                      do="reduce fx, or embed its real and imaginary part by themselves")  # fmt: skip
    return (0,) * len(batch) if is_value else (..., *[None] * (len(shape) - len(batch)))
