"""What a rule keeps, and the derivative of the gradient that follows, beside functions written by
hand.
"""

import functools
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

from cgshim import TransformationError, op_custom_gradient, op_vjp


def leaf(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def derivatives(fn, x, order=3):
    """fn's value and its derivatives, summed each, of which the next is the derivative."""
    found = [fn(x)]
    for _ in range(order):
        found += torch.autograd.grad(found[-1].sum(), x, create_graph=True)
    return [y.detach() for y in found]


# --- A kept output --------------------------------------------------------------------------------


class Exponential(torch.autograd.Function):
    """By hand: exp(x), in NumPy, with 5 times the derivative."""

    @staticmethod
    def forward(ctx, x):
        y = torch.from_numpy(np.exp(x.detach().numpy()))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, upstream):
        (y,) = ctx.saved_tensors
        return upstream * 5 * y


def _rule_of_default(y):
    def rule(upstream, y=y):
        return upstream * 5 * y

    return lambda upstream: rule(upstream)


KEPT = {
    "directly": lambda y: lambda u: u * 5 * y,
    "in a list": lambda y: functools.partial(lambda kept, u: u * 5 * kept[0], [y]),
    "in a dict": lambda y: (lambda kept: lambda u: u * 5 * kept["y"])({"y": y}),
    "in a partial": lambda y: functools.partial(lambda y, u: u * 5 * y, y),
    "in an inner function": lambda y: (lambda times: lambda u: times(u) * 5)(lambda u: u * y),
    "in a default argument": _rule_of_default,
}


def exponential(keep, **options):
    return op_custom_gradient(
        lambda x: (lambda y: (y, keep(y)))(torch.from_numpy(np.exp(x.numpy()))), **options
    )


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_a_kept_output_is_the_ops_output(keep):
    x = leaf(0.5, -1.0)
    torch.testing.assert_close(derivatives(exponential(keep), x), derivatives(Exponential.apply, x))
    torch.testing.assert_close(derivatives(exponential(keep), x)[3], 125 * x.detach().exp())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_kept_output_under_a_checkpoint(use_reentrant):
    op = exponential(KEPT["directly"])
    x, by_hand = leaf(0.5), leaf(0.5)
    for function, at in ((op, x), (Exponential.apply, by_hand)):
        checkpoint(
            lambda at, function=function: function(at * 3), at, use_reentrant=use_reentrant
        ).sum().backward()
    assert torch.equal(x.grad, by_hand.grad)
    if not use_reentrant:  # which has no second order at all
        through = lambda function: lambda x: checkpoint(function, x, use_reentrant=False)
        torch.testing.assert_close(
            derivatives(through(op), x, 2), derivatives(through(Exponential.apply), x, 2)
        )


def _packed(function, x):
    """What hooks on saved tensors are given and give back, and the derivatives."""
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor.detach().clone())
        return tensor.detach().numpy(force=True)

    def unpack(array):
        unpacked.append(array.tolist())
        return torch.from_numpy(array)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return derivatives(function, x, 2), packed, unpacked


def test_hooks_see_what_they_see_of_a_function_by_hand():
    ours, by_hand = (
        _packed(f, leaf(0.5, 2.0)) for f in (exponential(KEPT["directly"]), Exponential.apply)
    )
    torch.testing.assert_close(ours, by_hand)


USED = {
    "both": lambda y, z, mask: y * z,
    "the other one": lambda y, z, mask: z * y.detach() * mask,
    "the kept one": lambda y, z, mask: y * mask,
}


@pytest.mark.parametrize("used", USED.values(), ids=USED)
def test_one_of_several_outputs_is_kept(used):
    @op_custom_gradient
    def both(x):
        y = torch.from_numpy(np.exp(x.numpy()))
        return (y, 3 * x, y > 1), lambda u, v, _: u * 5 * y + 7 * v

    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(y)
            return y, 3 * x, y > 1

        @staticmethod
        def backward(ctx, u, v, _):
            return u * 5 * ctx.saved_tensors[0] + 7 * v

    ours, by_hand = (
        derivatives(lambda x, f=f: used(*f(x)), leaf(0.5, 2.0)) for f in (both, ByHand.apply)
    )
    torch.testing.assert_close(ours, by_hand)


