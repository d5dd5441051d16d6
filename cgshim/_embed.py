"""op_embed_gradient: give a value the gradient that is known for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cgshim._dispatch import backend_or_numpy, chosen_backend, framework_of_type
from cgshim._op import CustomGradient
from cgshim._decorator import op_custom_gradient
from cgshim._dtypes import is_complex, is_differentiable
from cgshim._errors import (
    BackendError,
    CustomGradientTypeError,
    CustomGradientValueError,
    describe,
    describe_tree,
    refusal,
    shape_of,
)
from cgshim._foreign import KERAS, is_traced, not_converted
from cgshim._gradients import fits
from cgshim._protocol import Backend, Tensor
from cgshim._registry import load
from cgshim._pytree import as_tensor, partition
from cgshim._transforms import floats_to_tensors


@not_converted
def op_embed_gradient(
    fx: Any, gx: Any, x: Any, fx_gx_manually_stopped: bool = False, name: str | None = None
) -> Tensor:
    """Return a value with the gradient that is known for it.

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
        What fx was computed from, of any float or complex dtype.
    fx_gx_manually_stopped : bool
        By default fx and gx are constants: the gradient of fx is gx with respect to x and zero with
        respect to all else, and a derivative of that gradient is zero. If True, they are used as
        they are: fx has its own gradients too (stop those through x), and the second derivative is
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
    The parameters are those of ``tfp.math.custom_gradient``; POT's ``set_gradients(value, x, gx)``
    is the same.
    """
    op = name or "op_embed_gradient"
    if not (fx_gx_manually_stopped or is_traced()):
        embedded = _embedded_at_once(fx, gx, x)
        if embedded is not None:
            return embedded
    backend = backend_or_numpy([fx, gx, x])
    tensors, spec = partition(op, backend, floats_to_tensors(backend, x))
    if not tensors:
        raise refusal(CustomGradientTypeError, op, must="x must hold a float or complex tensor",
                      got=describe_tree(x), do="give what fx was computed from")  # fmt: skip
    value = _value(op, backend, fx, tensors[0].dtype)
    aligned = spec.align(gx)
    if aligned is None:
        raise refusal(CustomGradientTypeError, op, must="gx must be structured as x",
                      got=f"{describe_tree(gx)} for x {describe_tree(x)}",
                      do="give one gradient for each tensor of x")  # fmt: skip
    sources, gradients, indices = [], [], []
    for source, gradient, path in zip(tensors, aligned, spec.paths("x"), strict=True):
        if not is_differentiable(source.dtype):
            raise refusal(CustomGradientTypeError, op,
                          must=f"{path} must be a float or complex tensor", got=describe(source),
                          do="convert it before fx is computed from it, or leave it out")  # fmt: skip
        if gradient is not None:
            sources.append(source)
            gradients.append(_gradient(op, backend, gradient, source, path))
            indices.append(_index(op, value, source, path))
    if not fx_gx_manually_stopped:
        value, *gradients = map(backend.stop_gradient, [value, *gradients])
    return _op_of(op)(value, *gradients, *sources, backend=backend, indices=indices)


_ops: dict[str, CustomGradient[..., Any]] = {}
"""by name; a plain dict, for torch.compile ignores functools.lru_cache"""


@not_converted
def _op_of(name: str) -> CustomGradient[..., Any]:
    op = _ops.get(name)
    if op is None:
        op = op_custom_gradient(_with_gradients, forward_mode=True, name=name)
        if not is_traced() and len(_ops) < _MOST:
            _ops[name] = op
    return op


_MOST = 256
"""how many ops are kept at most: a name may be made anew for each call"""


def _embedded_at_once(fx: Any, gx: Any, x: Any) -> Tensor | None:
    """Return fx with its gradient by the backend's own way for a number that was computed from one
    tensor of its dtype, as nearly all are; None if it has none, or the call is another.
    """
    name = framework_of_type(type(x))
    if (
        name in (None, KERAS)
        or framework_of_type(type(fx)) != name
        or framework_of_type(type(gx)) != name
        or chosen_backend() not in (None, name)
    ):
        return None
    embed: Callable[..., Tensor | None] | None = getattr(load(name), "embed_gradient", None)
    dtype = x.dtype
    if embed is None or not (fx.dtype == dtype == gx.dtype and is_differentiable(dtype)):
        return None
    return embed(fx, gx, x) if gx.shape == x.shape and fx.shape == () else None


@not_converted
def _with_gradients(
    fx: Tensor, *gx_and_x: Tensor, backend: Backend, indices: Sequence[tuple[Any, ...]]
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Return fx and its rule. gx is an argument, not captured, so that its own gradient exists for
    the second order.
    """
    gx = gx_and_x[: len(indices)]

    @not_converted
    def grad_fn(upstream: Tensor) -> Any:
        of_x = [
            _times(backend, upstream, gradient, index)
            for gradient, index in zip(gx, indices, strict=True)
        ]
        return upstream, *[None] * len(gx), *of_x

    return fx, grad_fn


