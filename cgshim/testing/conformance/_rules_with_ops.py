"""Ops inside rules: what they read, what they capture, and derivatives that a rule takes itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cgshim
from cgshim import CustomGradientTypeError, op_custom_gradient, op_stop_gradient
from cgshim._protocol import Tensor
from cgshim.testing.conformance._framework import Framework, raised
from cgshim.testing.conformance._kept_outputs import five_exp
from cgshim.testing.conformance._orders import nth_derivative
from cgshim.testing.conformance._registry import case

# --- An inner op reads trainable state, and a rule takes the derivative -----------------------------------------------


def block(x: Tensor, w: Tensor) -> Tensor:
    """w x by an op of x alone, which reads w and has 7 and 5 for 1 in its rule, and 2 w: 7 w and 5 x + 2 = 12 at 2."""

    @op_custom_gradient
    def reads_w(x: Tensor) -> Any:
        return x * w, lambda u, variables=None: (7.0 * u * w, [5.0 * u * x for _ in variables or ()])

    return reads_w(x) + 2.0 * w


def recompute(fn: Callable[..., Any], differentiate: Callable[..., Any]) -> Callable[..., Any]:
    """fn, with a rule that keeps nothing but the arguments: a checkpoint."""

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
    """What the rule differentiates is state to the op inside; a framework with state of its own may refuse it."""
    x, w, upstream = framework.tensor(2.0), framework.tensor(3.0), framework.tensor(0.5)
    try:
        output, pullback = cgshim.op_vjp(recompute(block, differentiate), x, w)
        gradients = pullback(upstream)
    except CustomGradientTypeError:  # so it is outside of rules too
        raised(CustomGradientTypeError, lambda: cgshim.op_vjp(block, x, w)[1](upstream))
        return
    framework.check_equal(output, np.array(12.0))
    framework.check_equal(gradients, (np.array(10.5), np.array(6.0)))


@case()
def state_differentiated_in_a_rule(framework: Framework) -> None:
    """The framework's own trainable state, whose gradient a rule takes by the framework's own means."""

    @op_custom_gradient
    def op(x: Tensor, w: Tensor) -> Any:
        def grad(u: Tensor) -> Any:
            _, pullback = framework.differentiate_state(lambda state: block(op_stop_gradient(x), state), w)
            return 3.0 * u, pullback(u)[0]

        return op_stop_gradient(x * w + 2.0 * w), grad

    framework.check(
        op, framework.tensor(2.0), framework.tensor(3.0), upstream=framework.tensor(0.5),
        output=np.array(12.0), gradients=(np.array(1.5), np.array(6.0)),
    )  # fmt: skip


@case(order={"1": (1, 12.0), "2": (2, 30.0)})
def checkpoint_of_an_op(framework: Framework, order: tuple[int, float]) -> None:
    """An op without state in a checkpoint, in both orders: 3 x^2 by the op's rule, and 15 x by its rule's."""
    times, expected = order
    slope = op_custom_gradient(lambda x: (3.0 * x * x, lambda u: u * 15.0 * x))
    op = op_custom_gradient(lambda x: (x * x * x, lambda u: u * slope(x)))
    checkpoint = recompute(op, CHECKPOINTS["op_vjp"])
    framework.check_equal(nth_derivative(checkpoint, times)(framework.tensor(2.0)), np.array(expected))


@case(order={"1": 1, "2": 2, "3": 3})
def checkpoint_of_an_op_that_keeps_its_output(framework: Framework, order: int) -> None:
    checkpoint = recompute(five_exp, CHECKPOINTS["op_vjp"])
    framework.check_equal(nth_derivative(checkpoint, order)(framework.tensor(0.5)), np.array(5**order * np.exp(0.5)))


# --- An inner op captures what is differentiated ----------------------------------------------------------------------


def _with_rule(make: Callable[[Tensor], Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
    """x^3, whose rule is `make(x)` of upstream."""
    return op_custom_gradient(lambda x: (x * x * x, make(x)))


def _refused(fn: Callable[[Tensor], Tensor], x: Tensor) -> None:
    def differentiated() -> None:
        output, pullback = cgshim.op_vjp(fn, x)
        pullback(output)

    error = raised(CustomGradientTypeError, differentiated)
    assert "as an argument" in str(error), error


@case()
def inner_op_that_captures_the_argument(framework: Framework) -> None:
    """3 x^2 by an op of 3 alone, whose f reads x: the first order is right, and the second would be 0."""
    three = framework.tensor(3.0)

    def rule(x: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda u: u * op_custom_gradient(lambda c: (c * x * x, lambda u: 7.0 * u))(three)

    op = _with_rule(rule)
    framework.check_equal(cgshim.op_grad(op)(framework.tensor(2.0)), np.array(12.0))
    _refused(cgshim.op_grad(op), framework.tensor(2.0))


@case()
def inner_op_that_captures_an_intermediate_of_the_rule(framework: Framework) -> None:
    three = framework.tensor(3.0)

    def rule(x: Tensor) -> Callable[[Tensor], Tensor]:
        def grad(u: Tensor) -> Tensor:
            square = x * x
            return u * op_custom_gradient(lambda c: (c * square, lambda u: 7.0 * u))(three)

        return grad

    op = _with_rule(rule)
    framework.check_equal(cgshim.op_grad(op)(framework.tensor(2.0)), np.array(12.0))
    _refused(cgshim.op_grad(op), framework.tensor(2.0))


@case()
def inner_op_that_captures_a_residual_and_is_given_nothing_of_it(framework: Framework) -> None:
    three = framework.tensor(3.0)

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        square = x * x
        return square * x, lambda u: u * op_custom_gradient(lambda c: (c * square, lambda u: 7.0 * u))(three)

    framework.check_equal(cgshim.op_grad(op)(framework.tensor(2.0)), np.array(12.0))
    _refused(cgshim.op_grad(op), framework.tensor(2.0))


@case()
def inner_op_that_captures_upstream(framework: Framework) -> None:
    """The derivative by upstream is 12 there, and would be 0."""

    def rule(x: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda u: op_custom_gradient(lambda x: (3.0 * x * x * u, lambda v: 7.0 * v * x * u))(x)

    op, x = _with_rule(rule), framework.tensor(2.0)

    def gradient(u: Tensor) -> Tensor:
        return cgshim.op_vjp(op, x)[1](u)[0]

    framework.check_equal(gradient(framework.tensor(0.5)), np.array(6.0))
    _refused(gradient, framework.tensor(0.5))


def _given_the_argument(x: Tensor, u: Tensor) -> Tensor:
    return u * op_custom_gradient(lambda x: (3.0 * x * x, lambda u: u * 5.0 * x))(x)


def _given_the_argument_and_a_constant(x: Tensor, u: Tensor) -> Tensor:
    return u * op_custom_gradient(lambda c, x: (c * x * x, lambda u: (None, u * 5.0 * x)))(3.0, x)


def _given_the_argument_and_upstream(x: Tensor, u: Tensor) -> Tensor:
    op = op_custom_gradient(lambda x, u: (3.0 * x * x * u, lambda v: (v * u * 5.0 * x, v * 3.0 * x * x)))
    return op(x, u)


def _capturing_an_intermediate(x: Tensor, u: Tensor) -> Tensor:
    """What it captures depends on x alone, which it is given: its own rule speaks for that."""
    square = x * x
    return u * op_custom_gradient(lambda x: (3.0 * square, lambda u: u * 5.0 * x))(x)


def _capturing_what_it_is_given(x: Tensor, u: Tensor) -> Tensor:
    return u * op_custom_gradient(lambda given: (3.0 * x * given, lambda u: u * 5.0 * x))(x)


GIVEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the argument": _given_the_argument,
    "the argument and a constant": _given_the_argument_and_a_constant,
    "the argument and upstream": _given_the_argument_and_upstream,
    "the argument, capturing an intermediate": _capturing_an_intermediate,
    "the argument, capturing it too": _capturing_what_it_is_given,
}


@case(inner=GIVEN, order={"1": (1, 12.0), "2": (2, 10.0)})
def inner_op_that_is_given(
    framework: Framework, inner: Callable[[Tensor, Tensor], Tensor], order: tuple[int, float]
) -> None:
    """5 x for 6 x in the second order: the inner rule's number."""
    times, expected = order
    op = _with_rule(lambda x: lambda u: inner(x, u))
    framework.check_equal(nth_derivative(op, times)(framework.tensor(2.0)), np.array(expected))


