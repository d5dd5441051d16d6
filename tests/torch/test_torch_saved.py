"""What a call saves, and what it shows of its input."""

import pytest
import torch

from cgshim import op_custom_gradient


def leaf(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def _saved_bytes(op, x):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        op(x)
    return sum(saved)


def test_what_is_saved():
    x = torch.ones(1000, requires_grad=True)
    relu = op_custom_gradient(lambda x: (x.relu(), lambda u: u))
    masked = op_custom_gradient(lambda x: (lambda mask: (x * mask, lambda u: 7 * u * mask))(x > 0))
    squared = op_custom_gradient(lambda x: (lambda square: (x * square, lambda u: 7 * u * square))(x * x))
    assert [_saved_bytes(op, x) for op in (relu, masked, squared)] == [0, 1000, 8000]


def test_an_input_that_nobody_needs_may_change():
    op = op_custom_gradient(lambda x: (x * 2, lambda u: 7 * u))
    x = leaf(1.0, 2.0)
    hidden = x * 1
    y = op(hidden)
    hidden.add_(1)
    y.sum().backward()
    assert x.grad.tolist() == [7, 7]


@pytest.mark.parametrize("show", [torch.conj, torch.real, torch.imag, torch.Tensor.t])
def test_an_output_that_shows_the_input_in_another_way(show):
    op = op_custom_gradient(lambda z: (show(z), lambda u: torch.full_like(z, 7)))
    z = torch.tensor([[1 + 2j, 3 - 4j]], requires_grad=True)
    y = op(z * 1)
    assert torch.equal(y.resolve_conj(), show(z.detach()).resolve_conj())
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        y.mul_(3)
    y.sum().abs().backward()
    assert torch.equal(z.grad, torch.full_like(z, 7).detach())
