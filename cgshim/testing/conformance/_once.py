"""once_differentiable=True: the rule's gradient has no derivative."""

from __future__ import annotations

from typing import Any

import numpy as np

import cgshim
from cgshim import TransformationError, op_custom_gradient, op_stop_gradient
from cgshim._protocol import Tensor
from cgshim.testing.conformance._common import U, X
from cgshim.testing.conformance._framework import (
    Framework,
    nth_derivative,
    raised,
    refused,
    tangent,
)
from cgshim.testing.conformance._registry import case


@op_custom_gradient(once_differentiable=True, name="only_once")
def once(x: Tensor, y: Tensor) -> Any:
    """x x y; its rule's factors, 7 and 11, are wrong on purpose, and it keeps an intermediate."""
    square = x * x
    return square * y, lambda u: (7.0 * u * square * y, 11.0 * u * square * y)


def crooked_square(x: Tensor) -> Any:
    """x x, with 7 for 2 in its rule."""
    return x * x, lambda u: 7.0 * u * x


def seven(x: Tensor) -> Any:
    """x x, with 7 for the derivative."""
    return x * x, lambda u: 7.0 * u


@case()
def once_first_order(framework: Framework) -> None:
    y = np.array([3.0, 5.0])
    product = X * X * y
    framework.check_at(
        once, X, y, upstream=U, output=product, gradients=(7.0 * U * product, 11.0 * U * product)
    )


@case()
def once_first_order_where_a_second_may_follow(framework: Framework) -> None:
    """The gradient in a differentiated function is unchanged; code that does not use it works."""
    y = framework.tensor(3.0)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        gradient = cgshim.op_grad(once)(x, y)
        return op_stop_gradient(gradient), x * x * op_stop_gradient(gradient)

    framework.check_at(
        fn, 2.0, upstream=(2.0, 3.0), output=(84.0, 336.0), gradients=(3.0 * 4.0 * 84.0,)
    )


@case()
def once_value_of_what_is_refused_later(framework: Framework) -> None:
    """The error comes only when the derivative of the gradient is taken."""
    gradient = lambda x: cgshim.op_vjp(once, x, framework.tensor(3.0))[1](framework.tensor(0.5))[0]
    output, pullback = cgshim.op_vjp(gradient, framework.tensor(2.0))
    framework.check_equal(output, 42.0)
    raised(TransformationError, pullback, framework.tensor(1.0), starts="only_once: ")


BY: dict[str, int] = {"the argument": 0, "another argument": 1, "upstream": 2}


@case(of={"the first gradient": 0, "the second gradient": 1}, by=BY)
def once_second_order(framework: Framework, of: int, by: int) -> None:
    tensors = [framework.tensor(value) for value in (2.0, 3.0, 0.5)]

    def gradient(differentiated: Tensor) -> Tensor:
        x, y, u = (differentiated if at == by else tensor for at, tensor in enumerate(tensors))
        return cgshim.op_vjp(once, x, y)[1](u)[of]

    error = refused(gradient, tensors[by], error=TransformationError, says="once_differentiable")
    assert str(error).startswith("only_once: "), error


@case(order={"2": 2, "3": 3})
def once_higher_orders(framework: Framework, order: int) -> None:
    y = framework.tensor(3.0)
    derivative = nth_derivative(lambda x: once(x, y), order)
    raised(TransformationError, derivative, framework.tensor(2.0), starts="only_once: ")


@case()
def once_whose_rule_reads_no_argument(framework: Framework) -> None:
    """The gradient is no constant: the rule may read tensors in a way that no framework sees."""
    op = op_custom_gradient(seven, once_differentiable=True, name="only_once")
    x = framework.tensor(2.0)
    framework.check_equal(cgshim.op_grad(op)(x), 7.0)
    raised(TransformationError, nth_derivative(op, 2), x, starts="only_once: ")


F: dict[str, Any] = {"reads its argument": crooked_square, "reads nothing": seven}


@case(f=F, promised={"promised": True, "not promised": False})
def once_forward_over_reverse(framework: Framework, f: Any, promised: bool) -> None:
    """The tangent of a gradient is a derivative of it too, also for a linear rule."""
    op = op_custom_gradient(f, once_differentiable=True, forward_mode=promised, name="only_once")
    x, v = framework.tensors((2.0, 3.0))
    raised(TransformationError, tangent, framework, cgshim.op_grad(op), x, v, starts="only_once: ")


@case(by={"reverse mode": cgshim.op_grad, "forward mode": None})
def once_tangent_has_no_derivative(framework: Framework, by: Any) -> None:
    """A tangent is a derivative of the first order, too."""
    op = op_custom_gradient(crooked_square, once_differentiable=True, forward_mode=True)
    x, v = framework.tensors((2.0, 3.0))
    first = lambda x: tangent(framework, op, x, v)
    second, tensors = (by(first), (x,)) if by else (tangent, (framework, first, x, v))
    raised(TransformationError, second, *tensors)


@case()
def once_in_a_rule_of_another_op(framework: Framework) -> None:
    """A rule that calls such an op has a second order from its first, and no third."""
    y = framework.tensor(3.0)
    op = op_custom_gradient(lambda x: (x * x, lambda u: u * once(x, y)))
    framework.check_derivative(op, 2, 84.0, at=2.0)
    raised(TransformationError, nth_derivative(op, 3), framework.tensor(2.0))


@case()
def once_runs_f_once(framework: Framework) -> None:
    """f runs as often as a plain function, also if a second order may follow."""
    runs: list[int] = []
    plain_runs: list[int] = []

    @op_custom_gradient(once_differentiable=True)
    def op(x: Tensor) -> Any:
        runs.append(1)
        square = x * x
        return square * x, lambda u: 7.0 * u * square

    def plain(x: Tensor) -> Tensor:
        plain_runs.append(1)
        return x * x * x

    for fn, expected in ((op, 28.0), (plain, 12.0)):
        output, _ = cgshim.op_vjp(cgshim.op_grad(fn), framework.tensor(2.0))
        framework.check_equal(output, expected)
    assert len(runs) == len(plain_runs)