def test_gradcheck_and_gradgradcheck_of_kept_outputs():
    @op_custom_gradient
    def eigh(a):
        """A symmetric eigenproblem, by NumPy."""
        values, vectors = map(torch.from_numpy, np.linalg.eigh(a.numpy()))

        def rule(u, v):
            gaps = values[None] - values[:, None]
            gaps = torch.where(gaps == 0, torch.inf, gaps)
            inner = vectors.T @ v / gaps
            gradient = vectors @ (torch.diag(u) + inner) @ vectors.T
            return (gradient + gradient.T) / 2

        return (values, vectors), rule

    def fn(a):
        values, vectors = eigh((a + a.T) / 2)
        return values, vectors.abs()

    a = torch.tensor(
        [[1.0, 0.3, 0.2], [0.3, 3.0, -0.4], [0.2, -0.4, 7.0]],
        dtype=torch.float64,
        requires_grad=True,
    )
    assert gradcheck(fn, a)
    assert gradgradcheck(fn, a)


def test_a_change_of_a_kept_output_raises():
    x = leaf(0.5)
    y = exponential(KEPT["directly"])(x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_retained_graphs_and_double_use():
    op, x = exponential(KEPT["directly"]), leaf(0.5)
    y = op(x)
    first = [torch.autograd.grad(y.sum(), x, create_graph=True)[0] for _ in range(2)]
    seconds = [
        torch.autograd.grad(g.sum(), x, retain_graph=True)[0] for g in first for _ in range(2)
    ]
    torch.testing.assert_close(seconds, [25 * x.detach().exp()] * 4)


def test_a_rule_may_take_its_output_to_numpy():
    op = op_custom_gradient(
        lambda x: (lambda y: (y, lambda u: u * 7 * torch.from_numpy(y.numpy())))(x.exp())
    )
    x = leaf(0.5)
    op(x).sum().backward()
    torch.testing.assert_close(x.grad, 7 * x.detach().exp())


LEVELS = {
    "grad": lambda f: torch.vmap(torch.func.grad(f)),
    "grad of grad": lambda f: torch.vmap(torch.func.grad(torch.func.grad(f))),
    "grad of grad of grad": lambda f: torch.vmap(
        torch.func.grad(torch.func.grad(torch.func.grad(f)))
    ),
    "grad of vmap": lambda f: torch.func.grad(lambda x: torch.vmap(f)(x).sum()),
    "jacrev of jacrev": lambda f: (
        lambda x: torch.einsum("iii->i", torch.func.jacrev(torch.func.jacrev(f))(x))
    ),
    "hessian": lambda f: lambda x: torch.einsum("iii->i", torch.func.hessian(f)(x)),
    "jacfwd of jacfwd": lambda f: (
        lambda x: torch.einsum("iii->i", torch.func.jacfwd(torch.func.jacfwd(f))(x))
    ),
    "jacrev of jacfwd": lambda f: (
        lambda x: torch.einsum("iii->i", torch.func.jacrev(torch.func.jacfwd(f))(x))
    ),
}


@pytest.mark.parametrize("level", LEVELS)
def test_a_kept_output_at_each_level(level):
    y = op_custom_gradient(
        lambda x: (lambda y: (y, lambda u: u * 5 * y))(x.detach().exp()), forward_mode=True
    )
    x, order = (
        torch.tensor([0.5, -1.0], dtype=torch.float64),
        {"grad": 1, "grad of grad of grad": 3, "grad of vmap": 1},
    )
    torch.testing.assert_close(LEVELS[level](y)(x), 5.0 ** order.get(level, 2) * x.exp())


# --- f runs once, or again when it has to ---------------------------------------------------------


def counting(f):
    """An op, and a list that grows with each run of f: where another run does not find it, and so
    not put it back.
    """
    runs = []
    hidden = iter(lambda: runs.append(1), 1)
    return op_custom_gradient(lambda x: (next(hidden), f(x))[1]), runs


ONCE = {
    "arguments": lambda x: (x * x * x, lambda u: u * 5 * x * x),
    "the rule is called with them": lambda x: (
        x * x * x,
        lambda *args, upstream: upstream * 5 * args[0] ** 2,
    ),
    "outputs": lambda x: (lambda y: (y, lambda u: u * y))(x * x),
    "integers": lambda x: (lambda mask: (x * mask, lambda u: u * 5 * mask))(x > 0),
}


@pytest.mark.parametrize("f", ONCE.values(), ids=ONCE)
def test_f_is_not_run_again(f):
    op, runs = counting(f)
    derivatives(lambda x: op(x) * x**3, leaf(2.0, -3.0))
    assert len(runs) == 1


def test_a_second_run_comes_when_it_is_asked_for():
    op, runs = counting(lambda x: (lambda square: (square * x, lambda u: u * 5 * square))(x * x))
    x = leaf(2.0)
    (first,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    assert len(runs) == 1
    assert torch.autograd.grad(first.sum(), x)[0].item() == 20
    assert len(runs) == 2


GENERATOR = torch.Generator().manual_seed(3)
RANDOM = {
    "torch": lambda x: torch.rand_like(x),
    "NumPy": lambda x: torch.as_tensor(np.random.rand(*x.shape)).to(x.dtype),
    "Python": lambda x: torch.full_like(x, random.random()),
    "a torch.Generator": lambda x: torch.rand(x.shape, generator=GENERATOR).to(x.dtype),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("draw", RANDOM.values(), ids=RANDOM)
def test_random_residuals_have_only_a_first_derivative(draw, dtype):
    @op_custom_gradient
    def noisy(x):
        noise = draw(x)
        return x * noise, lambda u: u * noise

    x = torch.ones(8, dtype=dtype, requires_grad=True)
    y = noisy(x)
    plain, differentiable = (
        torch.autograd.grad(y.sum(), x, create_graph=more, retain_graph=True)[0] for more in (0, 1)
    )
    assert torch.equal(plain, differentiable)
    assert torch.equal(plain, y / x)
    with pytest.raises(TransformationError, match="another run of f"):
        torch.autograd.grad((differentiable * x).sum(), x)


CALLS: list[int] = []


def _other_setting(x):
    CALLS.append(1)
    square = x * x * len(CALLS)
    return square * 1, lambda u: u * 7 * square


def _fewer(x):
    CALLS.append(1)
    kept = [x * x, x * 2] if len(CALLS) == 1 else [x * x]
    return x * 1, lambda u: u * 7 * sum(kept)


@pytest.mark.parametrize("f", [_other_setting, _fewer])
def test_another_run_with_other_residuals_raises(f):
    CALLS.clear()
    hidden = leaf(1.0, 2.0)
    x = hidden * 1
    y = op_custom_gradient(f)(x)
    plain, first = (
        torch.autograd.grad(y.sum(), x, create_graph=more, retain_graph=True)[0] for more in (0, 1)
    )
    assert torch.equal(plain, first)
    with pytest.raises(TransformationError, match="another run of f"):
        torch.autograd.grad(first.sum(), x)


SHOWN = {
    "transposed": lambda x: x.T,
    "every second": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(4, 4),
    "as it is": lambda x: x,
}


@pytest.mark.parametrize("show", SHOWN.values(), ids=SHOWN)
def test_an_input_that_lies_otherwise_in_memory(show):
    """A contiguous copy is a residual; in another run, of a contiguous input, it would be the
    argument.
    """
    op = op_custom_gradient(lambda x: (lambda c: (c * c, lambda u: 7 * u * c))(x.contiguous()))
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    found = derivatives(lambda x: op(show(x)), x, 2)[1:]
    torch.testing.assert_close(found, derivatives(lambda x: 7 / 2 * show(x) ** 2, x, 2)[1:])


def test_a_parameter_that_is_kept_needs_no_other_run():
    weight = torch.nn.Parameter(torch.tensor(3.0))
    op, runs = counting(
        lambda x: (x * weight, lambda u, variables: (7 * u * weight, [5 * (u * x).sum()]))
    )
    x = leaf(2.0, dtype=torch.float32)
    (first,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    assert (torch.autograd.grad(first.sum(), weight)[0].item(), len(runs)) == (7, 1)


def test_a_residual_of_a_parameter():
    weight = torch.nn.Parameter(torch.tensor(3.0))

    @op_custom_gradient
    def op(x):
        product = x * x * weight
        return product.sum(), lambda u, variables: (7 * u * product, [None])

    x = leaf(2.0)
    (first,) = torch.autograd.grad(op(x), x, create_graph=True)
    of_x, of_weight = torch.autograd.grad(first.sum(), (x, weight), create_graph=True)
    assert (of_x.item(), of_weight.item()) == (7 * 2 * 2 * 3, 7 * 4)
    assert torch.autograd.grad(of_x.sum(), weight)[0].item() == 7 * 4


@pytest.mark.parametrize("vectorize", [False, True])
def test_hessians_of_torch_autograd(vectorize):
    op = op_custom_gradient(
        lambda x: (lambda square: ((square * x).sum(), lambda u: u * 5 * square))(x * x)
    )
    x = torch.tensor([2.0, -3.0])
    hessian = torch.autograd.functional.hessian(op, x, vectorize=vectorize)
    assert hessian.tolist() == [[20, 0], [0, -30]]


def test_autocast_is_the_same_in_another_run():
    @op_custom_gradient
    def op(x):
        product = x @ x
        assert product.dtype is torch.bfloat16
        return product.float(), lambda u: u * 7 * product

    x = torch.eye(2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = op(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.autograd.grad(first.sum(), x)[0].any()


def test_threads_do_not_disturb_each_other():
    op = op_custom_gradient(
        lambda x: (lambda square: (square * x, lambda u: u * 5 * square))(x * x)
    )
    found = {}

    def work(n):
        found[n] = derivatives(op, leaf(float(n)), 2)[2].item()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: 10 * n for n in range(8)}


class Box:
    def __init__(self, tensor):
        self.tensor = tensor


@op_custom_gradient
def cube_with_a_box(x):
    box = Box(x * x)
    return x * x * x, lambda u: u * 5 * box.tensor


def test_a_residual_in_an_object_has_only_a_first_derivative():
    x = leaf(2.0)
    y = cube_with_a_box(x)
    plain, first = (
        torch.autograd.grad(y.sum(), x, retain_graph=True, create_graph=more)[0]
        for more in (False, True)
    )
    assert (plain.item(), first.item()) == (20, 20)
    with pytest.raises(TransformationError, match="keeps in an object"):
        torch.autograd.grad(first.sum(), x)


def test_a_residual_in_an_object_under_torch_func():
    at = torch.tensor(2.0)
    assert torch.func.grad(cube_with_a_box)(at) == 20
    with pytest.raises(TransformationError, match="keeps in an object"):
        torch.func.grad(torch.func.grad(cube_with_a_box))(at)
    assert torch.vmap(cube_with_a_box)(torch.ones(3)).tolist() == [1, 1, 1]
    with pytest.raises(TransformationError, match="keeps in an object"):
        torch.func.grad(lambda x: torch.vmap(cube_with_a_box)(x).sum())(torch.ones(3))


def test_a_residual_in_an_object_and_batched_upstreams():
    """torch records no Function under is_grads_batched, so the error comes at once."""
    x = leaf(2.0, 3.0)
    with pytest.raises(TransformationError, match="keeps in an object"):
        torch.autograd.grad(
            cube_with_a_box(x), x, torch.eye(2), is_grads_batched=True, create_graph=True
        )


TABLE = [torch.tensor([3.0, 5.0], dtype=torch.float64)]


def test_a_global_table_is_a_constant_of_the_rule():
    op, x = op_custom_gradient(lambda x: (x * x, lambda u: 7 * u * x * TABLE[0])), leaf(2.0, 3.0)
    (first,) = torch.autograd.grad(op(x), x, torch.tensor([1.0, 10.0]), create_graph=True)
    assert first.tolist() == [42, 1050]
    assert torch.autograd.grad(first.sum(), x)[0].tolist() == [21, 350]


class Scaled:
    """An object that holds a number, which its op's rule reads."""

    def __init__(self):
        self.scale = 5.0

    @op_custom_gradient
    def cube(self, x):
        return x**3, lambda u: u * self.scale * x**2


def test_a_rule_reads_a_number_of_its_object():
    for _ in range(2):
        _, first, second, third = derivatives(Scaled().cube, leaf(2.0, 3.0))
        assert first.tolist() == [20, 45]
        assert second.tolist() == [20, 30]
        assert third.tolist() == [10, 10]


class Layer(torch.nn.Module):
    """Its method counts and logs its calls, and its rule reads a number of the layer, which has
    tensors of its own.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.log, self.scale = 0, [], 5.0
        self.weight = torch.nn.Parameter(torch.tensor(2.0))
        self.register_buffer("mean", torch.tensor(3.0))

    @op_custom_gradient
    def counting(self, x):
        self.calls += 1
        self.log.append(float(x.detach().sum()))
        squares = []
        for each in x:
            squares.append(each * each)
        square = torch.stack(squares)
        return square * x, lambda u: u * self.scale * square


def test_a_layer_that_counts_its_calls_hides_nothing():
    x = leaf(2.0, 3.0)
    _, first, second, third = derivatives(Layer().counting, x)
    torch.testing.assert_close(first, 5 * x.detach() ** 2)
    torch.testing.assert_close(second, 10 * x.detach())
    torch.testing.assert_close(third, torch.full_like(x, 10.0))


def test_a_configuration_that_raises_what_it_likes_for_a_name():
    class Items(dict):
        __getattr__ = dict.__getitem__

    config = Items(scale=5.0)

    @op_custom_gradient
    def cube(x):
        square = x * x
        return square * x, lambda u: u * config.scale * square

    assert [y.item() for y in derivatives(cube, leaf(2.0))] == [8.0, 20.0, 20.0, 10.0]


# --- A pullback that f has made -------------------------------------------------------------------


def with_pullback(g_of, at=lambda x: x, rule=lambda pullback, u, x: 5 * pullback(u)[0]):
    """The same op twice: its rule keeps the pullback of g at a tensor, or makes it itself."""

    @op_custom_gradient
    def kept(x):
        y, pullback = op_vjp(g_of(x), at(x))
        return y, lambda u: rule(pullback, u, x)

    @op_custom_gradient
    def made(x):
        return g_of(x)(at(x)), lambda u: rule(op_vjp(g_of(x), at(x))[1], u, x)

    return kept, made


cube_by_7 = op_custom_gradient(lambda x: (x**3, lambda u: 7 * u * x**2))
its_pullback_is_kept, _ = with_pullback(lambda x: lambda z: z**4)
PULLBACKS = {
    "at an argument": with_pullback(lambda x: lambda z: z**3),
    "that reads another residual": with_pullback(
        lambda x: functools.partial(lambda a, z: z**2 * a, x.sin())
    ),
    "at a residual": with_pullback(
        lambda x: lambda z: z**2 * x, torch.sin, lambda pullback, u, x: 5 * pullback(u)[0] * x
    ),
    "of an op": with_pullback(lambda x: lambda z: cube_by_7(z) * z),
    "of an op that keeps one": with_pullback(lambda x: its_pullback_is_kept),
    "in another of the rule": with_pullback(
        lambda x: lambda z: z**3,
        rule=lambda pullback, u, x: op_vjp(lambda t: pullback(t)[0] * t, u)[1](x)[0],
    ),
    "twice": with_pullback(
        lambda x: lambda z: z**3, rule=lambda pullback, u, x: 5 * pullback(pullback(u)[0])[0]
    ),
}


@pytest.mark.parametrize("ops", PULLBACKS.values(), ids=PULLBACKS)
def test_a_pullback_that_a_rule_keeps_has_every_order(ops):
    x, weights = leaf(1.5, 2.5), torch.tensor([3.0, 0.5])
    kept, made = [derivatives(lambda x, op=op: weights * op(x), x) for op in ops]
    torch.testing.assert_close(kept, made)


RANDOM_FACTORS = {
    "of torch": lambda z: z * torch.rand(2, dtype=torch.float64),
    "of Python": lambda z: z * random.random(),
}


@pytest.mark.parametrize("g", RANDOM_FACTORS.values(), ids=RANDOM_FACTORS)
def test_a_kept_pullback_of_a_random_function(g):
    x, u = leaf(1.5, 2.5), torch.tensor([1.0, 10.0], dtype=torch.float64)
    y = with_pullback(lambda x: g)[0](x)
    (of_x,) = torch.autograd.grad(y, x, u, retain_graph=True)
    torch.testing.assert_close(of_x, 5 * u * y / x)
    with pytest.raises(TransformationError, match="another run of f"):
        torch.autograd.grad(y, x, u, create_graph=True)


def test_random_numbers_of_a_rule_that_is_not_differentiated():
    op = op_custom_gradient(
        lambda x: (lambda noise: (2 * x, lambda u: u * noise * x))(torch.rand_like(x))
    )
    x = leaf(1.0, 2.0)
    y, state = op(x), torch.get_rng_state()
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True, retain_graph=True)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, torch.autograd.grad(y.sum(), x)[0])


def test_an_f_that_fails_on_differentiated_arguments():
    op = op_custom_gradient(
        lambda x: (lambda kept: (2 * x, lambda u: 5 * u * kept))(torch.as_tensor(x.numpy()).sin())
    )
    x = leaf(0.5)
    (first,) = torch.autograd.grad(op(x), x, create_graph=True)
    torch.testing.assert_close(first, 5 * x.detach().sin())
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.autograd.grad(first, x)


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


RULES_WITH_FUNC = {
    "a vmap that closes over it": lambda u, r: vmap(lambda u: (u * r.s).sum())(u[:, None]),
    "a vmap of other tensors": lambda u, r: vmap(lambda u, v: u * v * r.k)(u, u + 1) * r.s,
    "a vmap of a Function": lambda u, r: vmap(lambda u: Product.apply(u, r.s))(u).sum(0),
    "a gradient": lambda u, r: u * grad(lambda z: (z.sin() * r.k).sum())(u + r.s),
    "a gradient at it": lambda u, r: u * grad(lambda z: (z.sin() * r.k).sum())(r.s * 1),
    "a tangent": lambda u, r: jvp(lambda z: z**2 * r.s, (r.s,), (u,))[1],
    "a vmap of gradients": lambda u, r: vmap(grad(lambda z: z**3))(u) * r.s,
}


class Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, y):
        return x * y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, u):
        x, y = ctx.saved_tensors
        return 3 * u * y, 5 * u * x


@pytest.mark.parametrize("rule", RULES_WITH_FUNC)
def test_torch_func_in_a_rule_reads_residuals(rule):

    def op(is_kept):
        @op_custom_gradient
        def f(x):
            def residuals():
                return SimpleNamespace(k=3.0, s=x.sin())

            kept = residuals() if is_kept else None
            return 2 * x, lambda u: RULES_WITH_FUNC[rule](u, kept or residuals())

        return f

    def second(f):
        x = torch.tensor([0.7, 1.9], dtype=torch.float64, requires_grad=True)
        weights = torch.tensor([1.0, 3.0])
        (gradient,) = torch.autograd.grad((f(x) * weights).sum(), x, create_graph=True)
        return torch.autograd.grad((gradient * (weights + 1)).sum(), x)

    torch.testing.assert_close(second(op(True)), second(op(False)))


# --- Variables on which an argument depends, too --------------------------------------------------


class CellByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.exp(0.3 * x * w) + x

    @staticmethod
    def backward(ctx, u):
        x, w = ctx.saved_tensors
        residual = torch.exp(0.3 * x * w)
        return 3 * u * residual, 5 * u * residual * x


def _cell(w):
    @op_custom_gradient
    def cell(x):
        residual = torch.exp(0.3 * x * w)
        return residual + x, lambda u, variables: (3 * u * residual, [5 * u * residual * x])

    return cell


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize(
    "use",
    [
        lambda cell, w: cell(w + 1),
        lambda cell, w: cell(w * w),
        lambda cell, w: cell(0.1 * cell(0.1 * cell(torch.ones_like(w)))),
    ],
)
def test_an_argument_depends_on_a_variable_that_f_reads(use, order):
    """As in a recurrent cell: what comes to the variable through the argument comes once."""
    w = torch.tensor([1.2, 0.7, -0.4], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)

    def derivative(cell):
        result = use(cell, w)
        for at in range(order):
            is_last = at == order - 1
            (result,) = torch.autograd.grad(
                (weights * result).sum() + result.square().sum(), w, create_graph=not is_last
            )
        return result

    found, expected = map(derivative, (_cell(w), lambda x: CellByHand.apply(x, w)))
    torch.testing.assert_close(found, expected)


def test_a_second_order_by_a_variable_leaves_the_argument():
    w = torch.tensor([1.2, 0.7], dtype=torch.float64, requires_grad=True)
    visits = []
    x = w.exp()
    x.register_hook(lambda gradient: visits.append(gradient))
    y = _cell(w)(x)
    (gradient,) = torch.autograd.grad(y.sum(), w, create_graph=True)
    visits.clear()
    torch.autograd.grad(gradient.sum(), w)
    assert all(visit.any() for visit in visits)


@pytest.mark.parametrize("kind", ["kept", "a pullback"])
@pytest.mark.parametrize("order", [1, 2])
def test_a_derivative_within_a_checkpoint(kind, order):
    """A checkpoint ends what it recomputes by an exception, also within another run of f."""

    @op_custom_gradient
    def op(x):
        residual = x.exp() * x
        y, pullback = op_vjp(lambda x: x * x.exp(), x)
        if kind == "a pullback":
            return y, lambda u: 7 * pullback(u)[0]
        return y, lambda u: 7 * u * residual

    @op_custom_gradient
    def computed(x):
        slope = (lambda x: x.exp() * (1 + x)) if kind == "a pullback" else (lambda x: x.exp() * x)
        return x.exp() * x, lambda u: 7 * u * slope(x)

    def derivative(f):
        def within(x):
            y = f(x).sin()
            for _ in range(order):
                (y,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            return y

        x = torch.tensor([0.7, -0.4], dtype=torch.float64, requires_grad=True)
        y = checkpoint(within, x, use_reentrant=False)
        return y.detach(), torch.autograd.grad(y.square().sum(), x)[0]

    torch.testing.assert_close(derivative(op), derivative(computed))
