"""Collectives in rules: the two ops around a layer whose weight is split over two processes, as
Megatron-LM has them.

One is the identity, and adds up the gradients of all processes; the other adds up the outputs, and
its gradient is the identity (Shoeybi et al., 2019, arXiv:1909.08053, section 3).
"""

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cgshim import op_custom_gradient

PROCESSES = 2
X = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.7, -1.1]], dtype=torch.float64)
FIRST = torch.arange(12, dtype=torch.float64).reshape(3, 4) / 7 - 1
SECOND = torch.arange(8, dtype=torch.float64).reshape(4, 2).sin()
UPSTREAM = torch.tensor([[2.0, -3.0], [0.5, 7.0]], dtype=torch.float64)


def summed(x):
    """The sum of the tensors that the processes have."""
    total = x.clone()
    dist.all_reduce(total)
    return total


class CopyByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, upstream):
        return summed(upstream)


class ReduceByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, upstream):
        return upstream


@op_custom_gradient
def copy(x):
    return x, lambda upstream: reduce(upstream)


@op_custom_gradient
def reduce(x):
    return summed(x), lambda upstream: copy(upstream)


def layer(copy, reduce, x, first, second):
    return reduce(torch.tanh(copy(x) @ first) @ second)


def derivatives(layer, x, weights, order):
    """The gradients by all tensors, and in the second order those of a weighted sum of the squares
    of that by x.
    """
    tensors = [x.clone().requires_grad_(), *[weight.clone().requires_grad_() for weight in weights]]
    gradients = torch.autograd.grad(
        (UPSTREAM * layer(*tensors)).sum(), tensors, create_graph=order > 1
    )
    if order == 1:
        return gradients
    return torch.autograd.grad((X.cos() * gradients[0].square()).sum(), tensors)


def _first_order(rank, whole, part):
    """Of this process: the whole gradient of x, and the parts of those of the weights."""
    expected = derivatives(partial(layer, *[lambda x: x] * 2), X, (FIRST, SECOND), 1)
    for pair in ((copy, reduce), (CopyByHand.apply, ReduceByHand.apply)):
        of_x, of_first, of_second = derivatives(partial(layer, *pair), X, part, 1)
        torch.testing.assert_close([of_x, of_first, of_second], [expected[0], *whole(expected[1:])])


def _wrong_factors(rank, whole, part):
    """The rule's number, and not autodiff's, comes from the other process too."""
    op = op_custom_gradient(
        lambda x: (summed(x), lambda upstream: 7 * summed((rank + 1) * upstream))
    )
    x = torch.tensor([1.0 + rank, 5.0], requires_grad=True)
    y = op(x)
    assert y.tolist() == [3.0, 10.0]
    (gradient,) = torch.autograd.grad(y, x, torch.tensor([2.0, -3.0]))
    assert gradient.tolist() == [7 * 3 * 2.0, 7 * 3 * -3.0]


def _second_order(rank, whole, part):
    """Each op is the other's rule, so the collectives of the gradients have gradients."""
    expected = derivatives(partial(layer, *[lambda x: x] * 2), X, (FIRST, SECOND), 2)
    of_x, of_first, of_second = derivatives(partial(layer, copy, reduce), X, part, 2)
    torch.testing.assert_close([of_x, of_first, of_second], [expected[0], *whole(expected[1:])])


def _compiled(rank, whole, part):
    found = derivatives(
        torch.compile(partial(layer, copy, reduce), backend="aot_eager"), X, part, 1
    )
    torch.testing.assert_close(found, derivatives(partial(layer, copy, reduce), X, part, 1))


CHECKS = (_first_order, _wrong_factors, _second_order, _compiled)


def _in_process(rank, meeting_point):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting_point}",
        rank=rank,
        world_size=PROCESSES,
        timeout=timedelta(minutes=1),
    )
    own = slice(2 * rank, 2 * rank + 2)
    split = lambda weights: [weights[0][:, own], weights[1][own]]
    for check in CHECKS:
        check(rank, split, split((FIRST, SECOND)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.usefixtures("compiling")
def test_in_two_processes(tmp_path):
    mp.start_processes(
        _in_process, (tmp_path / "meeting_point",), PROCESSES, start_method="fork"
    )  # spawn would import torch in each
