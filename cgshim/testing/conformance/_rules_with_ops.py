"""Ops inside rules: their variables, their captured tensors, and derivatives that a rule takes
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cgshim
from cgshim import CustomGradientTypeError, op_custom_gradient, op_stop_gradient
from cgshim._protocol import Tensor
from cgshim.testing.conformance._framework import Framework, refused
from cgshim.testing.conformance._kept_outputs import AT, EXP, five_exp
from cgshim.testing.conformance._registry import ORDERS, case, orders

# --- An inner op reads trainable state, and a rule takes the derivative ---------------------------


def block(x: Tensor, w: Tensor) -> Tensor:
    """w x by an op of only x, which reads w and has 7 and 5 for 1, plus 2 w: 7 w and 5 x + 2 = 12
    at 2.
    """

    @op_custom_gradient
    def reads_w(x: Tensor) -> Any:
        return x * w, lambda u, variables=None: (
            7.0 * u * w,
            [5.0 * u * x for _ in variables or ()],
        )

    return reads_w(x) + 2.0 * w


def recompute(fn: Callable[..., Any], differentiate: Callable[..., Any]) -> Callable[..., Any]:
    """fn, with a rule that keeps only the arguments: a checkpoint."""

    @op_custom_gradient
    def recomputed(*args: Tensor) -> Any:
        constants = map(op_stop_gradient, args)
        return fn(*constants), lambda upstream: differentiate(fn, args, upstream)

    return recomputed


CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "op_vjp": lambda fn, args, upstream: cgshim.op_vjp(fn, *args)[1](upstream),
    "op_grad": lambda fn, args, upstream: [upstream * g for g in cgshim.op_grad(fn, (0, 1))(*args)],
}


@case(differentiate=CHECKPOINTS)
def checkpoint_round_state(framework: Framework, differentiate: Callable[..., Any]) -> None:
    """The tensors that the rule differentiates are state to the inner op.

    A framework with its own state may raise an error.
    """
    try:
        framework.check_at(
            recompute(block, differentiate),
            2.0,
            3.0,
            upstream=0.5,
            output=12.0,
            gradients=(10.5, 6.0),
        )
    except CustomGradientTypeError:  # then it raises outside of rules too
        refused(block, *framework.tensors((2.0, 3.0)))


@case(order=orders(12.0, 30.0))
def checkpoint_of_an_op(framework: Framework, order: tuple[int, float]) -> None:
    """An op without state in a checkpoint: 3 x^2 by its rule, and 15 x by its rule's derivative."""
    slope = op_custom_gradient(lambda x: (3.0 * x * x, lambda u: u * 15.0 * x))
    op = op_custom_gradient(lambda x: (x * x * x, lambda u: u * slope(x)))
    checkpoint = recompute(op, CHECKPOINTS["op_vjp"])
    framework.check_derivative(checkpoint, *order, at=2.0)


@case(order=ORDERS)
def checkpoint_of_an_op_that_keeps_its_output(framework: Framework, order: int) -> None:
    checkpoint = recompute(five_exp, CHECKPOINTS["op_vjp"])
    framework.check_derivative(checkpoint, order, 5**order * EXP, at=AT)


def _product(x: Tensor, w: Tensor) -> Tensor:
    return x * x * x * w


@op_custom_gradient
def product_with_its_vjp(x: Tensor, w: Tensor) -> Any:
    """Its rule takes the gradients of the product by op_vjp, times 7 and 11, wrong on purpose."""

    def grad(upstream: Tensor) -> Any:
        of_x, of_w = cgshim.op_vjp(_product, x, w)[1](upstream)
        return 7.0 * of_x, 11.0 * of_w

    return op_stop_gradient(_product(x, w)), grad


@case()
def second_order_through_op_vjp_in_a_rule(framework: Framework) -> None:
    """By both arguments and by upstream: the gradients are 21 u x^2 w, and the sum of 11 u x^3."""
    x, w, u = np.array([1.0, -2.0]), 5.0, np.array([2.0, -3.0])
    a, b = np.array([1.0, 10.0]), 0.5
    gradients = lambda x, w, u: cgshim.op_vjp(product_with_its_vjp, x, w)[1](u)
    of_x = 42.0 * a * u * x * w + 33.0 * b * u * x**2
    of_w = (21.0 * a * u * x**2).sum()
    of_u = 21.0 * a * x**2 * w + 11.0 * b * x**3
    framework.check_at(
        gradients, x, w, u, upstream=(a, b),
        output=(21.0 * u * x**2 * w, (11.0 * u * x**3).sum()), gradients=(of_x, of_w, of_u),
    )  # fmt: skip