@case(order={"1": (1, 12.0), "2": (2, 10.0), "3": (3, 5.0)})
def inner_op_that_captures_a_residual(framework: Framework, order: tuple[int, float]) -> None:
    """A residual of the call whose rule runs depends on that call's arguments, which the inner op is given."""
    times, expected = order

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        slope = 3.0 * x * x

        def grad(u: Tensor) -> Tensor:
            return u * op_custom_gradient(lambda x: (slope, lambda u: u * 5.0 * x))(x)

        return x * x * x, grad

    framework.check_equal(nth_derivative(op, times)(framework.tensor(2.0)), np.array(expected))


@case(order={"1": (1, 8.0 * 3), "2": (2, 8.0 * 5)})
def inner_op_that_captures_an_output(framework: Framework, order: tuple[int, float]) -> None:
    """An output of the call whose rule runs depends on that call's arguments too."""
    times, expected = order

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        y = op_stop_gradient(x * x * x)

        def grad(u: Tensor) -> Tensor:
            return u * op_custom_gradient(lambda x: (3.0 * y, lambda u: u * 5.0 * x * x * x))(x)

        return y, grad

    framework.check_equal(nth_derivative(op, times)(framework.tensor(2.0)), np.array(expected))


@case(order={"1": (1, 32.0), "2": (2, 240.0), "3": (3, 240.0), "4": (4, 120.0)})
def inner_rule_that_keeps_what_the_inner_op_captured(framework: Framework, order: tuple[int, float]) -> None:
    """A kernel of x^4 with two derivatives: the inner rule keeps the second one, whose own derivative is that of f."""
    times, expected = order

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        first, second = 4.0 * x * x * x, 12.0 * x * x
        slope = op_custom_gradient(lambda x: (first, lambda u: u * 5.0 * second))
        return x * x * x * x, lambda u: u * slope(x)

    framework.check_equal(nth_derivative(op, times)(framework.tensor(2.0)), np.array(expected))


