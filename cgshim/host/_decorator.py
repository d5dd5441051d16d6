"""op_host: make an op of a function that a framework cannot look into: one of NumPy arrays, or of
another framework's tensors, with that framework's own derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, overload

from cgshim.backend import (
    Backend,
    CustomGradient,
    CustomGradientTypeError,
    Parameters,
    available_backends,
    backend_or_numpy,
    describe,
    function_name,
    load,
    op_vjp,
    partition,
    refusal,
    use_backend,
    with_leaves,
)
from cgshim.host._call import HostFunction
from cgshim.host._gradient import HostPair, declared_of_floats
from cgshim.host._op import host_op

P = ParamSpec("P")


@overload
def op_host(
    f: Callable[P, Any],
    /,
    *,
    outputs: Any,
    vectorized: bool = False,
    backend: str | None = None,
    name: str | None = None,
) -> CustomGradient[P, Any]: ...
@overload
def op_host(
    f: None = None,
    /,
    *,
    outputs: Any,
    vectorized: bool = False,
    backend: str | None = None,
    name: str | None = None,
) -> Callable[[Callable[P, Any]], CustomGradient[P, Any]]: ...
def op_host(
    f: Callable[..., Any] | None = None,
    /,
    *,
    outputs: Any = None,
    vectorized: bool = False,
    backend: str | None = None,
    name: str | None = None,
) -> Any:
    """Turn a function of NumPy arrays into an op of every framework, eager and compiled.

    Parameters
    ----------
    f : callable
        ``f(*arrays, **options) -> array``, or a tree of arrays: SciPy, C code, a simulator. It is
        given C-contiguous, read-only NumPy arrays. Keyword-only parameters are static, as all that
        is not a tensor.
    outputs : callable or tree of Spec
        ``outputs(*specs)`` returns the shapes and dtypes of what f returns: a tree of `Spec`, or of
        anything with a shape and a dtype. It is given a `Spec` for each tensor, and f's options if
        it has parameters for them.
    vectorized : bool
        True if all arrays may have a leading batch axis, as under vmap. If not, f is called for
        each element of the batch, in one call on the host.
    backend : str, optional
        f is a function of this framework's tensors, and not of NumPy arrays: a torch model in a JAX
        program. The op then has the derivatives, of every order, that this framework's own autodiff
        finds. Pass parameters as arguments.
    name : str, optional
        The op's name in messages; by default f's name.

    Returns
    -------
    callable
        It takes f's parameters as tensors of any framework, and returns f's results as such
        tensors. Without ``backend`` it has no derivative: call it within `op_custom_gradient`.
        Without ``f``, a decorator.

    Raises
    ------
    CustomGradientTypeError
        If outputs is missing or returns no specs, or f writes into its arguments.
    CustomGradientValueError
        If f returns anything of another shape than outputs declared.
    TransformationError
        If the derivative of a result is taken.
    BackendError
        If there is no such backend, or its framework cannot be imported.

    Examples
    --------
    >>> import numpy as np
    >>> @op_host(outputs=lambda x: x)
    ... def running_total(x):
    ...     return np.add.accumulate(x)
    >>> running_total(np.array([1.0, 2.0, 4.0]))
    array([1., 3., 7.])

    Notes
    -----
    A compiled program may call f less often than it is called (a result that nobody uses), or more
    often (a checkpoint): f must be pure, that is, return the same for the same arguments.
    """
    if f is None:
        return functools.partial(
            op_host, outputs=outputs, vectorized=vectorized, backend=backend, name=name
        )
    if not callable(f):
        raise refusal(CustomGradientTypeError, "op_host", must="f must be callable", got=describe(f),
                      do="decorate a function")  # fmt: skip
    name = name or function_name(f)
    if Parameters(f).takes_needs_input_grad:
        raise refusal(CustomGradientTypeError, name,
                      must="a function on the host has no gradient of its own",
                      got="a parameter needs_input_grad",
                      do="leave it out, or write op_custom_gradient(host_outputs=...)")  # fmt: skip
    if outputs is None:
        raise refusal(CustomGradientTypeError, name,
                      must="a compiled program must know what f returns before it runs",
                      got="no outputs",
                      do="write op_host(outputs=lambda *specs: ...), which returns the specs of the results"
                      )  # fmt: skip
    if backend is None:
        return host_op(HostFunction(f, outputs, vectorized=vectorized, name=name))
    if backend not in available_backends():
        load(backend)  # which says what is missing
    return CustomGradient(ForeignPair(f, outputs, backend=backend, name=name), name=name)


class ForeignPair(HostPair):
    """f of an op whose f and grad_fn run in another framework: f there, and the pullback that
    op_vjp makes of it.

    The gradient is an op too, whose rule is the pullback of the gradient as a function in that
    framework, and so on.
    """

    def __init__(self, f: Callable[..., Any], outputs: Any, *, backend: str, name: str) -> None:
        pair = functools.wraps(f)(functools.partial(_pair, f, backend))
        in_place = staticmethod(pair) if isinstance(f, staticmethod) else pair
        super().__init__(in_place, outputs, name=name)
        self._foreign = f
        self._in = backend
        self._gradient = self._backward
        self._backward = CustomGradient(self._gradient_with_rule, name=f"the gradient of {name}")

    def _gradient_with_rule(
        self,
        number: Any,
        args: Sequence[Any],
        upstreams: Sequence[Any],
        needed: Sequence[Any],
        /,
        **options: Any,
    ) -> tuple[Any, Callable[..., Any]]:
        def grad_fn(*of_gradients: Any, needs_input_grad: Any) -> list[Any]:
            _, next_grad_fn = self._next(args, upstreams, **options)
            _, *of_floats, _ = needs_input_grad
            return [None, *next_grad_fn(*of_gradients, needs_input_grad=of_floats), None]

        backend = backend_or_numpy([args, upstreams])
        constants = _with_tensors(backend, backend.stop_gradient, [args, upstreams])
        return self._gradient(number, *constants, needed, **options), grad_fn

    @functools.cached_property
    def _next(self) -> ForeignPair:
        """The gradient as a function of the arguments and the upstream gradients, with the rule of
        the next order.
        """
        gradient = functools.partial(_gradient_in, self._foreign, self._in)
        outputs = lambda args, upstreams: declared_of_floats(None, args, upstreams, None)
        return ForeignPair(gradient, outputs, backend=self._in, name=self._name)


def _pair(
    f: Callable[..., Any], backend: str, /, *args: Any, **options: Any
) -> tuple[Any, Callable[..., Any]]:
    """Return f's output and its pullback, in NumPy arrays."""
    framework = load(backend)
    to_arrays = functools.partial(_with_tensors, framework, framework.convert_to_numpy)
    to_tensors = functools.partial(_with_tensors, load("numpy"), framework.convert_to_tensor)
    with use_backend(backend):
        output, pullback = op_vjp(
            functools.partial(f, **options), *map(to_tensors, args), as_in_rules=True
        )

    def grad_fn(upstream: Any) -> list[Any]:
        with use_backend(backend):
            return [*map(to_arrays, pullback(to_tensors(upstream)))]

    return to_arrays(output), grad_fn


def _gradient_in(
    f: Callable[..., Any],
    backend: str,
    args: Sequence[Any],
    upstreams: Sequence[Any],
    **options: Any,
) -> list[Any]:
    """Return the gradients of the floats among the arguments, in tensors of f's framework."""
    framework = load(backend)
    output, pullback = op_vjp(functools.partial(f, **options), *args, as_in_rules=True)
    _, spec = partition("op_host", framework, output)
    gradients, _ = framework.tree_flatten(pullback(spec.without_static().combine(upstreams)))
    return [g for g in gradients if framework.is_tensor(g)]


def _with_tensors(backend: Backend, fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree with fn's results for its tensors."""
    return with_leaves(backend, lambda x: fn(x) if backend.is_tensor(x) else x, tree)