# --- An inner op captures a differentiated tensor -------------------------------------------------


def _cube_with(rule: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """x^3 with this rule of x and upstream."""
    return op_custom_gradient(lambda x: (x * x * x, lambda u: rule(x, u)))


def _check_constant(framework: Framework, op: Callable[[Tensor], Tensor]) -> None:
    """The derivative is 3 x^2; its own derivative is 0, as the inner op captures x as a constant."""
    framework.check_derivative(op, 1, 12.0, at=2.0)
    framework.check_derivative(op, 2, 0.0, at=2.0)


@case()
def inner_op_that_captures_the_argument(framework: Framework) -> None:
    """3 x^2 by an op of only 3, whose f reads x."""
    three = framework.tensor(3.0)
    rule = lambda x, u: u * op_custom_gradient(lambda c: (c * x * x, lambda u: 7.0 * u))(three)
    _check_constant(framework, _cube_with(rule))


@case()
def inner_op_that_captures_an_intermediate_of_the_rule(framework: Framework) -> None:
    three = framework.tensor(3.0)

    def rule(x: Tensor, u: Tensor) -> Tensor:
        square = x * x
        return u * op_custom_gradient(lambda c: (c * square, lambda u: 7.0 * u))(three)

    _check_constant(framework, _cube_with(rule))


@case()
def inner_op_that_captures_a_residual_and_is_given_nothing_of_it(framework: Framework) -> None:
    three = framework.tensor(3.0)

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        square = x * x
        return (
            square * x,
            lambda u: u * op_custom_gradient(lambda c: (c * square, lambda u: 7.0 * u))(three),
        )

    _check_constant(framework, op)


@case()
def inner_op_that_captures_upstream(framework: Framework) -> None:
    """Upstream is a constant there: the derivative by upstream is 0."""
    op = _cube_with(
        lambda x, u: op_custom_gradient(lambda x: (3.0 * x * x * u, lambda v: 7.0 * v * x * u))(x)
    )
    x = framework.tensor(2.0)

    def gradient(u: Tensor) -> Tensor:
        return cgshim.op_vjp(op, x)[1](u)[0]

    framework.check_at(gradient, 0.5, upstream=1.0, output=6.0, gradients=(0.0,))


def _of_the_argument_and_upstream(x: Tensor, u: Tensor) -> Tensor:
    op = op_custom_gradient(
        lambda x, u: (3.0 * x * x * u, lambda v: (v * u * 5.0 * x, v * 3.0 * x * x))
    )
    return op(x, u)


def _capturing_an_intermediate(x: Tensor, u: Tensor) -> Tensor:
    """The inner op's own rule is its derivative by x."""
    square = x * x
    return u * op_custom_gradient(lambda x: (3.0 * square, lambda u: u * 5.0 * x))(x)


INNER_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the argument": lambda x, u: (
        u * op_custom_gradient(lambda x: (3.0 * x * x, lambda u: u * 5.0 * x))(x)
    ),
    "the argument and a constant": lambda x, u: (
        u * op_custom_gradient(lambda c, x: (c * x * x, lambda u: (None, u * 5.0 * x)))(3.0, x)
    ),
    "the argument and upstream": _of_the_argument_and_upstream,
    "the argument, capturing an intermediate": _capturing_an_intermediate,
    "the argument, capturing it too": lambda x, u: (
        u * op_custom_gradient(lambda arg: (3.0 * x * arg, lambda u: u * 5.0 * x))(x)
    ),
}


@case(inner=INNER_OPS, order=orders(12.0, 10.0))
def inner_op_that_is_given(
    framework: Framework, inner: Callable[..., Tensor], order: tuple[int, float]
) -> None:
    """The second order is 5 x for 6 x: the inner rule's number."""
    framework.check_derivative(_cube_with(inner), *order, at=2.0)


