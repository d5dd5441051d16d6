"""What f and grad_fn make without a tensor: on the device of the op's first tensor, and in code
that Dynamo traces.
"""

import pytest
import torch

import cgshim
from cgshim import op_convert_to_tensor, op_custom_gradient, ops
from cgshim_torch._versions import STAYS_IN_GRAPH


@op_custom_gradient
def scaled(x):
    factors = ops.arange(3) + op_convert_to_tensor([1.0, 2.0, 3.0], "float32") + ops.zeros(3)
    return x * factors, lambda upstream: 7.0 * upstream * ops.linspace(0.0, 1.0, 3)


def test_on_the_device_of_the_first_tensor():
    x = torch.ones(3, device="meta", requires_grad=True)
    y = scaled(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert (y.device, gradient.device) == (x.device, x.device)
    assert ops.zeros(3, dtype="float32").shape == (3,)


def test_numbers_of_functions_are_on_it_too():
    made = []

    @op_custom_gradient
    def op(x):
        made.extend(
            [
                ops.full(2, 1.5),
                ops.eye(2),
                ops.asarray([1, 2]),
                ops.fft.fftfreq(4),
                op_convert_to_tensor(3.0),
            ]
        )
        return x * 1.0, lambda upstream: upstream

    op(torch.ones(3, device="meta"))
    assert {y.device.type for y in made} == {"meta"}


@pytest.mark.usefixtures("compiling")
def test_in_compiled_code():
    names = []
    upstream = torch.tensor([1.0, 10.0, 100.0])

    @op_custom_gradient
    def op(x):
        names.append(cgshim.config_backend())
        return scaled(x), lambda upstream: 5.0 * upstream

    for fn, expected in ((scaled, [0.0, 35.0, 700.0]), (op, [5.0, 50.0, 500.0])):
        x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        y = torch.compile(
            lambda x, fn=fn: fn(x), backend="aot_eager", fullgraph=STAYS_IN_GRAPH and fn is scaled
        )(x)
        assert y.tolist() == [1.0, 6.0, 15.0]
        assert torch.autograd.grad(y, x, upstream)[0].tolist() == expected
    assert set(names) == {"torch"}
