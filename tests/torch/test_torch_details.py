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
def test_why_a_graph_breaks(decorated, message, refuses_whole_graph):
    op = op_custom_gradient(lambda x: (x * x, lambda u: u * 7), **decorated)
    with refuses_whole_graph(message):
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


def test_a_rule_that_writes_to_what_f_has_made_is_told_so():
    """As autograd tells one that writes to what it has saved, the second time."""

    @op_custom_gradient
    def op(x):
        factor = torch.full((2,), 7.0)

        def grad(u):
            gradient = u * factor
            factor.mul_(3)
            return gradient

        return x * 1, grad

    x = leaf(2.0, 3.0)
    y = op(x).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    torch.testing.assert_close(first, torch.tensor([7.0, 7.0]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_rule_runs_under_autocast_as_f_did():
    """In bfloat16, which shows in the third digit."""
    w = torch.tensor([[1.001, 2.003], [3.007, 4.001]])
    op = op_custom_gradient(lambda x: (x * 1, lambda u: u @ w))

    def gradient(function):
        x = torch.ones(2, 2, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = function(x)
        return torch.autograd.grad(y.sum(), x)[0]

    found = gradient(torch.compile(op, backend="eager"))
    torch.testing.assert_close(found, gradient(op), rtol=0.0, atol=0.0)
    assert not torch.equal(found, torch.ones(2, 2) @ w)


def test_a_kept_output_is_a_constant_where_no_second_order_is_recorded():
    """As it was in f: a rule may differentiate from there on by itself."""
    seen = []

    @op_custom_gradient
    def op(x):
        y = x * x

        def grad(u):
            seen.append(y.requires_grad)
            return u * 7 * y

        return y, grad

    x = leaf(2.0, 3.0)
    (found,) = torch.autograd.grad(op(x).sum(), x)
    torch.testing.assert_close(found, 7 * (x * x).detach())
    assert seen == [False]