@case(order={"1": (1, 5.0), "2": (2, 35.0), "3": (3, 175.0)})
def inner_rule_that_keeps_the_outer_output(framework: Framework, order: tuple[int, float]) -> None:
    """5 and 7 for 1: the derivative of the kept output is the outer rule's, in the inner rule too."""
    times, factor = order

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        y = op_stop_gradient(cgshim.ops.exp(x))
        slope = op_custom_gradient(lambda x: (y + 0.0, lambda u: u * 7.0 * y))
        return y, lambda u: u * 5.0 * slope(x)

    expected = np.array(factor * np.exp(0.5))
    framework.check_equal(nth_derivative(op, times)(framework.tensor(0.5)), expected)


@case(order={"1": (1, 12.0), "2": (2, 26.0), "3": (3, 13.0)})
def inner_rule_that_keeps_the_outer_argument(framework: Framework, order: tuple[int, float]) -> None:
    """The inner op is given x, and its rule reads it under its outer name."""
    times, expected = order

    def rule(x: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda u: u * op_custom_gradient(lambda given: (3.0 * x * given, lambda u: u * 13.0 * x))(x)

    framework.check_equal(nth_derivative(_with_rule(rule), times)(framework.tensor(2.0)), np.array(expected))


@case(order={"1": (1, 135.0), "2": (2, 270.0), "3": (3, 270.0)})
def inner_op_that_returns_integers(framework: Framework, order: tuple[int, float]) -> None:
    """Indices that an op in f finds are constants in every order: (3 s)^3, with 5 for 3."""
    times, expected = order

    @op_custom_gradient
    def how_many_are_large(x: Tensor) -> Any:
        return cgshim.ops.reshape(cgshim.ops.sum(cgshim.op_cast(x > 2.5, "int32")), (1,)), lambda u: None

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        y = cgshim.ops.take(x, how_many_are_large(x), axis=0)
        return cgshim.ops.sum(y * y * y), lambda u: 5.0 * u * y * y * cgshim.op_cast(x == y, "float32")

    vector = framework.tensor([1.0, 3.0, 2.0])
    found = nth_derivative(lambda s: op(s * vector), times)(framework.tensor(1.0))
    framework.check_equal(found, np.array(expected))


# --- Ops in ops -------------------------------------------------------------------------------------------------------

DEPTH = 8


def _nested(depth: int, w: Tensor, runs: list[int]) -> Callable[[Tensor], Tensor]:
    """w x, doubled at each of the levels, every one of which is an op that captures w."""
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
    output, pullback = framework.differentiate_state(lambda w: _nested(DEPTH, w, runs)(x), framework.tensor(5.0))
    framework.check_equal(output, np.array(2.0**DEPTH * 10.0))
    framework.check_equal(pullback(framework.tensor(0.5)), (np.array(3.0),))
    assert max(runs) <= 2 * DEPTH, f"{runs} runs of f at the levels"
