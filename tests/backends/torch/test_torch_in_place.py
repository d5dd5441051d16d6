"""An f that writes to an argument raises an error."""

import pytest
import torch
from torch.func import grad, vmap

from cgshim import CustomGradientTypeError, op_custom_gradient

WEIGHTS = torch.tensor([3.0, 5.0])


@op_custom_gradient
def double(x, scale):
    x.mul_(2.0)
    return x * scale, lambda upstream: (7.0 * upstream, None)


def by_backward(fn):
    def gradient(a):
        a = a.clone().requires_grad_()
        return torch.autograd.grad(fn(a), a)[0]

    return gradient


DIFFERENTIATED = {
    "a leaf": by_backward(lambda a: (double(a, WEIGHTS) * WEIGHTS).sum()),
    "used again": by_backward(
        lambda a: (lambda x: double(x, WEIGHTS).sum() + (10.0 * x).sum())(a * 1.0)
    ),
    "torch.func.grad": grad(lambda a: double(a * 1.0, WEIGHTS).sum()),
    "grad of vmap": grad(lambda a: vmap(double)(a * 1.0, WEIGHTS).sum()),
    "vmap of grad": lambda a: vmap(grad(lambda x: double(x * 1.0, WEIGHTS[0])))(a),
}


@pytest.mark.parametrize("differentiate", DIFFERENTIATED.values(), ids=DIFFERENTIATED)
def test_a_differentiated_argument(differentiate):
    with pytest.raises(CustomGradientTypeError, match=r"double: f must not write .* in place"):
        differentiate(torch.tensor([1.0, 2.0]))


def test_a_view_that_f_turns_in_place_counts_as_a_change():
    op = op_custom_gradient(
        lambda x: (x[0].unsqueeze_(0).squeeze_(), lambda upstream: 7.0 * upstream)
    )
    with pytest.raises(CustomGradientTypeError, match="got a change in place"):
        op(torch.ones(2, 3, requires_grad=True))


def test_a_constant_argument_must_not_change_either():
    op = op_custom_gradient(
        lambda x, count: (x * count.add_(1.0), lambda upstream: (7.0 * upstream, None))
    )
    x, count = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor(4.0)
    with pytest.raises(CustomGradientTypeError, match="got a change in place"):
        op(x, count)
