"""What two runs of f have kept is the same: to a few units in the last place, or else f's second order is refused."""

import numpy as np
import pytest
from autograd import grad

from cgshim import TransformationError, op_custom_gradient
from cgshim_numpy._arrays import agree

EPS = {dtype: float(np.finfo(dtype).eps) for dtype in ("float16", "float32", "float64", "complex64")}

PAIRS = {
    "the same": ([1.0, 2.0], [1.0, 2.0], True),
    "zeros": ([0.0, 2.0], [0.0, 2.0], True),
    "NaN": ([np.nan, 2.0], [np.nan, 2.0], True),
    "infinity": ([np.inf, 2.0], [np.inf, 2.0], True),
    "NaN for a number": ([np.nan, 2.0], [1.0, 2.0], False),
    "another sign of infinity": ([np.inf, 2.0], [-np.inf, 2.0], False),
    "a small number for zero": ([0.0, 2.0], [1e-7, 2.0], False),
}


@pytest.mark.parametrize(("a", "b", "same"), PAIRS.values(), ids=PAIRS)
def test_numbers(a, b, same):
    assert agree(np.array(a), np.array(b)) is same
    assert agree(np.array(b), np.array(a)) is same


@pytest.mark.parametrize("dtype", EPS)
def test_units_in_the_last_place(dtype):
    one = np.ones(3, dtype)
    assert agree(one, (one + 3 * EPS[dtype]).astype(dtype))
    assert not agree(one, (one + 8 * EPS[dtype]).astype(dtype))


def test_integers_and_booleans_are_the_same_or_not():
    assert agree(np.array([1, 2]), np.array([1, 2]))
    assert not agree(np.array([10**9, 2]), np.array([10**9 + 1, 2]))
    assert not agree(np.array([True, False]), np.array([True, True]))


def counted(start, step):
    """x^3, with 7 for 3, whose rule keeps an intermediate and a number of the run."""
    runs = []

    def f(x):
        runs.append(1)
        square = x * x
        number = np.array(start + step * len(runs))
        return square * x, lambda u: u * (7.0 * square + 0.0 * number)

    return op_custom_gradient(f, name="op")


@pytest.mark.parametrize(("start", "step"), [(1, 1), (1.0, 1e-3)], ids=["an integer", "a float"])
def test_a_function_that_keeps_another_number_in_each_run_has_no_second_order(start, step):
    first = grad(counted(start, step))
    assert first(2.0) == 28.0
    with pytest.raises(TransformationError, match=r"^op: a second order runs f again, .*, got others; "):
        grad(first)(2.0)


@pytest.mark.parametrize("start", [1, 1.0, np.nan], ids=["an integer", "a float", "NaN"])
def test_a_function_that_keeps_the_same_number_in_each_run_has_one(start):
    assert grad(grad(counted(start, 0)))(2.0) == 28.0
