"""Every way to write a grad_fn, as every kind of callable, for every kind of output."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cgshim import op_custom_gradient
from cgshim._protocol import Tensor
from cgshim.testing.conformance._common import OF_X, OF_Y, U, X, Y, wrong_gradients
from cgshim.testing.conformance._framework import Framework
from cgshim.testing.conformance._registry import case

Rule = Callable[..., Any]
"""`rule(upstream)` or `rule(upstream, args)`: the gradients of both arguments"""


class Output(NamedTuple):
    """A structure for f's two output tensors."""

    pack: Callable[[Any, Any], Any]
    flat: Callable[[Any], Sequence[Any]]
    """the inverse for an upstream gradient"""
    tensors: int = 2


OUTPUTS = {
    "one output": Output(lambda s, t: s, lambda upstream: [upstream], tensors=1),
    "one-tuple": Output(lambda s, t: (s,), lambda upstream: [*upstream], tensors=1),
    "two outputs": Output(lambda s, t: (s, t), lambda upstream: [*upstream]),
    "nested outputs": Output(
        lambda s, t: {"t": [t, "static"], "s": (s, None)},
        lambda upstream: [upstream["s"][0], *filter(lambda leaf: leaf is not None, upstream["t"])],
    ),
}

STRUCTURED: dict[str, Callable[[Rule], Rule]] = {
    "grad(upstream)": lambda rule: lambda upstream: rule(upstream),
    "grad(dy)": lambda rule: lambda dy: rule(dy),
    "grad(dy, /)": lambda rule: lambda dy, /: rule(dy),
    "grad(upstream, scale=1)": lambda rule: lambda upstream, scale=1: rule(upstream),
    "grad(upstream, *, scale=1)": lambda rule: lambda upstream, *, scale=1: rule(upstream),
    "grad(upstream=None)": lambda rule: lambda upstream=None: rule(upstream),
    "grad(upstream, variables=None)": lambda rule: lambda upstream, variables=None: rule(upstream),
    "grad(upstream, variables)": lambda rule: (
        lambda upstream, variables: (rule(upstream), variables)
    ),
    "grad(dy, *, variables)": lambda rule: lambda dy, *, variables: (rule(dy), variables),
    "grad(upstream, variables, **kwargs)": lambda rule: (
        lambda upstream, variables, **kwargs: [rule(upstream), variables]
    ),
    "grad(upstream, **kwargs)": lambda rule: lambda upstream, **kwargs: rule(upstream),
    "grad(*args, upstream)": lambda rule: lambda *args, upstream: rule(upstream, args),
    "grad(*args, upstream=None)": lambda rule: lambda *args, upstream=None: rule(upstream, args),
    "grad(*args, upstream, variables=None)": lambda rule: (
        lambda *args, upstream, variables=None: rule(upstream, args)
    ),
    "grad(*args, upstream, **kwargs)": lambda rule: (
        lambda *args, upstream, **kwargs: rule(upstream, args)
    ),
    "grad(x, y, upstream)": lambda rule: lambda x, y, upstream: rule(upstream, (x, y)),
    "grad(x, y, upstream=None)": lambda rule: lambda x, y, upstream=None: rule(upstream, (x, y)),
    "grad(x, y, *, upstream)": lambda rule: lambda x, y, *, upstream: rule(upstream, (x, y)),
    "grad(x, y, variables, upstream)": lambda rule: (
        lambda x, y, variables, upstream: (rule(upstream, (x, y)), variables)
    ),
    "grad(x, y, upstream, variables)": lambda rule: (
        lambda x, y, upstream, variables: (rule(upstream, (x, y)), variables)
    ),
}

FLAT: dict[str, Callable[[Rule], Rule]] = {
    "grad(*dys)": lambda rule: lambda *dys: rule(dys),
    "grad(*dys, variables=None)": lambda rule: lambda *dys, variables=None: rule(dys),
    "grad(*dys, variables)": lambda rule: lambda *dys, variables: (rule(dys), variables),
    "grad(*dys, **kwargs)": lambda rule: lambda *dys, **kwargs: rule(dys),
}

