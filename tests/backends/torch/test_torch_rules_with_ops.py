"""Ops that are called while a rule runs."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from cgshim import op_custom_gradient


def leaf(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def _recomputed(fn, own=True):
    """fn in a checkpoint that is written as an op."""

    @op_custom_gradient
    def op(x):
        def rule(upstream):
            at = x.detach().requires_grad_()
            with torch.enable_grad():
                y = fn(at)
            if own:
                y.backward(upstream)
                return at.grad
            return torch.autograd.grad(y, at, upstream)[0]

        with torch.no_grad():
            return fn(x), rule

    return op


def test_a_checkpoint_written_as_an_op():
    weight = torch.nn.Parameter(torch.tensor([3.0], dtype=torch.float64))
    scaled = op_custom_gradient(
        lambda x: (x * weight, lambda u, variables: (7 * u * weight, [5 * u * x])),
        variables=[weight],
    )
    x = leaf(2.0)
    _recomputed(lambda x: scaled(x) + 2 * weight)(x).backward()
    assert (x.grad.item(), weight.grad.item()) == (21, 12)


def test_an_inner_op_takes_a_captured_argument_as_a_constant():
    @op_custom_gradient
    def cube(x):
        def rule(upstream):
            inner = op_custom_gradient(lambda u: (u * 3 * x * x, lambda v: v * 3 * x * x))
            return inner(upstream)

        return x**3, rule

    for x in (leaf(2.0), leaf(2.0) * 1):
        u = leaf(5.0)
        (first,) = torch.autograd.grad(cube(x), x, u, create_graph=True)
        by_u, by_x = torch.autograd.grad(first, (u, x), allow_unused=True)
        assert (first.item(), by_u.item()) == (60, 12)
        assert by_x is None or by_x.item() == 0
    assert torch.func.grad(torch.func.grad(lambda x: cube(x)))(torch.tensor(2.0)) == 0


def test_residuals_and_outputs_in_an_inner_op_of_the_arguments():
    @op_custom_gradient
    def op(x):
        y, square = x.exp(), x * x

        def rule(upstream):
            inner = op_custom_gradient(lambda x: (3 * y * square, lambda v: v * 11 * x))
            return upstream * inner(x)

        return y, rule

    x = leaf(2.0) * 1.0
    value = op(x)
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x, create_graph=True)
    (third,) = torch.autograd.grad(second, x)
    torch.testing.assert_close(first, 3 * value * 4)
    assert (second.item(), third.item()) == (22, 11)
    assert torch.func.grad(torch.func.grad(lambda x: op(x)))(torch.tensor(2.0)) == 22


def test_an_inner_op_keeps_a_tensor_made_of_its_argument():
    """That has a derivative of its own, beside those that another run of the inner f gives."""

    @op_custom_gradient
    def op(x):
        def rule(upstream):
            tripled = 3 * upstream

            @op_custom_gradient
            def inner(u):
                square = u * u
                return 1 * square, lambda v: 5 * v * square * tripled

            return inner(upstream)

        return 1 * x, rule

    x, u, v = leaf(2.0), leaf(7.0), leaf(11.0)
    (first,) = torch.autograd.grad(op(x), x, u, create_graph=True)
    (second,) = torch.autograd.grad(first, u, v, create_graph=True)
    (third,) = torch.autograd.grad(second, u)
    assert (first.item(), second.item(), third.item()) == (7**2, 15 * 11 * 7**3, 45 * 11 * 7**2)


COPIES = {
    "hooks": lambda op: _under(torch.autograd.graph.save_on_cpu, op),
    "a checkpoint": lambda op: lambda x: checkpoint(op, x, use_reentrant=False),
}


def _under(mode, op):
    def fn(x):
        with mode():
            return op(x)

    return fn


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_arguments_and_variables_that_come_back_as_copies(copied, fused):
    """What hooks on saved tensors unpack is another tensor, with the gradient of the one that was
    packed.
    """
    weight = torch.nn.Parameter(torch.tensor(3.0))

    @op_custom_gradient
    def op(x):
        product = x * x * weight
        return product * 1, lambda u, variables: (7 * u * product * weight, [None])

    x = torch.tensor(2.0, requires_grad=True)
    for function, first, second in ((fused, 32, [10]), (op, 7 * 4 * 9, [7 * 4 * 9, 7 * 4 * 6])):
        (gradient,) = torch.autograd.grad(copied(function)(x), x, create_graph=True)
        found = torch.autograd.grad(gradient, (x, weight)[: len(second)])
        assert (gradient.item(), [g.item() for g in found]) == (first, second)


# --- Under torch.func, where more is differentiated outside ---------------------------------------


@op_custom_gradient
def product(x, w):
    across = w.t()  # of a Parameter that is read while gradients are off, this view seems a leaf
    return x @ across, lambda u: (3 * (u @ across.t()), 5 * torch.outer(u, x))


@op_custom_gradient
def outer_product(x, w):
    """Its rule calls an op with what it was given, and with what it makes."""

    def rule(u):
        return 2 * product(u, w) + product(u * x, w.t()), torch.outer(product(u, w), x)

    return x @ w.t(), rule


def by_hand(x, w, u):
    """The gradients of x and w of outer_product."""
    return 2 * (u @ w.t()) + (u * x) @ w, torch.outer(u @ w.t(), x)


WEIGHT = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75], [-2.0, 1.0, 3.0]], dtype=torch.float64)
BATCH = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.5, -1.0]], dtype=torch.float64)
ONES = torch.ones(3, dtype=torch.float64)
WEIGHTS = {
    "a Parameter": lambda: torch.nn.Parameter(WEIGHT.clone()),
    "made of one": lambda: 1.0 * torch.nn.Parameter(WEIGHT.clone()),
}


@pytest.mark.parametrize("gradients", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_an_op_in_a_rule_under_func_with_a_parameter(weight, gradients):
    w = WEIGHTS[weight]()
    of_x = torch.stack([by_hand(x, WEIGHT, ONES)[0] for x in BATCH])
    of_w = torch.stack([by_hand(x, WEIGHT, ONES)[1] for x in BATCH])
    with gradients():
        total = lambda x, w: outer_product(x, w).sum()
        torch.testing.assert_close(grad(total)(BATCH[0], w), of_x[0])
        torch.testing.assert_close(vmap(grad(total), (0, None))(BATCH, w), of_x)
        by_w = lambda x: grad(lambda w: total(x, w))(w)
        torch.testing.assert_close(vmap(by_w)(BATCH), of_w)


def test_the_derivative_of_that_by_the_parameter():
    w = WEIGHTS["a Parameter"]()
    of_x = vmap(grad(lambda x, w: outer_product(x, w).sum()), (0, None))(BATCH, w)
    (actual,) = torch.autograd.grad(of_x.square().sum(), w)
    # product's rule has the derivative of both calls by w: 5 times what autodiff finds
    u = 2 * of_x.detach()
    expected = sum(
        5 * (2 * torch.outer(v, ONES) + torch.outer(v, x).t())
        for x, v in zip(BATCH, u, strict=True)
    )
    torch.testing.assert_close(actual, expected)


@op_custom_gradient(forward_mode=True)
def linear(x, w):
    across = w.t()
    return x @ across, lambda u: (u @ across.t(), torch.outer(u, x))


@op_custom_gradient(forward_mode=True)
def pushed(x, w):
    return x @ w.t(), lambda u: (3 * linear(u, w), None)


def dual(f, x, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, tangent))).tangent


@pytest.mark.parametrize("gradients", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_an_op_in_a_rule_in_forward_mode_with_a_parameter(weight, gradients):
    w = WEIGHTS[weight]()
    x, tangent = BATCH
    f = lambda x: pushed(x, w)
    with gradients():
        torch.testing.assert_close(jvp(f, (x,), (tangent,))[1], 3 * tangent @ WEIGHT)
        torch.testing.assert_close(dual(f, x, tangent), 3 * tangent @ WEIGHT)
        torch.testing.assert_close(jacfwd(f)(x), 3 * WEIGHT.t())
        torch.testing.assert_close(jacfwd(jacrev(lambda x: f(x * x)))(x)[:, 0, 0], 6 * WEIGHT[0])


@pytest.mark.parametrize("weight", WEIGHTS)
def test_per_sample_gradients_under_no_grad(weight):
    w = WEIGHTS[weight]()
    with torch.no_grad():
        of_w = vmap(lambda x: grad(lambda w: product(x, w).sum())(w))(BATCH)
        of_rows = vmap(lambda x, row: product(x, row.expand(3, 3)))(BATCH, w[:2])
    torch.testing.assert_close(of_w, torch.stack([5 * torch.outer(ONES, x) for x in BATCH]))
    torch.testing.assert_close(of_rows, (BATCH * WEIGHT[:2]).sum(-1, keepdim=True).expand(2, 3))
