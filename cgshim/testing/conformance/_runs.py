"""How often f runs, and that it may be opaque.

If a rule keeps only arguments, outputs and integers, f runs once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import cgshim
from cgshim import op_convert_to_numpy, op_custom_gradient, op_stop_gradient
from cgshim._protocol import Tensor
from cgshim.testing.conformance._framework import Framework, nth_derivative
from cgshim.testing.conformance._registry import ORDERS, case

AT = 0.5

# --- f runs as often as a plain function would ----------------------------------------------------


def counted(f: Callable[[Tensor], Any]) -> tuple[Callable[[Tensor], Tensor], list[int]]:
    """An op of f, and a list that grows with each run."""
    runs: list[int] = []

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        runs.append(1)
        return f(x)

    return op, runs


def runs_of_a_plain_function(framework: Framework, order: int) -> int:
    """How often the framework runs a plain function for a derivative: mostly once, in every order."""
    runs: list[int] = []

    def plain(x: Tensor) -> Tensor:
        runs.append(1)
        return x * x * x

    nth_derivative(plain, order)(framework.tensor(AT))
    return len(runs)


def _keeps_an_output(framework: Framework, x: Tensor) -> Any:
    y = x * x * x
    return y, lambda u: u * 5.0 * y / x


def _keeps_integers(framework: Framework, x: Tensor) -> Any:
    exponent = framework.tensor(3, "int32")
    positive = x > 0.0
    return (
        x * x * x,
        lambda u: (
            u
            * 5.0
            * x
            * x
            * cgshim.op_cast(exponent, "float32")
            / 3.0
            * cgshim.op_cast(positive, "float32")
        ),
    )


def _keeps_all_of_these(framework: Framework, x: Tensor) -> Any:
    y, exponent = x * x * x, framework.tensor(3, "int32")
    return y, lambda u: [u * 2.0 * y / x + u * cgshim.op_cast(exponent, "float32") * x * x]


CUBE = (5 * AT**2, 10 * AT, 10.0)
# The derivative of 5 y / x, if y has 5 y / x: 20 y / x^2, and from it 60 y / x^3.
QUOTIENT = (5 * AT**2, 20 * AT, 60.0)
# The derivative of 2 y / x + 3 x^2: 2 y / x^2 + 12 x, and from it 10 - 4 + 12.
BOTH = (5 * AT**2, 14 * AT, 18.0)

Residuals = tuple[Callable[[Framework, Tensor], Any], Sequence[float]]
"""f whose rule keeps something, and the first three derivatives"""

RESIDUALS: dict[str, Residuals] = {
    "an argument": (lambda framework, x: (x * x * x, lambda u: u * 5.0 * x * x), CUBE),
    "nothing, the rule is given arguments": (
        lambda framework, x: (
            x * x * x,
            lambda *args, upstream: upstream * 5.0 * args[0] * args[0],
        ),
        CUBE,
    ),
    "an output": (_keeps_an_output, QUOTIENT),
    "integers": (_keeps_integers, CUBE),
    "nothing": (lambda framework, x: (x * 3.0, lambda u: u * 5.0), (5.0, 0.0, 0.0)),
    "all of these": (_keeps_all_of_these, BOTH),
}


@case(residuals=RESIDUALS, order=ORDERS)
def f_is_not_run_again(framework: Framework, residuals: Residuals, order: int) -> None:
    """f does not run again in any order if the rule keeps only arguments, outputs and integers."""
    f, expected = residuals
    op, runs = counted(lambda x: f(framework, x))
    framework.check_derivative(op, order, expected[order - 1], at=AT)
    assert len(runs) == runs_of_a_plain_function(framework, order), f"{len(runs)} runs of f"


# --- f is opaque ----------------------------------------------------------------------------------


def _in_place(framework: Framework, x: Tensor) -> Tensor:
    array = np.array(op_convert_to_numpy(x))
    np.exp(array, out=array)
    return framework.tensor(array)


def _in_a_loop(framework: Framework, x: Tensor) -> Tensor:
    at, total, term, n = float(op_convert_to_numpy(x)), 0.0, 1.0, 0
    while abs(term) > 1e-12:
        total, n = total + term, n + 1
        term *= at / n
    return framework.tensor(total)


def _in_a_loop_of_tensors(framework: Framework, x: Tensor) -> Tensor:
    x = op_stop_gradient(x)
    total, term, n = 1.0 + 0.0 * x, x, 1
    while abs(float(op_convert_to_numpy(term))) > 1e-12:
        total, n = total + term, n + 1
        term = term * x / float(n)
    return total


Exponential = Callable[[Framework, Tensor], Tensor]

EXPONENTIALS: dict[str, Exponential] = {
    "in NumPy": lambda framework, x: framework.tensor(np.exp(op_convert_to_numpy(x))),
    "in NumPy, in place": _in_place,
    "in Python's math": lambda framework, x: framework.tensor(
        math.exp(float(op_convert_to_numpy(x)))
    ),
    "in a loop on values": _in_a_loop,
    "in a loop on tensors": _in_a_loop_of_tensors,
}


@case(exp=EXPONENTIALS, order=ORDERS)
def opaque_f(framework: Framework, exp: Exponential, order: int) -> None:
    """f has values in every order, and does not run again for a rule that keeps its output."""

    def f(x: Tensor) -> Any:
        y = exp(framework, x)
        return y, lambda u: u * 5.0 * y

    op, runs = counted(f)
    value = float(np.exp(2 * AT))
    expected = order * 10 ** (order - 1) * value + AT * 10**order * value
    framework.check_derivative(lambda x: op(2.0 * x) * x, order, expected, at=AT)
    assert len(runs) == runs_of_a_plain_function(framework, order), f"{len(runs)} runs of f"


@case(order=ORDERS)
def intermediate_of_a_plain_f(framework: Framework, order: int) -> None:
    """A deterministic f with differentiable intermediates always has a second order."""

    def f(x: Tensor) -> Any:
        square = x * x
        return square * x, lambda u: u * 5.0 * square

    op, runs = counted(f)
    framework.check_derivative(op, order, CUBE[order - 1], at=AT)
    assert order > 1 or len(runs) == runs_of_a_plain_function(framework, 1), (
        f"{len(runs)} runs of f"
    )
