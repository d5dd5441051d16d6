"""op_custom_jvp: make an op of a function and its derivative in forward mode."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

from cgshim._choice import backend_for
from cgshim._custom_gradient import CustomGradient
from cgshim._dtypes import is_differentiable
from cgshim._errors import (
    CustomGradientTypeError,
    TransformationError,
    describe,
    function_name,
    refusal,
)
from cgshim._gradients import Arguments
from cgshim._protocol import Backend, Tensor
from cgshim._registry import name_of
from cgshim._rule import hold_jvp_fn, refuse_nonlinear_jvp, tangents_by
from cgshim._trees import combine_each, partition, partition_each, subvals

P = ParamSpec("P")
T_co = TypeVar("T_co", covariant=True)


@overload
def op_custom_jvp(
    f: Callable[P, tuple[T_co, Any]],
    /,
    *,
    once_differentiable: bool = False,
    name: str | None = None,
) -> CustomGradient[P, T_co]: ...
@overload
def op_custom_jvp(
    f: None = None, /, *, once_differentiable: bool = False, name: str | None = None
) -> Callable[[Callable[P, tuple[T_co, Any]]], CustomGradient[P, T_co]]: ...
def op_custom_jvp(
    f: Callable[..., tuple[Any, Any]] | None = None,
    /,
    *,
    once_differentiable: bool = False,
    name: str | None = None,
) -> Any:
    """Give a function its own derivative, as forward mode has it, in every framework.

    Parameters
    ----------
    f : callable
        ``f(*args, **options) -> (output, jvp_fn)``, with arguments and output as those of
        `op_custom_gradient`. ``jvp_fn(*tangents)`` gets a tangent for each argument, structured as
        it, of the same shapes and dtypes, with None for all but float and complex tensors. It
        returns the tangent of the output, structured as the output; None is zero. It is linear in
        the tangents: forward mode calls it, and reverse mode transposes it.
    once_differentiable : bool
        Raise an error if the derivative is differentiated.
    name : str, optional
        The op's name in messages; by default f's name.

    Returns
    -------
    callable
        It takes f's parameters, and returns f's output without jvp_fn. Without ``f``, a decorator.

    Raises
    ------
    CustomGradientTypeError
        If f does not return such a pair.
    CustomGradientValueError
        If the tangents that jvp_fn returns do not fit the output.
    TransformationError
        In reverse mode, if jvp_fn turns out not to be linear, or the framework cannot transpose it.

    Examples
    --------
    >>> import numpy as np
    >>> from cgshim import op_grad
    >>> @op_custom_jvp
    ... def scale(x, y):
    ...     return x * y, lambda dx, dy: dx * y + x * dy
    >>> op_grad(scale, argnums=(0, 1))(np.array(3.0), np.array(5.0))
    (array(5.), array(3.))

    Notes
    -----
    It is what ``jax.custom_jvp`` is to ``jax.custom_vjp``. A function that has different rules for
    the two modes returns ``(output, grad_fn, jvp_fn)`` to `op_custom_gradient`.

    An output of f that jvp_fn reads is the op's output, whose derivative is jvp_fn again; any other
    tensor that it keeps is a function of the arguments.
    """
    if f is None:
        return functools.partial(op_custom_jvp, once_differentiable=once_differentiable, name=name)
    if not callable(f):
        raise refusal(CustomGradientTypeError, "op_custom_jvp", must="f must be callable",
                      got=describe(f), do="decorate a function")  # fmt: skip
    return CustomGradient(
        _with_transpose(f, name or function_name(f)),
        forward_mode=True,
        once_differentiable=once_differentiable,
        name=name or function_name(f),
    )


def _with_transpose(f: Callable[..., Any], op: str) -> Callable[..., Any]:
    """Return f with a rule for each mode: jvp_fn, and its transpose."""

    @functools.wraps(f)
    def in_both_modes(*args: Any, **options: Any) -> tuple[Any, Callable[..., Any]]:
        result = f(*args, **options)
        if not (isinstance(result, tuple) and len(result) == 2 and callable(result[1])):
            raise refusal(CustomGradientTypeError, op,
                          must=f"{function_name(f)} must return a pair (output, jvp_fn)",
                          got=describe(result),
                          do="return the output and a function from tangents of the arguments to "
                          "that of the output")  # fmt: skip
        output, jvp_fn = result

        def grad_fn(*args: Any, upstream: Any) -> tuple[Any, ...]:
            return _transposed(op, jvp_fn, args, upstream)

        hold_jvp_fn(grad_fn, jvp_fn)
        return output, grad_fn

    return in_both_modes


def _transposed(
    op: str, jvp_fn: Callable[..., Any], args: Sequence[Any], upstream: Any
) -> tuple[Any, ...]:
    """Return the gradients of the arguments: the transpose of jvp_fn, applied to upstream."""
    backend = backend_for(args)
    assert backend is not None
    inputs, specs = partition_each(op, backend, args)
    upstreams, output = partition(op, backend, upstream)
    arguments = Arguments(op, backend, [], specs, all(map(backend.is_tensor, args)))
    places = [at for at, x in enumerate(inputs) if is_differentiable(x.dtype)]
    ends = [at for at, u in enumerate(upstreams) if is_differentiable(u.dtype)]

    def flat_jvp(*tangents: Tensor) -> list[Tensor]:
        full = subvals([None] * len(inputs), places, tangents)
        found = tangents_by(jvp_fn, arguments, full, output, upstreams)
        return [_or_zeros(backend, found[at], upstreams[at]) for at in ends]

    transposed = getattr(backend, "transposed", None)
    if transposed is None:
        raise refusal(TransformationError, op,
                      must="reverse mode transposes jvp_fn", got=f"{name_of(backend)}, which cannot",
                      do="return (output, grad_fn, jvp_fn) to op_custom_gradient")  # fmt: skip
    gradients = transposed(
        flat_jvp,
        [inputs[at] for at in places],
        [upstreams[at] for at in ends],
        functools.partial(refuse_nonlinear_jvp, op),
    )
    of_inputs = subvals([None] * len(inputs), places, gradients)
    return tuple(combine_each([spec.without_static() for spec in specs], of_inputs))


def _or_zeros(backend: Backend, tangent: Tensor | None, like: Tensor) -> Tensor:
    if tangent is not None:
        return tangent
    import numpy as np  # above, it would take half of the time of importing cgshim

    return backend.convert_to_tensor(np.zeros(like.shape), like.dtype)
