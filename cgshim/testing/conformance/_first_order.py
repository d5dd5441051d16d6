"""The first order's number does not depend on a second order: its values are the first run's.

Another run of f may give derivatives. If it cannot (f is random, opaque or has side effects), the
second order raises an error, or is right for the rule's residuals.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import cgshim
from cgshim import (
    CustomGradientError,
    CustomGradientTypeError,
    op_custom_gradient,
    op_stop_gradient,
)
from cgshim._protocol import Tensor
from cgshim.testing.conformance._framework import Framework
from cgshim.testing.conformance._registry import case
from cgshim.testing.conformance._runs import EXPONENTIALS, Exponential


def first_order_and_second(
    framework: Framework,
    op: Callable[[Tensor], Tensor],
    at: Any,
    dtype: str = "float32",
    between: Callable[[], None] = lambda: None,
) -> tuple[Any, Any]:
    """Return the gradient in a differentiated function, and its derivative, or None if that raises.

    `between()` runs after the call, and again after the gradient.
    """
    one = framework.tensor(np.ones_like(at), dtype)

    def gradient(x: Tensor) -> Tensor:
        _, pullback = cgshim.op_vjp(op, x)
        between()
        return pullback(one)[0]

    first, pullback = cgshim.op_vjp(gradient, framework.tensor(at, dtype))
    first = framework.numpy(first)
    between()
    try:
        return first, framework.numpy(pullback(one)[0])
    except CustomGradientError:
        return first, None


def check_close(actual: Any, expected: Any, dtype: str) -> None:
    """Compare two numbers to a few units in the last place of their dtype."""
    tolerance = 2.0**-5 if dtype == "bfloat16" else 8 * float(np.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(actual, "float64"), np.asarray(expected, "float64"), rtol=tolerance
    )


def check_both(
    derivatives: tuple[Any, Any], first: Any, second: Any, dtype: str = "float32"
) -> None:
    """Compare a first order, and a second one unless it raised an error."""
    check_close(derivatives[0], first, dtype)
    if derivatives[1] is not None:
        check_close(derivatives[1], second, dtype)


@case(exp=EXPONENTIALS)
def opaque_intermediate(framework: Framework, exp: Exponential) -> None:
    """A residual that f's own operations do not connect with the argument is a constant."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        constant = exp(framework, x)
        return constant * x, lambda u: u * 5.0 * constant * x

    derivatives = first_order_and_second(framework, op, 0.5)
    check_both(derivatives, 2.5 * np.exp(0.5), 5 * np.exp(0.5))


# --- f draws random numbers -----------------------------------------------------------------------

_numpy_generator = np.random.default_rng(0)
_python_generator = random.Random(0)

Draw = Callable[[], float]

DRAWS: dict[str, Draw] = {
    "numpy.random": lambda: float(np.random.normal()),  # the generator of legacy code
    "a NumPy Generator": lambda: float(_numpy_generator.normal()),
    "random": lambda: random.gauss(0.0, 1.0),
    "a random.Random": lambda: _python_generator.gauss(0.0, 1.0),
}


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Seed every run of a case alike, and restore the generators of the test run."""
    of_numpy, of_python = np.random.get_state(), random.getstate()
    np.random.seed(1)
    random.seed(1)
    try:
        yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)


SIZES = {"1": 1.0, "1e-2": 1e-2}
DTYPES = {"float32": "float32", "bfloat16": "bfloat16"}


@case(draw=DRAWS, size=SIZES, dtype=DTYPES)
@seeded()
def random_intermediate(framework: Framework, draw: Draw, size: float, dtype: str) -> None:
    """The sample is the first run's: 3 r, and 6 r / x for r = x^2 (1 + noise)."""
    residuals: list[Any] = []

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        noisy = x * x * framework.tensor(1.0 + size * draw(), dtype)
        residuals.append(framework.numpy(noisy).astype("float64"))
        return noisy * x, lambda u: u * 3.0 * noisy

    for at in (np.array([1.25, 2.0]), np.array([3.0])):
        residuals.clear()
        derivatives = first_order_and_second(framework, op, at, dtype)
        check_both(derivatives, 3 * residuals[0], 6 * residuals[0] / at, dtype)


