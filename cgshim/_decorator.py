"""op_custom_gradient: make an op of a function and its rule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

from cgshim._batches import WithBatches
from cgshim._custom_gradient import CustomGradient, P, T_co, WithRules
from cgshim._errors import CustomGradientTypeError, describe, function_name, refusal

_NO_FUNCTIONS = (property, functools.cached_property, functools.singledispatchmethod)
"""descriptors whose attribute is not a function, or has the signature of another one"""


@overload
def op_custom_gradient(
    f: Callable[P, WithRules[T_co]],
    /,
    *,
    forward_mode: bool = False,
    once_differentiable: bool = False,
    vmap: Callable[..., Any] | None = None,
    host_outputs: Any = None,
    vectorized: bool = False,
    keep: int = 8,
    name: str | None = None,
) -> CustomGradient[P, T_co]: ...
@overload
def op_custom_gradient(
    f: None = None,
    /,
    *,
    forward_mode: bool = False,
    once_differentiable: bool = False,
    vmap: Callable[..., Any] | None = None,
    host_outputs: Any = None,
    vectorized: bool = False,
    keep: int = 8,
    name: str | None = None,
) -> Callable[[Callable[P, WithRules[T_co]]], CustomGradient[P, T_co]]: ...
def op_custom_gradient(
    f: Callable[..., WithRules[Any]] | None = None,
    /,
    *,
    forward_mode: bool = False,
    once_differentiable: bool = False,
    vmap: Callable[..., Any] | None = None,
    host_outputs: Any = None,
    vectorized: bool = False,
    keep: int = 8,
    name: str | None = None,
) -> Any:
    """Give a function its own gradient, in every framework.

    Parameters
    ----------
    f : callable
        ``f(*args, **options) -> (output, grad_fn)``. Arguments and output are trees whose tensors
        (of any shape and dtype) take part in differentiation; the rest of them is static.
        Keyword-only parameters are options. ``grad_fn`` turns upstream gradients, structured as the
        output, into one gradient for each argument. Write it as ``grad(upstream)``, as
        ``grad(*args, upstream)`` or as ``grad(d1, d2, ...)`` with one upstream gradient for each
        tensor output. If it has a parameter ``variables`` (or ``**kwargs``), it gets the trainable
        state that f reads, and returns ``(gradients, [one for each variable])``. If it has a
        parameter ``needs_input_grad``, it gets a bool for each tensor in the arguments, structured
        as they are, with None for what is static: True if its gradient will be used. A gradient
        that is not needed may be None. If f has a keyword-only parameter of this name (with a
        default, for type checkers), it gets the same, for all gradients that may be taken of its
        output.
        An f that returns ``(output, grad_fn, jvp_fn)`` has a rule for each mode: ``jvp_fn`` is as
        that of `op_custom_jvp`. That they agree is the author's business; ``check_gradients``
        compares both with differences.
    forward_mode : bool
        Promise that grad_fn is linear in upstream, so that forward mode (jvp, jacfwd) may use its
        transpose.
    once_differentiable : bool
        Raise an error if the gradient is differentiated. f then never runs again, and only what
        grad_fn keeps is saved.
    vmap : callable, optional
        A rule for batches, for what a framework cannot map by itself (a kernel):
        ``vmap(size, in_batched, *args) -> (output, grad_fn, out_batched)``. The framework's vmap
        calls it with the batch at the first axis of the arguments for which ``in_batched``,
        structured as the arguments, is True. ``out_batched`` is a bool, or bools structured as the
        output. grad_fn is for the whole batch: the gradient of an argument without the batch has
        that argument's shape.
    host_outputs : callable or tree of Spec, optional
        Say that f and grad_fn are NumPy code, which runs on the host on every backend, in compiled
        programs too: ``host_outputs(*specs)`` returns the shapes and dtypes of the output, as
        ``outputs`` of `op_host` does. grad_fn may keep any Python object, such as a factorization.
        f must be pure, and the op has no second derivative. With ``forward_mode=True`` f returns
        ``(output, grad_fn, jvp_fn)``, and jvp_fn runs on the host too. With ``"unknown"`` f may
        return anything, in eager calls alone.
    vectorized : bool
        With host_outputs: f and grad_fn take any number of leading batch axes, which all arrays
        then have, and are called once for a vmapped batch. If not, they are called for each
        element.
    keep : int
        With host_outputs: for how many runs of f compiled programs keep what grad_fn holds; f runs
        again for an older one. What a call that is not compiled holds is kept as long as its
        gradient may be taken.
    name : str, optional
        The op's name in messages; by default f's name.

    Returns
    -------
    callable
        It takes f's parameters, and returns f's output without grad_fn. Without ``f``, a decorator.

    Raises
    ------
    CustomGradientTypeError
        If f does not return such a pair, or grad_fn has no known form; if a rule for batches does
        not return such a triple.
    CustomGradientValueError
        In the backward pass, if a gradient does not have the shape of its argument.
    BackendError
        If tensors of two frameworks meet, or the chosen backend cannot be imported.

    Examples
    --------
    >>> import numpy as np
    >>> @op_custom_gradient
    ... def double(x):
    ...     return 2 * x, lambda upstream: 2 * upstream
    >>> double(np.array([3.0]))
    array([6.])

    Notes
    -----
    The convention is that of ``tf.custom_gradient`` and ``keras.ops.custom_gradient``, on every
    backend.

    The derivative of a gradient goes through grad_fn and what it keeps. A residual that f returns
    is the op's output, and grad_fn gives its derivative. Any other is a function of the
    arguments, through f's own operations. f runs once per call; if the derivative of such a tensor
    is needed and was not recorded, f runs once more for it. A gradient of None is zero. A grad_fn
    that raises an exception forbids the gradient: taking one raises it.

    ``needs_input_grad`` is PyTorch's ``ctx.needs_input_grad``: True for what requires grad, for
    what a tape watches, and for what a derivative is taken of. Where a framework cannot tell (a
    ``tf.function``; f itself in staged code of JAX), it is True, and the compiler removes what is
    not used. Staged code of JAX traces a grad_fn that takes it once for each choice of up to three
    arguments.

    Complex numbers: upstream and gradients of a real loss L are dL/dx + i dL/dy, so the rule of ``z
    * z`` is ``upstream * conj(2 * z)``. If a framework uses the conjugate (JAX, autograd), cgshim
    conjugates.
    """
    if f is None:
        return functools.partial(
            op_custom_gradient, forward_mode=forward_mode, once_differentiable=once_differentiable,
            vmap=vmap, host_outputs=host_outputs, vectorized=vectorized,
            keep=keep, name=name,
        )  # fmt: skip
    is_bound_first = host_outputs is None and hasattr(f, "__get__")  # as a classmethod
    if not (callable(f) or is_bound_first) or isinstance(f, _NO_FUNCTIONS):
        raise refusal(CustomGradientTypeError, "op_custom_gradient", must="f must be callable",
                      got=describe(f), do="decorate a function")  # fmt: skip
    name = name or function_name(f)
    if vectorized and host_outputs is None:
        raise refusal(CustomGradientTypeError, name,
                      must="vectorized says that NumPy code takes a batch", got="no host_outputs",
                      do="write vmap=, a rule for batches")  # fmt: skip
    if vmap is not None and not (callable(vmap) and host_outputs is None):
        raise refusal(CustomGradientTypeError, name,
                      must="vmap must be a rule for batches of tensors",
                      got=describe(vmap) if host_outputs is None else "host_outputs besides",
                      do="write a function, or host_outputs with vectorized=True")  # fmt: skip
    if host_outputs is not None:
        # one that is unknown is known to nobody who would differentiate its gradient
        once_differentiable = once_differentiable or isinstance(host_outputs, str)
        # with it NumPy, which `import cgshim` does without
        from cgshim.host.backend import HostPair

        f = HostPair(
            f, host_outputs, keep=keep, forward_mode=forward_mode, vectorized=vectorized, name=name
        )
    if vmap is not None:
        f = WithBatches(f, vmap)
    return CustomGradient(
        f, forward_mode=forward_mode, once_differentiable=once_differentiable, name=name
    )
