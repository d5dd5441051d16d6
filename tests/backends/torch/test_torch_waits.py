"""A host that reads a number of a tensor waits for the GPU: an op makes it read none."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cgshim import op_custom_gradient, op_sum_to_shape, ops

pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11

READS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::_unique2"}
UPSTREAM = torch.tensor([[2.0, -3.0], [0.5, 7.0]])


@op_custom_gradient
def keeps_arguments(x, w):
    return x**3 * w, lambda u: (u * 15 * x**2 * w, op_sum_to_shape(u * 7 * x**3, w))


@op_custom_gradient
def takes_arguments(x, w):
    return ops.power(x, 3) * w, lambda x, w, upstream: (upstream * 15 * x**2 * w, None)


@op_custom_gradient
def keeps_the_output(x, w):
    y = torch.exp(x) * w
    return y, lambda u: (5 * u * y, op_sum_to_shape(7 * u * y / w, w))


@op_custom_gradient(once_differentiable=True)
def keeps_more(x, w):
    square = x * x
    return square * x * w, lambda u: (15 * u * square * w, op_sum_to_shape(7 * u * square * x, w))


def derivatives(op, order):
    """Those of x, then those by x of the sum of their squares, and so on."""
    x = torch.tensor([[0.5, -2.0], [3.0, 1.0]], requires_grad=True)
    w = torch.tensor([2.0, -5.0], requires_grad=True)
    (found,) = torch.autograd.grad(op(x, w), x, UPSTREAM, create_graph=order > 1)
    for at in range(2, order + 1):
        (found,) = torch.autograd.grad(found.square().sum(), x, create_graph=at < order)
    return found


def reads_in(function, *args):
    """The operations by which a call reads numbers, but for its first run."""
    function(*args)
    with profile(activities=[ProfilerActivity.CPU]) as record:
        function(*args)
    return [event.name for event in record.events() if event.name in READS]


@pytest.mark.parametrize(
    ("op", "orders"),
    [(keeps_arguments, 3), (takes_arguments, 3), (keeps_the_output, 3), (keeps_more, 1)],
    ids=["arguments", "arguments again", "the output", "more"],
)
def test_no_number_is_read(op, orders):
    for order in range(1, orders + 1):
        assert reads_in(derivatives, op, order) == []
