"""once_differentiable=True: the gradient of the rule, and no derivative of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cgshim
from cgshim import TransformationError, op_custom_gradient, op_stop_gradient
from cgshim._protocol import Tensor
from cgshim.testing.conformance._framework import Framework, raised, tangent
from cgshim.testing.conformance._orders import nth_derivative
from cgshim.testing.conformance._registry import case


@op_custom_gradient(once_differentiable=True, name="only_once")
def once(x: Tensor, y: Tensor) -> Any:
    """x x y; its rule's factors, 7 and 11, are wrong on purpose, and it keeps an intermediate."""
    square = x * x
    return square * y, lambda u: (7.0 * u * square * y, 11.0 * u * square * y)


def refused(fn: Callable[..., Any], *args: Tensor) -> None:
    """The derivative of a gradient is refused, at the latest when it is asked for."""

    def differentiated() -> None:
        output, pullback = cgshim.op_vjp(fn, *args)
        pullback(output)

    error = raised(TransformationError, differentiated)
    assert str(error).startswith("only_once: "), error
    assert "once_differentiable" in str(error), error


@case()
def once_first_order(framework: Framework) -> None:
    framework.check(
        once, framework.tensor([1.0, 2.0]), framework.tensor([3.0, 5.0]), upstream=framework.tensor([2.0, -3.0]),
        output=np.array([3.0, 20.0]), gradients=(np.array([42.0, -420.0]), np.array([66.0, -660.0])),
    )  # fmt: skip


@case()
def once_first_order_where_a_second_may_follow(framework: Framework) -> None:
    """The gradient's number inside a function that is differentiated is the same; what does not use it goes on."""
    y = framework.tensor(3.0)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        gradient = cgshim.op_grad(once)(x, y)
        return op_stop_gradient(gradient), x * x * op_stop_gradient(gradient)

    x = framework.tensor(2.0)
    output, pullback = cgshim.op_vjp(fn, x)
    framework.check_equal(output, (np.array(84.0), np.array(336.0)))
    gradients = pullback((framework.tensor(2.0), framework.tensor(3.0)))
    framework.check_equal(gradients, (np.array(3.0 * 4.0 * 84.0),))


@case()
def once_value_of_what_is_refused_later(framework: Framework) -> None:
    """Nobody is refused before the derivative of the gradient is really asked for."""
    gradient = lambda x: cgshim.op_vjp(once, x, framework.tensor(3.0))[1](framework.tensor(0.5))[0]
    output, pullback = cgshim.op_vjp(gradient, framework.tensor(2.0))
    framework.check_equal(output, np.array(42.0))
    error = raised(TransformationError, pullback, framework.tensor(1.0))
    assert str(error).startswith("only_once: "), error


BY: dict[str, int] = {"the argument": 0, "another argument": 1, "upstream": 2}


@case(of={"the first gradient": 0, "the second gradient": 1}, by=BY)
def once_second_order(framework: Framework, of: int, by: int) -> None:
    tensors = [framework.tensor(value) for value in (2.0, 3.0, 0.5)]

    def gradient(differentiated: Tensor) -> Tensor:
        x, y, u = (differentiated if at == by else tensor for at, tensor in enumerate(tensors))
        return cgshim.op_vjp(once, x, y)[1](u)[of]

    refused(gradient, tensors[by])


@case(order={"2": 2, "3": 3})
def once_higher_orders(framework: Framework, order: int) -> None:
    y = framework.tensor(3.0)
    error = raised(TransformationError, nth_derivative(lambda x: once(x, y), order), framework.tensor(2.0))
    assert str(error).startswith("only_once: "), error


@case(promised={"promised": True, "not promised": False})
def once_forward_over_reverse(framework: Framework, promised: bool) -> None:
    """The tangent of a gradient is a derivative of it too, whether or not the rule is linear in upstream."""
    op = op_custom_gradient(
        lambda x: (x * x, lambda u: 7.0 * u * x), once_differentiable=True, forward_mode=promised, name="only_once"
    )
    x, v = framework.tensor(2.0), framework.tensor(3.0)
    error = raised(TransformationError, tangent, framework, cgshim.op_grad(op), x, v)
    assert str(error).startswith("only_once: "), error


@case()
def once_in_forward_mode(framework: Framework) -> None:
    """What is promised of the first order holds."""
    op = op_custom_gradient(lambda x: (x * x, lambda u: 7.0 * u * x), once_differentiable=True, forward_mode=True)
    found = tangent(framework, op, framework.tensor(2.0), framework.tensor(3.0))
    framework.check_equal(found, np.array(42.0))


@case()
def once_in_a_rule_of_another_op(framework: Framework) -> None:
    """A rule that calls it has the first order for its second, and nothing for its third."""
    y = framework.tensor(3.0)
    op = op_custom_gradient(lambda x: (x * x, lambda u: u * once(x, y)))
    framework.check_equal(nth_derivative(op, 2)(framework.tensor(2.0)), np.array(84.0))
    raised(TransformationError, nth_derivative(op, 3), framework.tensor(2.0))


@case()
def once_runs_f_once(framework: Framework) -> None:
    """As often as a function in its place is run, also where a second order may follow."""
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

    for fn in (op, plain):
        output, _ = cgshim.op_vjp(cgshim.op_grad(fn), framework.tensor(2.0))
        framework.check_equal(output, np.array(28.0 if fn is op else 12.0))
    assert len(runs) == len(plain_runs)