@case(order=orders(12.0, 10.0, 5.0))
def inner_op_that_captures_a_residual(framework: Framework, order: tuple[int, float]) -> None:
    @op_custom_gradient
    def op(x: Tensor) -> Any:
        slope = 3.0 * x * x

        def grad(u: Tensor) -> Tensor:
            return u * op_custom_gradient(lambda x: (slope, lambda u: u * 5.0 * x))(x)

        return x * x * x, grad

    framework.check_derivative(op, *order, at=2.0)


@case(order=orders(8.0 * 3, 8.0 * 5))
def inner_op_that_captures_an_output(framework: Framework, order: tuple[int, float]) -> None:
    @op_custom_gradient
    def op(x: Tensor) -> Any:
        y = op_stop_gradient(x * x * x)

        def grad(u: Tensor) -> Tensor:
            return u * op_custom_gradient(lambda x: (3.0 * y, lambda u: u * 5.0 * x * x * x))(x)

        return y, grad

    framework.check_derivative(op, *order, at=2.0)


@case(order=orders(32.0, 240.0))
def inner_rule_that_keeps_what_the_inner_op_captured(
    framework: Framework, order: tuple[int, float]
) -> None:
    """A kernel of x^4 with two derivatives; the inner rule keeps the second one."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        first, second = 4.0 * x * x * x, 12.0 * x * x
        slope = op_custom_gradient(lambda x: (first, lambda u: u * 5.0 * second))
        return x * x * x * x, lambda u: u * slope(x)

    framework.check_derivative(op, *order, at=2.0)


@case(order=orders(5.0 * EXP, 35.0 * EXP))
def inner_rule_that_keeps_the_outer_output(framework: Framework, order: tuple[int, float]) -> None:
    """The rules have 5 and 7 for 1."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        y = op_stop_gradient(cgshim.ops.exp(x))
        slope = op_custom_gradient(lambda x: (y + 0.0, lambda u: u * 7.0 * y))
        return y, lambda u: u * 5.0 * slope(x)

    framework.check_derivative(op, *order, at=AT)


@case(order=orders(12.0, 26.0))
def inner_rule_that_keeps_the_outer_argument(
    framework: Framework, order: tuple[int, float]
) -> None:
    """The inner op gets x, and its rule reads x under its outer name."""
    rule = lambda x, u: (
        u * op_custom_gradient(lambda arg: (3.0 * x * arg, lambda u: u * 13.0 * x))(x)
    )
    framework.check_derivative(_cube_with(rule), *order, at=2.0)


@case(order=orders(135.0, 270.0, 270.0))
def inner_op_that_returns_integers(framework: Framework, order: tuple[int, float]) -> None:
    """Indices from an op in f are constants in every order: (3 s)^3, with 5 for 3."""

    @op_custom_gradient
    def how_many_are_large(x: Tensor) -> Any:
        return cgshim.ops.reshape(
            cgshim.ops.sum(cgshim.op_cast(x > 2.5, "int32")), (1,)
        ), lambda u: (None,)

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        y = cgshim.ops.take(x, how_many_are_large(x), axis=0)
        return cgshim.ops.sum(
            y * y * y
        ), lambda u: 5.0 * u * y * y * cgshim.op_cast(x == y, "float32")

    vector = framework.tensor([1.0, 3.0, 2.0])
    framework.check_derivative(lambda s: op(s * vector), *order, at=1.0)


# --- Ops in ops -----------------------------------------------------------------------------------

DEPTH = 8


def _nested(depth: int, w: Tensor, runs: list[int]) -> Callable[[Tensor], Tensor]:
    """w x, doubled at each level; each level is an op that captures w."""
    inner = _nested(depth - 1, w, runs) if depth > 1 else (lambda x: x * w)

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        runs[depth] += 1
        y = inner(x)
        return 2.0 * y, lambda u, variables=None: (7.0 * u, [3.0 * u * x for _ in variables or ()])

    return op


@case()
def ops_that_capture_and_nest(framework: Framework) -> None:
    """The work grows with the depth, and not as 2 to its power."""
    runs = [0] * (DEPTH + 1)
    x = framework.tensor(2.0)
    fn = lambda w: _nested(DEPTH, w, runs)(x)
    framework.check_state(fn, 5.0, upstream=0.5, output=2.0**DEPTH * 10.0, gradients=(3.0,))
    assert max(runs) <= 2 * DEPTH, f"{runs} runs of f at the levels"
