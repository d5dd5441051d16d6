"""A function of another framework's tensors as an op of every framework, with that framework's own
derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from cgshim.backend import (
    Backend,
    CustomGradient,
    backend_or_numpy,
    load,
    op_vjp,
    partition,
    use_backend,
    with_leaves,
)
from cgshim.host._gradient import HostPair, declared_of_floats, with_tensors
from cgshim.host._op import in_place_of


class ForeignPair(HostPair):
    """f of an op whose f and grad_fn run in another framework: f there, and the pullback that
    op_vjp makes of it.

    The gradient is an op too, whose rule is the pullback of the gradient as a function in that
    framework, and so on.
    """

    def __init__(self, f: Callable[..., Any], outputs: Any, *, backend: str, name: str) -> None:
        pair = functools.partial(_pair, f, backend)
        super().__init__(in_place_of(f, pair), outputs, name=name)
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
        constants = with_tensors(backend, backend.stop_gradient, [args, upstreams])
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
    to_arrays = functools.partial(with_tensors, framework, framework.convert_to_numpy)
    with use_backend(backend):
        arguments = [_to(framework, arg) for arg in args]
        output, pullback = op_vjp(functools.partial(f, **options), *arguments, as_in_rules=True)

    def grad_fn(upstream: Any) -> list[Any]:
        with use_backend(backend):
            return [*map(to_arrays, pullback(_to(framework, upstream)))]

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


def _to(framework: Backend, tree: Any) -> Any:
    """Return a tree of NumPy arrays with the framework's tensors for them."""
    return with_leaves(
        framework,
        lambda x: framework.convert_to_tensor(x) if load("numpy").is_tensor(x) else x,
        tree,
    )
