"""needs_input_grad on NumPy: the boxes of autograd, at each level.

The rule is wrong on purpose, and by another number for each way in which it is asked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from autograd import grad, make_jvp, make_vjp

from cgshim import op_custom_gradient

X, W = np.array([1.0, 2.0]), np.array([3.0, 5.0])


def _product(x: Any, w: Any, *, needs_input_grad: Any) -> Any:
    """x * w, with 100 more if f may need the gradient of x, and 200 if that of w; and a factor that
    says the same.
    """
    by_f = 100 * needs_input_grad[0] + 200 * needs_input_grad[1]

    def rule(upstream: Any, needs_input_grad: Any) -> Any:
        of_x, of_w = needs_input_grad
        factor = 7 + 10 * of_x + 20 * of_w
        return factor * upstream * w if of_x else None, factor * upstream * x if of_w else None

    return x * w + by_f, rule


product = op_custom_gradient(_product)
linear = op_custom_gradient(_product, forward_mode=True)


def loss(x: Any, w: Any) -> Any:
    return product(x, w).sum()


GRADIENTS = {
    "by x": (lambda: grad(loss)(X, W), 17 * W),
    "by w": (lambda: grad(loss, 1)(X, W), 27 * X),
    "by both": (
        lambda: np.stack(make_vjp(lambda xw: loss(*xw))((X, W))[0](1.0)),
        37 * np.stack([W, X]),
    ),
    "w further in than x": (lambda: grad(lambda x: grad(loss, 1)(x, W).sum())(X), np.full(2, 27.0)),
    "x further in than w": (lambda: grad(lambda w: grad(loss)(X, w).sum())(W), np.full(2, 17.0)),
    "one in another of its own": (lambda: grad(lambda x: (grad(loss)(x, W) * x).sum())(X), 17 * W),
    "forward mode by x": (lambda: make_jvp(lambda x: linear(x, W))(X)(2 * X)[1], 34 * W * X),
    "forward mode by w": (lambda: make_jvp(lambda w: linear(X, w))(W)(2 * W)[1], 54 * W * X),
}


@pytest.mark.parametrize(("take", "expected"), GRADIENTS.values(), ids=GRADIENTS)
def test_each_level_asks_for_its_own(take: Any, expected: Any) -> None:
    np.testing.assert_allclose(take(), expected)


def test_an_undifferentiated_call_needs_nothing() -> None:
    np.testing.assert_array_equal(product(X, W), X * W)
    np.testing.assert_array_equal(grad(lambda x: (x * product(X, W)).sum())(X), X * W)


def test_f_is_told_in_each_run_of_a_second_order() -> None:
    told = []

    @op_custom_gradient
    def op(x: Any, w: Any, *, needs_input_grad: Any) -> Any:
        told.append(needs_input_grad)
        slope = 2 * x * w
        return x * x * w, lambda upstream: (upstream * slope, None)

    np.testing.assert_allclose(grad(lambda x: grad(lambda x: op(x, W).sum())(x).sum())(X), 2 * W)
    assert told == [(True, False)] * 2