def _times(backend: Backend, upstream: Tensor, gradient: Tensor, index: tuple[Any, ...]) -> Tensor:
    spread = upstream[index] if index else upstream
    return backend.convert_to_tensor(spread, gradient.dtype) * gradient


def _value(op: str, backend: Backend, fx: Any, dtype: Any) -> Tensor:
    value = as_tensor(op, backend, fx)
    if value is None and isinstance(fx, (int, float, complex)):
        value = backend.convert_to_tensor(
            fx, None if isinstance(fx, complex) and not is_complex(dtype) else dtype
        )
    if value is None or not is_differentiable(value.dtype):
        raise refusal(CustomGradientTypeError, op, must="fx must be one float or complex tensor",
                      got=describe_tree(fx), do="call it for each value")  # fmt: skip
    return value


def _index(op: str, fx: Tensor, x: Tensor, path: str) -> tuple[Any, ...]:
    """Return by which index a tensor like fx can be multiplied with one like x."""
    if is_complex(fx.dtype) and not is_complex(x.dtype):
        raise refusal(CustomGradientValueError, op, must=f"{path} must be complex when fx is",
                      got=f"{describe(x)} for fx {describe(fx)}",
                      do="embed the real and the imaginary part of fx by themselves")  # fmt: skip
    batch, shape = shape_of(fx.shape), shape_of(x.shape)
    if all(size == 1 for size in batch):  # one value is broadcast as a scalar
        return (0,) * len(batch)
    if ... in batch or ... in shape or not fits(shape[: len(batch)], batch):
        raise refusal(CustomGradientValueError, op,
                      must=f"the shape of {path} must begin with the shape of fx",
                      got=f"{describe(x)} for fx {describe(fx)}",
                      do="reduce fx to a scalar, or to one value for each leading index of x")  # fmt: skip
    return (..., *[None] * (len(shape) - len(batch)))


def _gradient(op: str, backend: Backend, gradient: Any, x: Tensor, path: str) -> Tensor:
    """Return a gradient in the shape and the dtype of x."""
    tensor = as_tensor(op, backend, gradient, x)
    if tensor is None:
        tensor = backend.convert_to_tensor(gradient)
    if is_complex(tensor.dtype) and not is_complex(x.dtype):
        raise refusal(CustomGradientValueError, op,
                      must=f"the gradient gx for {path} must be real as it is",
                      got=f"{describe(tensor)} for {describe(x)}", do="take its real part")  # fmt: skip
    tensor = backend.convert_to_tensor(tensor, x.dtype)
    if shape_of(tensor.shape) == () != shape_of(x.shape):
        return _spread(op, tensor, x, path)
    if fits(tensor.shape, x.shape):
        return tensor
    raise refusal(CustomGradientValueError, op,
                  must=f"the gradient gx for {path} must have its shape, or be a scalar",
                  got=f"{describe(tensor)} for {describe(x)}",
                  do="sum over what was broadcast (op_sum_to_shape), or broadcast it")  # fmt: skip


def _spread(op: str, scalar: Tensor, x: Tensor, path: str) -> Tensor:
    """Return a tensor like x that holds the scalar in every element."""
    from cgshim import ops  # imports NumPy, which `import cgshim` does not

    try:
        return ops.ones_like(x) * scalar
    except BackendError as error:
        raise refusal(CustomGradientValueError, op,
                      must=f"the gradient gx for {path} must have its shape where {path} is sparse",
                      got=f"{describe(scalar)} for {describe(x)}",
                      do="give it where x is given") from error  # fmt: skip
