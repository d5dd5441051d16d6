"""op_vjp with captured variables: of any function, and in a rule.

A backend without `vjp_with_variables` must raise an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cgshim
from cgshim import CustomGradientTypeError, op_custom_gradient, op_stop_gradient
from cgshim._protocol import Tensor
from cgshim.testing.conformance._common import U, X, Y
from cgshim.testing.conformance._framework import Framework, raised, refused
from cgshim.testing.conformance._registry import case


def _check_if_offered(
    framework: Framework, fn: Callable[..., Any], *numbers: Any, **expected: Any
) -> bool:
    """Check fn by state and return True; return False if op_vjp must, and does, raise an error."""
    if hasattr(framework.backend, "vjp_with_variables"):
        framework.check_state(fn, *numbers, **expected)
        return True
    state = framework.tensors(numbers)
    refused(fn, *state, by=framework.differentiate_state, says="differentiates only by arguments")
    return False


@case()
def vjp_by_variables(framework: Framework) -> None:
    """It returns a pair: gradients of arguments, and of variables in order, zeros if unread."""
    x, upstream = framework.tensors((X, U))
    pulled_back: list[Any] = []

    def fn(w: Tensor, unread: Tensor) -> Tensor:
        scaled = lambda x, mode: {"y": x * x * w, "mode": mode}
        output, pullback = cgshim.op_vjp(scaled, x, "static", variables=[unread, w])
        pulled_back[:] = [pullback({"y": upstream, "mode": None}) for _ in range(2)]
        return output["y"] + 0.0 * unread

    of_w = (U * X * X).sum()
    if _check_if_offered(
        framework, fn, Y, 7.0, upstream=U, output=X * X * Y, gradients=(of_w, 0.0)
    ):
        framework.check_equal(pulled_back, [((2.0 * U * X * Y, None), [0.0, of_w])] * 2)


@case()
def vjp_by_no_variables(framework: Framework) -> None:
    """An empty list is a list: the pullback returns a pair on every backend."""
    _, pullback = cgshim.op_vjp(lambda x: x * x, framework.tensor(X), variables=[])
    framework.check_equal(pullback(framework.tensor(U)), ((2.0 * U * X,), []))


def _recomputed(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """fn with 7 times its gradients, which its rule takes by running fn again."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        def rule(upstream: Tensor, variables: Any) -> Any:
            return cgshim.op_vjp(fn, x, variables=variables)[1](7.0 * upstream)

        return fn(op_stop_gradient(x)), rule

    return op


@case()
def vjp_by_the_variables_of_a_rule(framework: Framework) -> None:
    """The rule returns the pullback's result."""

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return _recomputed(lambda x: x * x * w)(x)

    gradients = (7.0 * U * X * X).sum(), 7.0 * U * 2.0 * X * Y
    _check_if_offered(framework, fn, Y, X, upstream=U, output=X * X * Y, gradients=gradients)


@case()
def second_order_by_the_variables_of_a_rule(framework: Framework) -> None:
    """The gradient 7 u 2 x w^3 of the argument, differentiated by the variable and the argument."""
    upstream, v = framework.tensor(U), np.array([1.0, 10.0])

    def gradient(w: Tensor, x: Tensor) -> Tensor:
        op = _recomputed(lambda x: x * x * w * w * w)
        return cgshim.op_vjp(op, x)[1](upstream)[0]

    gradients = (14.0 * v * U * X * 3.0 * Y**2).sum(), 14.0 * v * U * Y**3
    _check_if_offered(
        framework, gradient, Y, X, upstream=v, output=14.0 * U * X * Y**3, gradients=gradients
    )


NO_VARIABLES: dict[str, tuple[Callable[[Framework], Any], str]] = {
    "a tensor": (lambda framework: framework.tensor([1.0, 2.0]),
                 "variables must be a list of tensors, got f32[2]; write variables=[...]"),
    "a word": (lambda framework: ["w"],
               "variables must be float or complex tensors of {}, got str; leave out what has no gradient"),
    "integers": (lambda framework: [framework.tensor([1, 2], "int32")],
                 "variables must be float or complex tensors of {}, got i32[2]; leave out what has no gradient"),
    "the same one twice": (lambda framework: [framework.tensor(2.0)] * 2,
                           "variables must be different tensors, got f32[] twice; name it once"),
}  # fmt: skip


@case(form=NO_VARIABLES)
def what_are_no_variables(
    framework: Framework, form: tuple[Callable[[Framework], Any], str]
) -> None:
    make, sentence = form

    def square(x: Tensor) -> Tensor:
        return x * x

    variables = make(framework)
    error = raised(
        CustomGradientTypeError,
        lambda: cgshim.op_vjp(square, framework.tensor(X), variables=variables),
    )
    assert str(error) == f"op_vjp(square): {sentence.format(framework.name)}", str(error)