FLAT_OF_TWO: dict[str, Callable[[Rule], Rule]] = {
    "grad(d1, d2)": lambda rule: lambda d1, d2: rule([d1, d2]),
    "grad(d1, *rest)": lambda rule: lambda d1, d2, *rest: rule([d1, d2, *rest]),
    "grad(d1, d2, variables=None)": lambda rule: lambda d1, d2, variables=None: rule([d1, d2]),
    "grad(d1, d2, **kwargs)": lambda rule: lambda d1, d2, **kwargs: rule([d1, d2]),
}


def _function(grad_fn: Rule) -> Rule:
    @functools.wraps(grad_fn)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        return grad_fn(*args, **kwargs)

    return decorated


def _method(grad_fn: Rule) -> Rule:
    """grad_fn as a method in a class body, with self before its own parameters."""

    def method(self: object, /, *args: Any, **kwargs: Any) -> Any:
        return grad_fn(*args, **kwargs)

    self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    own = inspect.signature(grad_fn).parameters.values()
    method.__signature__ = inspect.Signature([self, *own])  # type: ignore[attr-defined]
    return method


def _object(method: Rule) -> Rule:
    kind: Any = type("Grad", (), {"__call__": method})
    grad_fn: Rule = kind()
    return grad_fn


CALLABLES: dict[str, Callable[[Rule], Rule]] = {
    "lambda": lambda grad_fn: grad_fn,
    "function": _function,
    "partial": lambda grad_fn: functools.partial(_method(grad_fn), object()),
    "bound method": lambda grad_fn: types.MethodType(_method(grad_fn), object()),
    "callable object": lambda grad_fn: _object(_method(grad_fn)),
}

TWO_TENSORS = {name: output for name, output in OUTPUTS.items() if output.tensors == 2}


def _gradients(x: Tensor, y: Tensor, upstreams: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The gradients of x * y, and of a second output y * y if there is one."""
    of_x, of_y = wrong_gradients(x, y, upstreams[0])
    for upstream in upstreams[1:]:
        of_y = of_y + 17.0 * y * upstream
    return of_x, of_y


def _check(
    framework: Framework, write: Callable[[Rule], Rule], structured: bool, output: Output
) -> None:
    @op_custom_gradient
    def op(x: Tensor, y: Tensor) -> Any:
        def rule(upstream: Any, args: Sequence[Tensor] = (x, y)) -> tuple[Tensor, Tensor]:
            x, y = args
            return _gradients(x, y, output.flat(upstream) if structured else upstream)

        return output.pack(x * y, y * y), write(rule)

    gradients = OF_X, OF_Y if output.tensors == 1 else OF_Y + 17.0 * Y * 0.5
    framework.check_at(
        op,
        X,
        Y,
        upstream=output.pack(U, 0.5),
        output=output.pack(X * Y, Y * Y),
        gradients=gradients,
    )


@case(write=STRUCTURED, kind=CALLABLES, output=OUTPUTS)
def structured_form(framework: Framework, write: Any, kind: Any, output: Output) -> None:
    _check(framework, lambda rule: kind(write(rule)), True, output)


@case(write=FLAT, kind=CALLABLES, output=OUTPUTS)
def flat_form(framework: Framework, write: Any, kind: Any, output: Output) -> None:
    _check(framework, lambda rule: kind(write(rule)), False, output)


@case(write=FLAT_OF_TWO, kind=CALLABLES, output=TWO_TENSORS)
def flat_form_of_two(framework: Framework, write: Any, kind: Any, output: Output) -> None:
    _check(framework, lambda rule: kind(write(rule)), False, output)


@case()
def kerass_portable_form(framework: Framework) -> None:
    """Keras's documented rule checks whether upstream is a keyword, as here, or positional."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        def grad(*args: Tensor, upstream: Tensor | None = None) -> Tensor:
            if upstream is None:
                (upstream,) = args
            return 7.0 * x * upstream

        return x * x, grad

    framework.check_at(op, X, upstream=U, output=X * X, gradients=(7.0 * U * X,))
    _, grad = op.__wrapped__(framework.tensor(X))
    framework.check_equal(grad(framework.tensor(U)), 7.0 * U * X)