@case(draw=DRAWS)
@seeded()
def random_branch(framework: Framework, draw: Draw) -> None:
    """A draw picks a branch of f; both orders use this branch."""
    done: list[str] = []

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        done.append("square" if draw() > 0.0 else "cube")
        residual = x * x if done[-1] == "square" else x * x * x
        return residual * x, lambda u: u * 3.0 * residual

    for _ in range(6):
        done.clear()
        derivatives = first_order_and_second(framework, op, 2.0)
        expected = (12.0, 12.0) if done[0] == "square" else (24.0, 36.0)
        check_both(derivatives, expected[0], expected[1])


@case(draw=DRAWS)
@seeded()
def random_output(framework: Framework, draw: Draw) -> None:
    """A rule that keeps only its output needs no other run of f: the second order is right."""
    outputs: list[Any] = []

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        y = op_stop_gradient(x * draw())
        outputs.append(framework.numpy(y))
        return y, lambda u: u * 5.0 * y

    first, second = first_order_and_second(framework, op, 2.0)
    check_close(first, 5 * outputs[0], "float32")
    assert second is not None, "the second order of a rule that keeps its output was refused"
    check_close(second, 25 * outputs[0], "float32")


@case(draw=DRAWS, residual={"an argument": False, "an intermediate": True})
@seeded()
def random_number_in_the_rule(framework: Framework, draw: Draw, residual: bool) -> None:
    """f draws a Python float, and its rule keeps it."""
    drawn: list[float] = []

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        factor = draw()
        drawn.append(factor)
        square = x * x
        return square * x, (lambda u: u * factor * square) if residual else (
            lambda u: u * factor * x
        )

    first, second = first_order_and_second(framework, op, 2.0)
    check_close(first, drawn[0] * (4.0 if residual else 2.0), "float32")
    if second is None:
        assert residual, "the second order of a rule that keeps its argument was refused"
    else:
        check_close(second, drawn[0] * (4.0 if residual else 1.0), "float32")


# --- f reads or writes changing state -------------------------------------------------------------


@case()
def changed_setting(framework: Framework) -> None:
    settings = {"scale": 2.0}

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        residual = x * x * settings["scale"]
        return residual * x, lambda u: u * 3.0 * residual

    def change() -> None:
        settings["scale"] += 5.0

    derivatives = first_order_and_second(framework, op, 3.0, between=change)
    check_both(derivatives, 54.0, 36.0)


@case()
def changed_setting_of_the_rule(framework: Framework) -> None:
    """A Python number that the rule keeps is the first run's too."""
    settings = {"scale": 2.0}

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        scale, square = settings["scale"], x * x
        return square * x, lambda u: u * 3.0 * scale * square

    def change() -> None:
        settings["scale"] += 5.0

    derivatives = first_order_and_second(framework, op, 3.0, between=change)
    check_both(derivatives, 54.0, 36.0)


@case()
def counting_f(framework: Framework) -> None:
    """Every run of f changes its own state."""
    state = np.zeros(1, "float32")

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        state[0] += 1.0
        residual = x * x * float(state[0])
        return residual * x, lambda u: u * 3.0 * residual

    derivatives = first_order_and_second(framework, op, 3.0)
    check_both(derivatives, 27.0, 18.0)


@case(is_tensor={"a tensor": True, "a NumPy array": False})
def argument_changed_in_place(framework: Framework, is_tensor: bool) -> None:
    """f doubles a constant argument in place: an error where tensors are writable."""

    @op_custom_gradient
    def op(x: Tensor, factor: Tensor) -> Any:
        factor *= 2.0
        residual = x * x * factor
        return residual * x, lambda u: (u * 3.0 * residual, None)

    factor = framework.tensor(2.0) if is_tensor else np.array(2.0, "float32")
    try:
        derivatives = first_order_and_second(framework, lambda x: op(x, factor), 3.0)
    except (CustomGradientTypeError, ValueError):  # NumPy's error for a read-only array
        return
    check_both(derivatives, 3 * 9 * 4.0, 3 * 6 * 4.0)


@case()
def fewer_residuals_the_second_time(framework: Framework) -> None:
    runs: list[int] = []

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        runs.append(1)
        square = x * x
        residuals = [square, square * x] if len(runs) == 1 else [square]
        return square * x, lambda u: u * 3.0 * sum(residuals[1:], residuals[0])

    derivatives = first_order_and_second(framework, op, 2.0)
    check_both(derivatives, 3 * (4.0 + 8.0), 3 * (4.0 + 12.0))
