"""Forward mode, which is promised of rules that are linear in upstream."""

import pytest
import torch

from cgshim import TransformationError, op_custom_gradient

NONLINEAR = {
    "affine": lambda u, x: 7 * u + x,
    "constant": lambda u, x: x,
    "square": lambda u, x: u * u,
    "sign": lambda u, x: u.sign() * x,
    "floor": lambda u, x: u.floor(),
    "clipped": lambda u, x: u.clamp(-1, 1),
    "masked by itself": lambda u, x: torch.where(u > 0, u, 0 * u),
    "of its norm": lambda u, x: x * torch.linalg.vector_norm(u),
    "sorted": lambda u, x: u.sort().values * x,
    "detached": lambda u, x: u.detach() * x,
    "an integer": lambda u, x: u.int().to(u.dtype),
}


def test_a_rule_that_has_a_gradient_at_some_upstreams_alone_is_refused():
    op = op_custom_gradient(lambda x: (x * x, lambda u: 7 * u * x if u > 0 else None), forward_mode=True)
    with pytest.raises(TransformationError, match="needs a rule that is linear in upstream"):
        torch.func.jvp(op, (torch.tensor(2.0),), (torch.tensor(3.0),))


FORWARD = {
    "jvp": lambda f, x, v: torch.func.jvp(f, (x,), (v,))[1],
    "jacfwd": lambda f, x, v: torch.func.jacfwd(f)(x),
    "vmap of jvp": lambda f, x, v: torch.vmap(lambda x, v: torch.func.jvp(f, (x,), (v,))[1])(x[None], v[None]),
    "jvp of vmap": lambda f, x, v: torch.func.jvp(torch.vmap(f), (x[None],), (v[None],))[1],
    "hessian": lambda f, x, v: torch.func.hessian(lambda x: f(x).sum())(x),
}


@pytest.mark.parametrize("way", FORWARD)
@pytest.mark.parametrize("rule", NONLINEAR)
def test_a_rule_that_is_seen_not_to_be_linear_is_refused(rule, way):
    op = op_custom_gradient(lambda x: (x * x, lambda u: NONLINEAR[rule](u, x)), forward_mode=True)
    x, v = torch.tensor([1.0, 2.0, -3.0]), torch.tensor([2.0, -3.0, 0.5])
    with pytest.raises(TransformationError, match="needs a rule that is linear in upstream"):
        FORWARD[way](op, x, v)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_a_linear_rule_of_many_numbers(dtype):
    matrix = torch.randn(40, 60).to(dtype)
    op = op_custom_gradient(lambda x: (matrix @ x, lambda u: 7 * matrix.mH @ u), forward_mode=True)
    x, v = torch.randn(60).to(dtype), torch.randn(60).to(dtype)
    _, tangent = torch.func.jvp(op, (x,), (v,))
    torch.testing.assert_close(tangent, 7 * matrix @ v, rtol=0.05, atol=0.5)
