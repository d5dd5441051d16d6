"""How often f runs, and that it may be opaque: where a rule keeps arguments, outputs and integers, f runs once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import cgshim
from cgshim import op_convert_to_numpy, op_custom_gradient, op_stop_gradient
from cgshim._protocol import Tensor
from cgshim.testing.conformance._framework import Framework
from cgshim.testing.conformance._orders import nth_derivative
from cgshim.testing.conformance._registry import case

ORDERS = {"1": 1, "2": 2, "3": 3}
AT = 0.5

# --- f runs as often as a function in its place would ---------------------------------------------------------------


def runs_of_a_plain_function(framework: Framework, order: int) -> int:
    """How often the framework itself runs a function for a derivative: most of them once, in every order."""
    runs: list[int] = []

    def plain(x: Tensor) -> Tensor:
        runs.append(1)
        return x * x * x

    nth_derivative(plain, order)(framework.tensor(AT))
    return len(runs)


def _keeps_an_argument(framework: Framework, x: Tensor) -> Any:
    return x * x * x, lambda u: u * 5.0 * x * x


def _is_called_with_arguments(framework: Framework, x: Tensor) -> Any:
    return x * x * x, lambda *args, upstream: upstream * 5.0 * args[0] * args[0]


def _keeps_an_output(framework: Framework, x: Tensor) -> Any:
    y = x * x * x
    return y, lambda u: u * 5.0 * y / x


def _keeps_integers(framework: Framework, x: Tensor) -> Any:
    exponent = framework.tensor(3, "int32")
    positive = x > 0.0
    return (
        x * x * x,
        lambda u: u * 5.0 * x * x * cgshim.op_cast(exponent, "float32") / 3.0 * cgshim.op_cast(positive, "float32"),
    )


def _keeps_nothing(framework: Framework, x: Tensor) -> Any:
    return x * 3.0, lambda u: u * 5.0


def _keeps_all_of_these(framework: Framework, x: Tensor) -> Any:
    y, exponent = x * x * x, framework.tensor(3, "int32")
    return y, lambda u: [u * 2.0 * y / x + u * cgshim.op_cast(exponent, "float32") * x * x]


CUBE = (5 * AT**2, 10 * AT, 10.0)
# The derivative of 5 y / x, where that of y is 5 y / x: 20 y / x^2, and with that 60 y / x^3.
QUOTIENT = (5 * AT**2, 20 * AT, 60.0)
# The same of 2 y / x + 3 x^2: 2 y / x^2 + 12 x, and with that 10 - 4 + 12.
BOTH = (5 * AT**2, 14 * AT, 18.0)

KEPT: dict[str, tuple[Callable[[Framework, Tensor], Any], Sequence[float]]] = {
    "an argument": (_keeps_an_argument, CUBE),
    "nothing, the rule is given arguments": (_is_called_with_arguments, CUBE),
    "an output": (_keeps_an_output, QUOTIENT),
    "integers": (_keeps_integers, CUBE),
    "nothing": (_keeps_nothing, (5.0, 0.0, 0.0)),
    "all of these": (_keeps_all_of_these, BOTH),
}
"""What a rule keeps, and the first three derivatives that follow."""


@case(kept=KEPT, order=ORDERS)
def f_is_not_run_again(
    framework: Framework, kept: tuple[Callable[[Framework, Tensor], Any], Sequence[float]], order: int
) -> None:
    """Where the rule keeps arguments, outputs and integers alone: in no order."""
    f, expected = kept
    runs: list[int] = []

    def counted(x: Tensor) -> Any:
        runs.append(1)
        return f(framework, x)

    found = nth_derivative(op_custom_gradient(counted), order)(framework.tensor(AT))
    framework.check_equal(found, np.array(expected[order - 1]))
    assert len(runs) == runs_of_a_plain_function(framework, order), f"{len(runs)} runs of f"


# --- f is opaque ----------------------------------------------------------------------------------------------------


def _in_numpy(framework: Framework, x: Tensor) -> Tensor:
    return framework.tensor(np.exp(op_convert_to_numpy(x)))


def _in_place(framework: Framework, x: Tensor) -> Tensor:
    array = np.array(op_convert_to_numpy(x))
    np.exp(array, out=array)
    return framework.tensor(array)


def _in_math(framework: Framework, x: Tensor) -> Tensor:
    return framework.tensor(math.exp(float(op_convert_to_numpy(x))))


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
    "in NumPy": _in_numpy,
    "in NumPy, in place": _in_place,
    "in Python's math": _in_math,
    "in a loop on values": _in_a_loop,
    "in a loop on tensors": _in_a_loop_of_tensors,
}


@case(exp=EXPONENTIALS, order=ORDERS)
def opaque_f(framework: Framework, exp: Exponential, order: int) -> None:
    """f has values, in every order, and is not run again for a rule that keeps its output."""
    runs: list[int] = []

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        runs.append(1)
        y = exp(framework, x)
        return y, lambda u: u * 5.0 * y

    value = float(np.exp(2 * AT))
    expected = order * 10 ** (order - 1) * value + AT * 10**order * value
    found = nth_derivative(lambda x: op(2.0 * x) * x, order)(framework.tensor(AT))
    framework.check_equal(found, np.array(expected))
    assert len(runs) == runs_of_a_plain_function(framework, order), f"{len(runs)} runs of f"


@case(order=ORDERS)
def intermediate_of_a_plain_f(framework: Framework, order: int) -> None:
    """None of this refuses a second order that can be had: f is deterministic, and its intermediate has derivatives."""
    runs: list[int] = []

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        runs.append(1)
        square = x * x
        return square * x, lambda u: u * 5.0 * square

    expected = {1: 5 * AT**2, 2: 10 * AT, 3: 10.0}
    framework.check_equal(nth_derivative(op, order)(framework.tensor(AT)), np.array(expected[order]))
    assert order > 1 or len(runs) == runs_of_a_plain_function(framework, 1), f"{len(runs)} runs of f"
