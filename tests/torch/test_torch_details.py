"""Details that only PyTorch has, each of which a small mistake would change unseen."""

import pytest
import torch

from cgshim import TransformationError, op_custom_gradient


def leaf(*numbers):
    return torch.tensor(numbers, requires_grad=True)


def test_another_run_that_reads_another_parameter_is_refused():
    """Though its values are the same, the derivative would go to the wrong one."""
    parameters = [torch.nn.Parameter(torch.tensor(5.0)) for _ in range(2)]
    runs = []

    @op_custom_gradient(name="op")
    def op(x):
        runs.append(len(runs))
        product = parameters[runs[-1] % 2] * x
        return product * x, lambda u, variables: (u * 3 * product, [u * 7 * product])

    x = torch.tensor(2.0, requires_grad=True)
    (first,) = torch.autograd.grad(op(x), x, create_graph=True)
    with pytest.raises(TransformationError, match=r"^op: .*, got those of other variables; read the same ones"):
        torch.autograd.grad(first, x)


def test_another_run_that_writes_leaves_the_argument_as_it_is():
    runs = []

    @op_custom_gradient(name="op")
    def op(x, constant):
        runs.append(len(runs))
        square = x * x
        if len(runs) == 2:
            constant.mul_(2)
        return square * 1, lambda u: (u * 7 * square, None)

    x, constant = leaf(2.0, 3.0), torch.tensor([4.0, 5.0])
    (first,) = torch.autograd.grad(op(x, constant).sum(), x, create_graph=True)
    with pytest.raises(TransformationError, match="one that changes its arguments in place"):
        torch.autograd.grad(first.sum(), x)
    assert constant.tolist() == [4.0, 5.0]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_second_order_of_a_sparse_argument(layout):
    @op_custom_gradient
    def op(x):
        square = x.to_dense() ** 2
        return square.sum(), lambda u: u * 7 * square

    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    x = dense.to_sparse(layout=layout).requires_grad_()
    (first,) = torch.autograd.grad(op(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second.to_dense(), 14 * dense)


@pytest.mark.parametrize(
    ("decorated", "message"),
    [
        ({"once_differentiable": True}, "torch.compile would lose that a gradient is once_differentiable"),
    ],
    ids=["once_differentiable"],
)
def test_why_a_graph_breaks(decorated, message):
    op = op_custom_gradient(lambda x: (x * x, lambda u: u * 7), **decorated)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        torch.compile(op, backend="eager", fullgraph=True)(leaf(2.0))


def test_forward_mode_where_there_are_no_numbers():
    op = op_custom_gradient(lambda x: (x * x, lambda u: u * 7 * x), forward_mode=True)
    x = torch.zeros(0, 3)
    _, tangent = torch.func.jvp(op, (x,), (x,))
    assert tangent.shape == (0, 3)


def test_forward_mode_of_a_sparse_gradient():
    op = op_custom_gradient(lambda x: (2 * x, lambda u: (7 * u).to_sparse()), forward_mode=True)
    x, v = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 10.0])
    torch.testing.assert_close(torch.func.jvp(op, (x,), (v,)), (2 * x, 7 * v))
