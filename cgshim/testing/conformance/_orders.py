"""Higher-order derivatives: through grad_fn, and through its residuals as functions of the
arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cgshim
from cgshim import op_custom_gradient, ops
from cgshim._protocol import Tensor
from cgshim.testing.conformance._framework import Framework
from cgshim.testing.conformance._registry import ORDERS, case, orders


@op_custom_gradient
def cube(x: Tensor) -> Any:
    """A right rule with a residual of x: autodiff of `cube(x) * x` has 48 at 2 in the second order."""
    square = x * x
    return square * x, lambda u: u * 3.0 * square


@op_custom_gradient
def crooked_cube(x: Tensor) -> Any:
    """A cube whose rule has 5 for 3: its second derivative is 10 x, and so on."""
    square = x * x
    return square * x, lambda u: u * 5.0 * square


@op_custom_gradient
def crooked_cube_of_arguments(x: Tensor) -> Any:
    """The same, with a rule that takes the argument instead of a residual."""
    return x * x * x, lambda *args, upstream: upstream * 5.0 * args[0] * args[0]


@op_custom_gradient
def crooked_cube_in_a_tree(x: Tensor) -> Any:
    """The same, with the residual in a container."""
    residuals = {"square": [x * x]}
    return {"y": residuals["square"][0] * x}, lambda u: u["y"] * 5.0 * residuals["square"][0]


CUBES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, ...]]] = {
    "cube(x)": (lambda x: cube(x), (27.0, 27.0, 18.0, 6.0)),
    "cube(x) * x": (lambda x: cube(x) * x, (81.0, 108.0, 108.0, 72.0)),
    "crooked_cube(x)": (lambda x: crooked_cube(x), (27.0, 45.0, 30.0, 10.0)),
    "crooked_cube(x) * x": (lambda x: crooked_cube(x) * x, (81.0, 162.0, 180.0, 120.0)),
    "of arguments": (lambda x: crooked_cube_of_arguments(x) * x, (81.0, 162.0, 180.0, 120.0)),
    "in a tree": (lambda x: crooked_cube_in_a_tree(x)["y"] * x, (81.0, 162.0, 180.0, 120.0)),
}
"""Functions, with the value and the first three derivatives at 3."""


@case(order=ORDERS, function=CUBES)
def order(
    framework: Framework, order: int, function: tuple[Callable[[Tensor], Tensor], tuple[float, ...]]
) -> None:
    fn, expected = function
    framework.check_derivative(fn, order, expected[order], at=3.0)


@case()
def second_order_is_48(framework: Framework) -> None:
    framework.check_derivative(lambda x: cube(x) * x, 2, 48.0, at=2.0)


@case()
def second_order_in_upstream(framework: Framework) -> None:
    """A rule is differentiated with respect to its upstream gradient too."""
    gradient = lambda u: cgshim.op_vjp(crooked_cube, framework.tensor(3.0))[1](u)[0]
    framework.check_at(gradient, 2.0, upstream=0.5, gradients=(22.5,))


@case(partial={"xx": (0, 0, 21.0), "xy": (0, 1, 14.0), "yx": (1, 0, 20.0), "yy": (1, 1, 0.0)})
def mixed_partials(framework: Framework, partial: tuple[int, int, float]) -> None:
    """The rule has 7 x y and 5 x x for the gradients of x x y."""

    @op_custom_gradient
    def op(x: Tensor, y: Tensor) -> Any:
        product, square = x * y, x * x
        return square * y, lambda u: (7.0 * u * product, 5.0 * u * square)

    first, second, expected = partial
    derivative = cgshim.op_grad(cgshim.op_grad(op, first), second)
    framework.check_equal(derivative(*framework.tensors((2.0, 3.0))), expected)


@case()
def gradient_of_a_gradient_penalty(framework: Framework) -> None:
    def penalty(x: Tensor) -> Tensor:
        gradient = cgshim.op_grad(lambda x: crooked_cube(x)[0] + 2.0 * crooked_cube(x)[1])(x)
        return gradient[0] * gradient[0] + gradient[1]

    framework.check_derivative(penalty, 1, np.array([2.0 * 5.0 * 10.0, 2.0 * 30.0]), at=[1.0, 3.0])


@case()
def through_several_ops(framework: Framework) -> None:
    """The chain of two rules, differentiated twice: each gets the other's value."""
    double = op_custom_gradient(lambda x: (2.0 * x, lambda u: 3.0 * u))
    framework.check_derivative(lambda x: crooked_cube(double(x)), 2, 10.0 * 4.0 * 3.0 * 3.0, at=2.0)


@case()
def mask_beside_a_residual(framework: Framework) -> None:
    """The rule keeps booleans, and a tensor that f makes again for the second order."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        square, is_positive = x * x, x > 0.0
        return square * x, lambda u: ops.where(is_positive, 5.0 * u * square, 7.0 * u * square)

    first = cgshim.op_grad(lambda x: 2.0 * op(x)[0] + op(x)[1])
    second = cgshim.op_grad(lambda x: first(x)[0] + 11.0 * first(x)[1])
    x = framework.tensor([3.0, -3.0])
    framework.check_equal(first(x), np.array([2.0 * 5.0 * 9.0, 7.0 * 9.0]))
    framework.check_equal(second(x), np.array([2.0 * 5.0 * 6.0, 11.0 * 7.0 * -6.0]))


# --- The nested recipe: an op in a rule defines the second order ----------------------------------


@op_custom_gradient
def fused(x: Tensor) -> Any:
    """A kernel that returns x^3 and its first derivative; 11 and 13 x are wrong on purpose."""
    value, first = x * x * x, 11.0 * x * x

    @op_custom_gradient
    def derivative(x: Tensor) -> Any:
        return first, lambda u: u * 13.0 * x

    return value, lambda u: u * derivative(x)


@op_custom_gradient
def slope(x: Tensor) -> Any:
    """The first derivative of `in_terms_of_slope`; its own rule is the second."""
    return 11.0 * x * x, lambda u: u * 13.0 * x


@op_custom_gradient
def in_terms_of_slope(x: Tensor) -> Any:
    return x * x * x, lambda u: u * slope(x)


NESTED: dict[str, Callable[[Tensor], Tensor]] = {"inside": fused, "beside": in_terms_of_slope}


@case(op=NESTED, order=orders(44.0, 26.0, 13.0))
def nested_recipe(
    framework: Framework, op: Callable[[Tensor], Tensor], order: tuple[int, float]
) -> None:
    framework.check_derivative(op, *order, at=2.0)


@case(op=NESTED)
def nested_recipe_of_an_expression(framework: Framework, op: Callable[[Tensor], Tensor]) -> None:
    """At 3 x, where the upstream gradient of the first order itself is differentiated."""
    first_slope, second_slope = 11.0 * 36.0, 13.0 * 6.0
    expected = 2 * 3.0 * first_slope + 9.0 * second_slope * 2.0
    framework.check_derivative(lambda x: op(3.0 * x) * x, 2, expected, at=2.0)


@op_custom_gradient
def sine(x: Tensor) -> Any:
    return ops.sin(x), lambda u: u * 3.0 * cosine(x)


@op_custom_gradient
def cosine(x: Tensor) -> Any:
    return ops.cos(x), lambda u: u * -5.0 * sine(x)


@case(order=orders(3 * np.cos(2.0), -15 * np.sin(2.0), -45 * np.cos(2.0)))
def rules_that_call_each_other(framework: Framework, order: tuple[int, float]) -> None:
    framework.check_derivative(sine, *order, at=2.0)
