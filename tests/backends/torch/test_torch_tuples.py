"""An op that returns a tuple of tensors: its call is a plain one, as that of a single tensor, unless
one output shows what another does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cgshim import op_custom_gradient

X = torch.tensor([0.5, 1.5, -2.0], dtype=torch.float64)
WEIGHTS = (3.0, 7.0)


def flat(x: Any) -> Any:
    return (x * x, 5 * x), lambda a, b: 11 * a * x + 13 * b


def structured(x: Any) -> Any:
    return (x * x, 5 * x), lambda upstream: 11 * upstream[0] * x + 13 * upstream[1]


def with_arguments(x: Any) -> Any:
    return (x * x, 5 * x), lambda x, upstream: 11 * upstream[0] * x + 13 * upstream[1]


def keeping_an_output(x: Any) -> Any:
    five = 5 * x
    return (x * x, five), lambda a, b: 11 * a * five / 5 + 13 * b


def a_view_of_the_other(x: Any) -> Any:
    five = 5 * x
    return (x * x, five, five[:2]), lambda a, b, c: 11 * a * x + 13 * b


def beside_integers(x: Any) -> Any:
    return (x * x, 5 * x, x > 0), lambda a, b, c: 11 * a * x + 13 * b


@pytest.mark.parametrize(
    "f",
    [flat, structured, with_arguments, keeping_an_output, a_view_of_the_other, beside_integers],
)
def test_two_orders(f: Any) -> None:
    op, x = op_custom_gradient(f), X.clone().requires_grad_()
    outputs = op(x)
    assert type(outputs) is tuple
    total = sum((w * y).sum() for w, y in zip(WEIGHTS, outputs, strict=False))
    (gradient,) = torch.autograd.grad(total, x, create_graph=True)
    torch.testing.assert_close(gradient, 33 * x + 91)
    (second,) = torch.autograd.grad((gradient * torch.arange(3.0)).sum(), x)
    of_x = (
        13 / 5 if f is keeping_an_output else 1.0
    )  # the derivative of 5 * x, by the op's own rule
    torch.testing.assert_close(second, 33 * of_x * torch.arange(3.0, dtype=torch.float64))


def test_an_output_that_is_not_used_has_an_upstream_of_zeros() -> None:
    x = X.clone().requires_grad_()
    _, five = op_custom_gradient(flat)(x)
    torch.testing.assert_close(*torch.autograd.grad((2 * five).sum(), x), torch.full_like(X, 26.0))


def test_an_output_that_the_rule_keeps_must_not_change() -> None:
    x = X.clone().requires_grad_()
    square, five = op_custom_gradient(keeping_an_output)(x)
    five.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(square.sum(), x)


def test_one_rule_for_a_tensor_and_for_tuples() -> None:
    """Its code is the same, and how it is called is not."""

    @op_custom_gradient
    def op(x: Any, *, count: int) -> Any:
        outputs = tuple([(at + 2) * x for at in range(count)])
        rule = lambda *upstreams: sum((at + 7) * u for at, u in enumerate(upstreams))
        return (outputs if count > 1 else outputs[0]), rule

    for count in (2, 1, 3, 1):
        x = X.clone().requires_grad_()
        outputs = op(x, count=count) if count > 1 else (op(x, count=count),)
        total = sum((3 * y).sum() for y in outputs)
        expected = 3.0 * sum(range(7, 7 + count))
        torch.testing.assert_close(*torch.autograd.grad(total, x), torch.full_like(X, expected))


def test_one_rule_for_a_tensor_and_for_a_tuple_of_one() -> None:
    @op_custom_gradient
    def op(x: Any, *, in_a_tuple: bool) -> Any:
        rule = lambda upstream: 7 * upstream[0] if type(upstream) is tuple else 5 * upstream
        return ((2 * x,) if in_a_tuple else 2 * x), rule

    for in_a_tuple in (False, True, False):
        x = X.clone().requires_grad_()
        output = op(x, in_a_tuple=in_a_tuple)
        total = (3 * (output[0] if in_a_tuple else output)).sum()
        expected = torch.full_like(X, 21.0 if in_a_tuple else 15.0)
        torch.testing.assert_close(*torch.autograd.grad(total, x), expected)


def test_what_one_tensor_is_refused_for_is_refused_in_a_tuple() -> None:
    x = X.clone().requires_grad_()
    op = op_custom_gradient(lambda x: ((x * x, 5 * x), lambda a, b: (a + b)[:2]))
    with pytest.raises(ValueError, match="the gradient of x must have its shape"):
        torch.autograd.grad(op(x)[0].sum(), x)
