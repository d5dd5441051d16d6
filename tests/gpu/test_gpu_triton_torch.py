"""A Triton kernel as f, and another as its rule, beside the same two in torch.autograd.Function."""

from __future__ import annotations

import pytest
import torch

from cgshim import op_custom_gradient

pytestmark = [pytest.mark.gpu, pytest.mark.only_on_gpu]


@pytest.fixture
def ops():
    """The op, and the same by hand."""
    from triton_kernels import swish, swish_rule  # which needs Triton

    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return swish(x)

        @staticmethod
        def backward(ctx, upstream):
            return swish_rule(*ctx.saved_tensors, upstream)

    op = op_custom_gradient(
        lambda x: (swish(x), lambda upstream: swish_rule(x, upstream)), name="swish"
    )
    return op, ByHand.apply


def gradient(op, x):
    return torch.autograd.grad(
        op(torch.sin(x)), x, torch.linspace(0.5, 7.0, len(x), device=x.device)
    )[0]


@pytest.fixture
def x():
    return torch.linspace(-3.0, 5.0, 1000, device="cuda", requires_grad=True)


def test_a_kernel_and_its_rule(ops, x):
    op, by_hand = ops
    torch.testing.assert_close(op(x), torch.nn.functional.silu(x))
    found = gradient(op, x)
    torch.testing.assert_close(found, gradient(by_hand, x), rtol=0.0, atol=0.0)
    torch.testing.assert_close(found, 3.0 * gradient(torch.nn.functional.silu, x))


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script",
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:The .grad attribute:UserWarning",
)  # of inductor and Dynamo
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled(ops, x, mode):
    op, by_hand = ops
    torch._dynamo.reset()
    found = gradient(torch.compile(op, mode=mode), x).clone()
    torch.testing.assert_close(found, gradient(by_hand, x))


def test_a_second_derivative_is_not_that_of_a_kernel(ops, x):
    """The rule's own kernel has no derivative: both refuse, or give none, and neither gives a
    number.
    """
    op, by_hand = ops
    for function in (op, by_hand):
        [first] = torch.autograd.grad(function(x), x, torch.ones_like(x), create_graph=True)
        with pytest.raises(RuntimeError):
            torch.autograd.grad(first.sum(), x)
