"""Outputs that show an argument, or each other: beside functions written by hand."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cgshim import CustomGradientTypeError, op_custom_gradient, op_custom_jvp


class Sub(torch.Tensor):
    pass


class SubSub(Sub):
    pass


def numbers(*shape, dtype=torch.float32):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)


def jagged():
    return torch.nested.nested_tensor([torch.ones(2, 3), 2 * torch.ones(4, 3)], layout=torch.jagged)


def dense(x):
    if x.is_nested:
        return x.values() if x.layout is torch.jagged else x.to_padded_tensor(0.0)
    return x if x.layout is torch.strided else x.to_dense()


def by_hand(show):
    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.detach().clone())
            return show(x)

        @staticmethod
        def backward(ctx, upstream):
            return rule(*ctx.saved_tensors, upstream)

    return ByHand.apply


def ours(show):
    def f(x):
        before = x.clone()
        return show(x), lambda upstream: rule(before, upstream)

    return op_custom_gradient(f)


def rule(x, upstream):
    total = dense(upstream).sum()
    return x * 7 * (total if x.is_complex() else total.real if total.is_complex() else total)


def _looks(y):
    """What there is to see of a tensor."""
    lies = (
        (y.stride(), y.storage_offset()) if y.layout is torch.strided and not y.is_nested else None
    )
    values = None if y.is_meta else dense(y.detach()).resolve_conj().resolve_neg().tolist()
    return type(y), y.dtype, y.layout, lies, y.is_conj(), y.is_neg(), y.requires_grad, values


def _seen(function, make):
    """What an output looks like, and the gradient of its input."""
    leaf = make().requires_grad_()
    y = function(leaf.clone())
    looks = _looks(y)
    if not y.requires_grad:
        return looks, None
    (3 * dense(y)).abs().sum().backward()
    return looks, None if leaf.grad.is_meta else dense(leaf.grad).tolist()


COMPLEX = lambda: numbers(2, 3, dtype=torch.complex64) * (2 - 1j)
MATRIX = lambda: numbers(3, 4)
SHOWN = {
    "conj": (COMPLEX, torch.conj),
    "a part of the real part": (COMPLEX, lambda x: x.real[1:]),
    "imag": (COMPLEX, torch.imag),
    "view_as_real": (COMPLEX, torch.view_as_real),
    "conj of imag": (COMPLEX, lambda x: x.conj().imag),
    "negative": (MATRIX, torch._neg_view),
    "bits": (MATRIX, lambda x: x.view(torch.int32)),
    "another float": (MATRIX, lambda x: x.view(torch.float64)),
    "all but the first": (MATRIX, lambda x: x[1:]),
    "a column": (MATRIX, lambda x: x[:, 2]),
    "diagonal": (MATRIX, torch.diagonal),
    "unfold": (MATRIX, lambda x: x.unfold(1, 2, 1)),
    "expand": (MATRIX, lambda x: x.expand(2, 3, 4)),
    "as_strided": (MATRIX, lambda x: x.as_strided((2, 2), (1, 2), 3)),
    "reshape": (MATRIX, lambda x: x.reshape(6, 2)),
    "values of COO": (
        lambda: torch.diag(numbers(3)).to_sparse().coalesce(),
        lambda x: x.coalesce().values(),
    ),
    "values of CSR": (lambda: torch.diag(numbers(3)).to_sparse_csr(), lambda x: x.values()),
    "values of a jagged tensor": (jagged, lambda x: x.values()),
    "a jagged tensor transposed": (jagged, lambda x: x.transpose(1, 2)),
    "a subclass of a subclass": (lambda: MATRIX().as_subclass(SubSub), lambda x: x[1:]),
    "as a subclass": (MATRIX, lambda x: x.as_subclass(SubSub)),
    "out of a subclass": (
        lambda: MATRIX().as_subclass(SubSub),
        lambda x: x.as_subclass(torch.Tensor),
    ),
    "itself": (MATRIX, lambda x: x),
    "a subclass itself": (lambda: MATRIX().as_subclass(SubSub), lambda x: x),
    "on no device": (lambda: torch.empty(3, 4, device="meta"), lambda x: x[1:]),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize(("make", "show"), SHOWN.values(), ids=SHOWN)
def test_a_view_of_the_input_is_that_of_a_function_by_hand(make, show):
    assert _seen(ours(show), make) == _seen(by_hand(show), make)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize(("make", "show"), SHOWN.values(), ids=SHOWN)
def test_a_view_of_the_input_is_guarded_as_one(make, show):
    def change(function):
        y = function(make().requires_grad_().clone())
        try:
            y.mul_(3)
        except RuntimeError as error:
            return "is a view and is being modified inplace" in str(error)
        return "changed"

    assert change(ours(show)) == change(by_hand(show))


TURNED = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "as_strided_": lambda x: x.as_strided_((2, 2), (1, 2), 3),
    "and a view of it": lambda x: x.t_()[1:],
}


@pytest.mark.parametrize("turn", TURNED.values(), ids=TURNED)
@pytest.mark.parametrize("differentiated", [True, False])
def test_an_argument_that_f_turns_in_place_is_refused(turn, differentiated):
    """By hand the caller's own argument is turned; f gets an alias of it."""
    op = op_custom_gradient(lambda x, y: (turn(x) * y.sum(), lambda u: (None, None)), name="turned")
    x, y = MATRIX(), torch.ones(2, requires_grad=True)
    with pytest.raises(CustomGradientTypeError, match="turned: f must not write into arguments"):
        op(x.requires_grad_(differentiated).clone(), y)


