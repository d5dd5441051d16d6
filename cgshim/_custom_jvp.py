"""op_custom_jvp: make an op of a function and its derivative in forward mode."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

from cgshim._call import Call
from cgshim._custom_gradient import CustomGradient, P, T_co
from cgshim._dtypes import is_differentiable
from cgshim._errors import (
    CustomGradientTypeError,
    TransformationError,
    count,
    describe,
    function_name,
    refusal,
)
from cgshim._forms import Form, convention_of
from cgshim._gradients import Arguments, zeros_like
from cgshim._protocol import Tensor
from cgshim._registry import name_of
from cgshim._rule import Rule, refuse_nonlinear_jvp, spelled
from cgshim._trees import TreeSpec, subvals


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
        the tangents: forward mode calls it, and reverse mode transposes it. If it has a parameter
        ``needs_input_grad``, that is structured as the arguments too: False for a tangent of zeros.
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
        f,
        forward_mode=True,
        once_differentiable=once_differentiable,
        name=name,
        kind_of_call=JvpCall,
    )


class JvpRule(Rule):
    """The rule of a run in which f returned jvp_fn: the transpose of that."""

    __slots__ = ()
    is_transpose = True

    @property
    def jvp_fn(self) -> Callable[..., Any]:
        """What f returned."""
        return self.grad_fn

    def __call__(
        self,
        inputs: Sequence[Tensor],
        upstreams: Sequence[Tensor],
        variables: Sequence[Tensor] = (),
        needed: Sequence[bool] | None = None,
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return the gradients of the inputs, of which only the types count."""
        op, backend = self.arguments.op, self.arguments.backend
        none = [None] * len(inputs)
        asked = needed or [True] * len(inputs)
        places = [at for at, x in enumerate(inputs) if asked[at] and is_differentiable(x.dtype)]
        ends = [at for at, u in enumerate(upstreams) if is_differentiable(u.dtype)]

        def flat_jvp(*tangents: Tensor) -> list[Tensor]:
            full = subvals(none, places, tangents)
            tangents_out = self.tangents(
                full, upstreams, lambda at: zeros_like(backend, inputs[at])
            )
            return [
                zeros_like(backend, upstreams[at]) if tangents_out[at] is None else tangents_out[at]
                for at in ends
            ]

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
        return subvals(none, places, gradients), []


def _pair_with_jvp(op: str, f: Callable[..., Any], result: Any) -> tuple[Any, Callable[..., Any]]:
    """Return what f returned if it is a pair (output, jvp_fn)."""
    if isinstance(result, tuple) and len(result) == 2 and callable(result[1]):
        return result
    raise refusal(CustomGradientTypeError, op,
                  must=f"{function_name(f)} must return a pair (output, jvp_fn)",
                  got=describe(result),
                  do="return the output and a function from tangents of the arguments to "
                  "that of the output")  # fmt: skip


def _convention_of_jvp(
    arguments: Arguments, jvp_fn: Callable[..., Any], output: TreeSpec
) -> tuple[Form, None, bool]:
    """Return how the transpose of jvp_fn is called: with the arguments, for their types; raise an
    error if jvp_fn does not take a tangent for each.
    """
    arity = len(arguments.specs)
    form, _, takes_needs_input_grad = convention_of(jvp_fn, arity, arity)
    if form == "flat" or (form == "structured" and arity == 1):
        return "arguments", None, takes_needs_input_grad
    raise refusal(CustomGradientTypeError, arguments.op,
                  must="jvp_fn must take a tangent for each argument",
                  got=f"{spelled(jvp_fn)} for {count(arity, 'argument')}",
                  do="write jvp(d1, d2, ...), with or without needs_input_grad last")  # fmt: skip


class JvpCall(Call):
    """A call of an op whose f returns jvp_fn."""

    __slots__ = ()
    pair = staticmethod(_pair_with_jvp)
    convention = staticmethod(_convention_of_jvp)
    kind_of_rule = JvpRule
