"""Autocast switched off in an op, as the cookbook does it, beside torch.amp.custom_fwd and
custom_bwd.
"""

import re
from pathlib import Path

import pytest
import torch
from torch.amp import custom_bwd, custom_fwd

from cgshim import op_custom_gradient
from cgshim_torch._versions import STAYS_IN_GRAPH

COOKBOOK = Path(__file__).parents[3] / "docs" / "cookbook.md"
UPSTREAM = torch.tensor([[2.0, -3.0], [0.5, 7.0]])
seen = []
"""the dtypes in which f and grad_fn compute, and whether autocast is on there"""


def see(y):
    if not torch.compiler.is_compiling():
        seen.append((y.dtype, torch.is_autocast_enabled("cpu")))
    return y


class ByHand(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return see(x @ w)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, upstream):
        x, w = ctx.saved_tensors
        return see(3 * upstream @ w.T), 5 * x.T @ upstream


@op_custom_gradient
def project(x, w):
    """What the cookbook shows, with 3 and 5 in the rule."""
    with torch.autocast(x.device.type, enabled=False):
        x, w = x.float(), w.float()
        y = see(x @ w)

    def grad(upstream):
        with torch.autocast(upstream.device.type, enabled=False):
            return see(3 * upstream @ w.T), 5 * x.T @ upstream

    return y, grad


@pytest.fixture
def tensors():
    seen.clear()
    return torch.randn(2, 3, requires_grad=True), torch.randn(3, 2, requires_grad=True)


def gradients(op, tensors, inside=False, order=1):
    """The gradients through a layer in bfloat16 that comes first, taken under autocast or after it."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = tensors[0] @ torch.eye(3)
        y = op(hidden, tensors[1])
    assert (hidden.dtype, y.dtype) == (torch.bfloat16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        found = torch.autograd.grad(y, tensors, UPSTREAM, create_graph=order > 1)
        return (
            found
            if order == 1
            else torch.autograd.grad(sum(g.square().sum() for g in found), tensors)
        )


@pytest.mark.parametrize("inside", [False, True])
def test_as_by_hand(tensors, inside):
    found = gradients(project, tensors, inside)
    assert seen == [(torch.float32, False)] * 2
    torch.testing.assert_close(found, gradients(ByHand.apply, tensors, inside), rtol=0.0, atol=0.0)
    assert seen == [(torch.float32, False)] * 4


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled(tensors, compiler, compiling):
    found = gradients(torch.compile(project, backend=compiler, fullgraph=STAYS_IN_GRAPH), tensors)
    torch.testing.assert_close(found, gradients(ByHand.apply, tensors), rtol=0.0, atol=0.0)


def cookbooks():
    """The op on the page itself, which is autodiff's gradient in float32."""
    names = {}
    exec(
        re.search(r"## Mixed precision.*?```python\n(.*?)```", COOKBOOK.read_text(), re.DOTALL)[1],
        names,
    )
    return names["project"]


def by_autograd(x, w):
    with torch.autocast("cpu", enabled=False):
        return x.float() @ w.float()


@pytest.mark.parametrize("order", [1, 2])
def test_the_cookbook(tensors, order):
    found = gradients(cookbooks(), tensors, order=order)
    torch.testing.assert_close(found, gradients(by_autograd, tensors, order=order))


def test_without_autocast_the_casts_leave_float32_as_it_is(tensors):
    found = torch.autograd.grad(cookbooks()(*tensors), tensors, UPSTREAM)
    torch.testing.assert_close(
        found, torch.autograd.grad(tensors[0] @ tensors[1], tensors, UPSTREAM)
    )