# --- Outputs that show each other -----------------------------------------------------------------

SEVERAL = {
    "a view of the other": lambda x: (lambda y: (y, y[1:]))(x * 2),
    "a view before the other": lambda x: (lambda y: (y[1:], y))(x * 2),
    "two views of what is not returned": lambda x: (lambda y: (y[:2], y[1:]))(x * 2),
    "two views of the input": lambda x: (x[:2], x[1:]),
    "the input and a view": lambda x: (x, x[1:]),
    "the input twice": lambda x: (x, x),
}


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, show):
        ctx.save_for_backward(torch.ones_like(x))
        return show(x)

    @staticmethod
    def backward(ctx, u, v):
        return ctx.saved_tensors[0] * (7 * u.sum() + 11 * v.sum()), None


@op_custom_gradient
def both(x, show):
    ones = torch.ones_like(x)
    return show(x), lambda u, v: (ones * (7 * u.sum() + 11 * v.sum()), None)


def _of_several(function, show, changed):
    """The outputs and the gradient, where one of the outputs is changed in place; the words of a
    refusal.
    """
    leaf = MATRIX().requires_grad_()
    try:
        outputs = function(leaf.clone(), show)
        if changed is not None:
            outputs[changed].mul_(3)
        (2 * outputs[0].sum() + 5 * outputs[1].sum()).backward()
    except RuntimeError as error:
        return str(error).partition("is a view")[2]
    return [y.tolist() for y in outputs], leaf.grad.tolist()


@pytest.mark.parametrize("changed", [None, 0, 1])
@pytest.mark.parametrize("show", SEVERAL.values(), ids=SEVERAL)
def test_outputs_that_share_memory_are_as_by_hand(show, changed):
    of_ours = _of_several(both, show, changed)
    assert of_ours == _of_several(Both.apply, show, changed)
    assert isinstance(of_ours, str) == (changed is not None)


@pytest.mark.parametrize("changed", [None, 0, 1])
def test_an_output_that_is_returned_twice(changed):
    """By hand it is one tensor, with the second upstream for both; here each has its own memory."""
    found = _of_several(both, lambda x: (lambda y: (y, y))(x * 2), changed)
    first, second = 3 if changed == 0 else 1, 3 if changed == 1 else 1
    assert found[1] == torch.full((3, 4), 12.0 * (7 * 2 * first + 11 * 5 * second)).tolist()


BUFFER = torch.ones(3, 4)


@pytest.mark.parametrize("show", [lambda b: b, lambda b: b[1:]])
def test_an_output_that_shows_a_buffer_leaves_it_unconnected(show):
    op = op_custom_gradient(lambda x: (show(BUFFER), lambda u: torch.full_like(x, 7) * u.sum()))
    x = MATRIX().requires_grad_()
    y = op(x)
    (2 * y).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 14.0 * y.numel()))
    assert not BUFFER.requires_grad


def test_an_output_that_is_held_is_another_tensor():
    """A Function by hand makes of what it returns a tensor of the graph, and whoever holds it has
    that too.
    """
    held = []

    def f(x):
        held.append(x * 2)
        return held[-1], lambda u: 7 * u

    x = MATRIX().requires_grad_()
    assert op_custom_gradient(f)(x).requires_grad
    assert not held[0].requires_grad


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "show", [lambda x: x[1:], lambda x: x.t(), lambda x: x, lambda x: x * 2, lambda x: x.t()[1:]]
)
def test_a_distributed_tensor(mesh, show):
    def seen(function):
        leaf = DTensor.from_local(MATRIX(), mesh, [Replicate()]).requires_grad_()
        y = function(leaf.clone())
        (3 * y).sum().backward()
        return type(y), y.placements, y.full_tensor().tolist(), leaf.grad.full_tensor().tolist()

    assert seen(ours(show)) == seen(by_hand(show))


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)])
def test_a_jvp_rule_of_a_distributed_tensor(mesh, placement):
    """The transpose is taken at tensors like the arguments: distributed ones."""
    op = op_custom_jvp(lambda x: (x * x, lambda dx: 7 * dx * x))
    leaf = distribute_tensor(MATRIX(), mesh, [placement]).requires_grad_()
    (3 * op(leaf)).sum().backward()
    by_func = torch.func.grad(lambda x: (3 * op(x)).sum())(leaf.detach())
    assert leaf.grad.placements == by_func.placements == (placement,)
    for gradient in leaf.grad, by_func:
        torch.testing.assert_close(gradient.full_tensor(), 21 * MATRIX())


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)])
def test_a_second_order_of_a_distributed_tensor(mesh, placement):
    """Another run of f makes the same tensors, and each has its mesh, which is no tensor."""

    def f(x):
        square = torch.square(x)
        return square * x, lambda u: 7 * u * square

    leaf = distribute_tensor(MATRIX(), mesh, [placement]).requires_grad_()
    y = op_custom_gradient(f)(leaf)
    (of_leaf,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad((3 * of_leaf).sum(), leaf)
    torch.testing.assert_close(second.full_tensor(), 42 * MATRIX())
