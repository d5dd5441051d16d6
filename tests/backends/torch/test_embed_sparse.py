"""Sparse tensors as x and gx of op_embed_gradient, as optimal transport passes them."""

import pytest
import torch

from cgshim import op_embed_gradient

COST = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
PLAN = torch.tensor([[0.0, 5.0], [7.0, 0.0]])


@pytest.mark.parametrize(
    "fx", [torch.tensor(11.0), torch.tensor([[1.0, 10.0], [100.0, 1000.0]])], ids=["loss", "each"]
)
@pytest.mark.parametrize(
    "sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr], ids=["coo", "csr"]
)
# torch 2.13 says so of every one (2026-11)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_x_and_gx(fx, sparse):
    x = sparse(COST).requires_grad_()
    upstream = 3.0 + torch.arange(4.0).reshape(2, 2) if fx.ndim else torch.tensor(3.0)
    value = op_embed_gradient(fx, sparse(PLAN), x)
    (value * upstream).sum().backward()
    torch.testing.assert_close(value, fx)
    assert x.grad.layout == x.layout
    torch.testing.assert_close(x.grad.to_dense(), PLAN * upstream)


def test_sparse_gx_of_a_dense_x():
    x = COST.clone().requires_grad_()
    (3.0 * op_embed_gradient(11.0, PLAN.to_sparse(), x)).backward()
    torch.testing.assert_close(x.grad.to_dense(), 3.0 * PLAN)
