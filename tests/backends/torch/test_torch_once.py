"""Gradients without derivatives: once_differentiable."""

import pytest
import torch
from torch.autograd import forward_ad

from cgshim import CustomGradientTypeError, TransformationError, op_custom_gradient


def leaf(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def _square(x, w):
    square = x * x
    return square * w, lambda u: (u * 7 * square, u * 5 * square)


once = op_custom_gradient(once_differentiable=True, forward_mode=True, name="once")(_square)
REFUSED = "once: a rule that is once_differentiable gives a gradient without derivatives, got"


@pytest.mark.parametrize("by", ["x", "w", "upstream"])
@pytest.mark.parametrize("of", [0, 1])
def test_a_second_order_raises(of, by):
    x, w, upstream = leaf(2.0), leaf(3.0), leaf(0.5)
    gradients = torch.autograd.grad(once(x, w), (x, w), upstream, create_graph=True)
    assert [g.item() for g in gradients] == [14, 10]
    with pytest.raises(TransformationError, match=REFUSED):
        torch.autograd.grad(
            gradients[of], {"x": x, "w": w, "upstream": upstream}[by], materialize_grads=True
        )


def test_a_gradient_without_derivatives_is_an_ordinary_tensor():
    x, w = leaf(2.0), leaf(3.0)
    (gradient,) = torch.autograd.grad(once(x, w) + x**3, x, create_graph=True)
    assert gradient.item() == 28 + 12


LEVELS_OF_ONCE = {
    "grad of grad": lambda f: torch.func.grad(torch.func.grad(f)),
    "vmap of grad of grad": lambda f: (
        lambda x: torch.vmap(torch.func.grad(torch.func.grad(f)))(x[None])
    ),
    "grad of vmap of grad": lambda f: torch.func.grad(
        lambda x: torch.vmap(torch.func.grad(f))(x[None]).sum()
    ),
    "jacrev of jacrev": lambda f: torch.func.jacrev(torch.func.jacrev(f)),
    "jacfwd of jacrev": lambda f: torch.func.jacfwd(torch.func.jacrev(f)),
    "eager over grad": lambda f: lambda x: torch.autograd.grad(torch.func.grad(f)(x), x),
}


@pytest.mark.parametrize("level", LEVELS_OF_ONCE)
def test_a_second_order_raises_under_torch_func(level):
    x, w = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0)
    with pytest.raises(TransformationError, match=REFUSED):
        LEVELS_OF_ONCE[level](lambda x: once(x, w))(x)
    assert torch.func.grad(once)(x, w) == 28
    assert torch.vmap(torch.func.grad(once), (0, None))(x[None], w) == 28


def test_forward_mode_over_the_gradient_raises():
    x, w = leaf(2.0), leaf(3.0)
    y = once(x, w)
    with forward_ad.dual_level():
        upstream = forward_ad.make_dual(torch.ones(1, dtype=x.dtype), torch.ones(1, dtype=x.dtype))
        with pytest.raises(TransformationError, match=REFUSED):
            torch.autograd.grad(y, x, upstream)


def test_a_gradient_without_derivatives_saves_the_residuals():
    packed = []
    op = op_custom_gradient(_square, once_differentiable=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t.tolist()) or t, lambda t: t
    ):
        op(leaf(3.0), leaf(5.0))
    assert [numbers for numbers in packed if numbers] == [[9.0]]


def test_a_batch_of_gradients_without_derivatives():
    op = op_custom_gradient(_square_of_one, once_differentiable=True, forward_mode=True)
    x, jacobian = leaf(2.0, 3.0), torch.autograd.functional.jacobian
    assert jacobian(op, x, vectorize=True).tolist() == [[28, 0], [0, 63]]
    with pytest.raises(TransformationError, match=REFUSED.replace("once:", "_square_of_one:")):
        jacobian(op, x, vectorize=True, strategy="forward-mode")
    with pytest.raises(TransformationError, match=REFUSED.replace("once:", "_square_of_one:")):
        torch.autograd.grad(jacobian(op, x, create_graph=True).sum(), x)


def _square_of_one(x):
    square = x * x
    return square * x, lambda u: u * 7 * square


def test_once_differentiable_beside_an_undeclared_variable():
    weight = leaf(5.0)
    op = op_custom_gradient(lambda x: (x * weight, lambda u: u * weight), once_differentiable=True)
    with pytest.raises(CustomGradientTypeError, match="grad_fn must take variables"):
        op(leaf(2.0))
