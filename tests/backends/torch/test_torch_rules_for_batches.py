"""op_custom_gradient(vmap=rule): beside a Function with a vmap staticmethod, whose backward calls
another one.

The rules are wrong on purpose, by other factors than autodiff's.
"""

import numpy as np
import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils._pytree import tree_leaves

from cgshim import CustomGradientTypeError, TransformationError, op_custom_gradient
from cgshim.testing import check_gradients

X = torch.arange(6.0, dtype=torch.float64).reshape(2, 3) + 1
W = torch.tensor([2.0, -3.0], dtype=torch.float64)
U = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)


class Kernel:
    """x * x * w of a vector and a number, without batching; it counts what runs."""

    def __init__(self, **options):
        self.batches = []
        self.op = op_custom_gradient(self.one, vmap=self.many, name="kernel", **options)

    def one(self, x, w):
        return x * x * w, lambda u: (7.0 * u * 2 * x * w, 11.0 * (u * x * x).sum())

    def many(self, size, in_batched, x, w):
        self.batches.append((size, in_batched))
        x_is, w_is = in_batched
        xs, ws = x if x_is else x[None], (w if w_is else w[None])[:, None]

        def grad(u):
            of_x, of_w = 7.0 * u * 2 * xs * ws, 11.0 * (u * xs * xs).sum(-1)
            return of_x if x_is else of_x.sum(0), of_w if w_is else of_w.sum(0)

        return xs * xs * ws, grad, True


class ByHand(torch.autograd.Function):
    """The same as a Function."""

    @staticmethod
    def forward(x, w):
        return x * x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, u):
        x, w = ctx.saved_tensors
        return 7.0 * u * 2 * x * w, 11.0 * (u * x * x).sum()

    @staticmethod
    def vmap(info, in_dims, x, w):
        x_is, w_is = (dim is not None for dim in in_dims)
        x, w = (
            t if dim is None else t.movedim(dim, 0) for t, dim in zip((x, w), in_dims, strict=True)
        )
        return OfBatch.apply(x, w, x_is, w_is), 0


class OfBatch(torch.autograd.Function):
    """The Function of a batch, with a backward of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w, x_is, w_is):
        return (x if x_is else x[None]) ** 2 * (w if w_is else w[None])[:, None]

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w, *ctx.flags = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx, u):
        (x, w), (x_is, w_is) = ctx.saved_tensors, ctx.flags
        xs, ws = x if x_is else x[None], (w if w_is else w[None])[:, None]
        of_x, of_w = 7.0 * u * 2 * xs * ws, 11.0 * (u * xs * xs).sum(-1)
        return of_x if x_is else of_x.sum(0), of_w if w_is else of_w.sum(0), None, None


def weighted(f):
    return lambda x, w: (f(x, w) * U).sum()


def squared(tree):
    return sum((x * x).sum() for x in tree_leaves(tree))


def backward(f):
    """Two orders by torch.autograd."""

    def gradients(x, w):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        first = torch.autograd.grad(
            f(*leaves).sum(), leaves, create_graph=True, materialize_grads=True
        )
        return first, torch.autograd.grad(squared(first), leaves, materialize_grads=True)

    return gradients


PROGRAMS = {
    "vmap": lambda f, ax: vmap(f, ax),
    "vmap of grad": lambda f, ax: vmap(grad(weighted(f), (0, 1)), ax),
    "grad of vmap": lambda f, ax: grad(lambda x, w: squared(vmap(f, ax)(x, w)), (0, 1)),
    "backward of vmap": lambda f, ax: backward(lambda x, w: vmap(f, ax)(x, w) * U),
    "backward of vmap of grad": lambda f, ax: backward(
        lambda x, w: squared(vmap(grad(weighted(f), (0, 1)), ax)(x, w))
    ),
    "grad of vmap of grad": lambda f, ax: grad(
        lambda x, w: squared(vmap(grad(weighted(f), (0, 1)), ax)(x, w)), (0, 1)
    ),
    "vmap of grad of grad": lambda f, ax: vmap(
        grad(lambda x, w: squared(grad(weighted(f), (0, 1))(x, w)), (0, 1)), ax
    ),
    "vmap of three orders": lambda f, ax: vmap(
        grad(lambda x, w: squared(grad(lambda x, w: squared(grad(weighted(f))(x, w)))(x, w))), ax
    ),
    "grad of grad of vmap": lambda f, ax: grad(
        lambda x, w: squared(grad(lambda x, w: (vmap(f, ax)(x, w) * U).sum(), (0, 1))(x, w)), (0, 1)
    ),
    "jacrev of vmap": lambda f, ax: jacrev(vmap(f, ax), (0, 1)),
    "vmap of jacrev": lambda f, ax: vmap(jacrev(f, (0, 1)), ax),
    "vmap of jacrev of jacrev": lambda f, ax: vmap(jacrev(jacrev(f)), ax),
    "vmap of vmap": lambda f, ax: lambda x, w: vmap(lambda s: vmap(f, ax)(s * x, w))(U),
    "vmap of vmap of grad": lambda f, ax: (
        lambda x, w: vmap(lambda s: vmap(grad(weighted(f), (0, 1)), ax)(s * x, w))(U)
    ),
    "vmap of grad of vmap": lambda f, ax: (
        lambda x, w: vmap(
            lambda s: grad(lambda x, w: squared(vmap(f, ax)(s * x, w)), (0, 1))(x, w)
        )(U)
    ),
    "vmap over the last axis": lambda f, ax: (
        lambda x, w: vmap(f, tuple(None if a is None else -1 for a in ax), out_dims=-1)(
            x if ax[0] is None else x.T, w
        )
    ),
}
BATCHED = {"both": ((0, 0), X, W), "x": ((0, None), X, W[0]), "w": ((None, 0), X[0], W)}


def check_close(found, expected):
    found, expected = tree_leaves(found), tree_leaves(expected)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.detach(), b.detach())


@pytest.mark.parametrize("batched", BATCHED)
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_by_hand(program, batched):
    axes, x, w = BATCHED[batched]
    kernel = Kernel()
    found = PROGRAMS[program](kernel.op, axes)(x, w)
    check_close(found, PROGRAMS[program](ByHand.apply, axes)(x, w))
    assert kernel.batches


@pytest.mark.filterwarnings("ignore")  # Dynamo's own, of a torch.func that it leaves
def test_compiled():
    """A graph breaks at an op under torch.func: the call is as in eager mode."""
    kernel = Kernel()
    found = torch.compile(lambda x, w: vmap(kernel.op)(x, w) * 2, backend="eager")(X, W)
    check_close(found, 2 * vmap(Kernel().op)(X, W))
    assert kernel.batches == [(2, (True, True))]
    kernel = Kernel()
    torch.compile(kernel.op, backend="eager", fullgraph=True)(X[0], W[0])
    assert kernel.batches == []


FORWARD = {
    "jvp of vmap": lambda f, ax: lambda x, w: jvp(vmap(f, ax), (x, w), (x, w)),
    "vmap of jvp": lambda f, ax: vmap(lambda x, w: jvp(f, (x, w), (x, w)), ax),
    "vmap of hessian": lambda f, ax: vmap(hessian(weighted(f), (0, 1)), ax),
    "hessian of vmap": lambda f, ax: hessian(lambda x, w: squared(vmap(f, ax)(x, w))),
    "vmap of jacfwd": lambda f, ax: vmap(jacfwd(f), ax),
}


@pytest.mark.parametrize("batched", BATCHED)
@pytest.mark.parametrize("program", FORWARD)
def test_forward_mode_where_it_is_promised(program, batched):
    """As the op without a rule for batches."""
    axes, x, w = BATCHED[batched]
    plain = op_custom_gradient(Kernel().one, forward_mode=True)
    found = FORWARD[program](Kernel(forward_mode=True).op, axes)(x, w)
    check_close(found, FORWARD[program](plain, axes)(x, w))


def test_forward_mode_that_is_not_promised_is_refused():
    for program in ("jvp of vmap", "vmap of jvp"):
        with pytest.raises(
            TransformationError, match=r"^kernel: forward mode needs a rule that is"
        ):
            FORWARD[program](Kernel().op, (0, 0))(X, W)


def test_the_rule_runs_once_for_a_batch_and_its_gradient():
    kernel = Kernel()
    PROGRAMS["grad of vmap"](kernel.op, (0, None))(X, W[0])
    assert kernel.batches == [(2, (True, False))]


def test_batching_rule_of_gradients_by_unbatched_arguments():
    kernel = Kernel()
    PROGRAMS["vmap of grad"](kernel.op, (0, None))(X, W[0])
    assert kernel.batches == [(2, (True, False)), (2, (True, True))]


def _scale(weight, **declared):
    """Return an op that captures a weight, with the factor 7 in its rule for a batch."""

    def one(x):
        return weight * x, lambda u, variables: (u * weight, [(u * x).sum()])

    def many(size, in_batched, x):
        return weight * x, lambda u, variables: (7 * u * weight, [(u * x).sum()]), True

    return op_custom_gradient(one, vmap=many, name="scale", **declared)


@pytest.mark.parametrize("is_declared", [False, True])
def test_a_variable_of_a_rule_for_batches(is_declared):
    weight = torch.nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
    op = _scale(weight, variables=[weight] if is_declared else None)
    vmap(op)(X).sum().backward()
    assert weight.grad == X.sum()
    with pytest.raises(CustomGradientTypeError, match=r"scale: f must be given .* as an argument"):
        vmap(grad(lambda x: op(x).sum()))(X)


def test_vmap_of_a_part_of_the_arguments_in_a_module():
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = 5.0

        def many(self, size, in_batched, x):
            return self.factor * x, lambda u: 7 * u, True

        @op_custom_gradient(vmap=many)
        def forward(self, x):
            return self.factor * x, lambda u: 3 * u

    module = Scale()
    np.testing.assert_array_equal(vmap(module)(X), 5 * X)
    np.testing.assert_array_equal(vmap(grad(lambda x: module(x).sum()))(X), 7 * torch.ones(2, 3))
    np.testing.assert_array_equal(grad(lambda x: module(x).sum())(X), 3 * torch.ones(2, 3))


# --- From PyTorch's documentation -----------------------------------------------------------------


def to_numpy(x):
    return x.detach().numpy()


def take(x, index, inverse, dim):
    """NumpyTake of "Extending torch.func with autograd.Function", with its rule for batches."""

    def one(x, index, inverse):
        y = torch.tensor(np.take_along_axis(to_numpy(x), to_numpy(index), dim))
        return y, lambda u: (take(u, inverse, index, dim), None, None)

    def many(size, in_batched, x, index, inverse):
        x, index, inverse = (
            t if has else t.expand(size, *t.shape)
            for t, has in zip((x, index, inverse), in_batched, strict=True)
        )
        inner = dim if dim < 0 else dim + 1
        y = torch.tensor(np.take_along_axis(to_numpy(x), to_numpy(index), inner))
        x_is = in_batched[0]

        def rule(u):
            of_x = take(u, inverse, index, inner)
            return of_x if x_is else of_x.sum(0), None, None

        return y, rule, True

    return op_custom_gradient(one, vmap=many, name="take")(x, index, inverse)


def sort_of(x, dim):
    index = np.argsort(to_numpy(x), axis=dim, kind="stable")
    inverse = np.argsort(index, axis=dim, kind="stable")
    ordered = np.take_along_axis(to_numpy(x), index, axis=dim)
    return torch.tensor(ordered), torch.tensor(index), torch.tensor(inverse)


def sort(x, dim):
    """NumpySort of the same page: sorted values and two permutations."""

    def one(x):
        ordered, index, inverse = sort_of(x, dim)
        return (ordered, index, inverse), lambda u: take(u[0], inverse, index, dim)

    def many(size, in_batched, x):
        inner = dim if dim < 0 else dim + 1
        ordered, index, inverse = sort_of(x, inner)
        return (ordered, index, inverse), lambda u: take(u[0], inverse, index, inner), True

    return op_custom_gradient(one, vmap=many, name="sort")(x)


def test_numpy_sort_of_the_documentation():
    x = torch.tensor([[3.0, 1.0, 2.0], [0.5, -1.0, 7.0], [2.0, 9.0, 4.0]], dtype=torch.float64)
    for dim in (0, -1):
        found = vmap(lambda x, dim=dim: sort(x, dim)[0])(torch.stack([x, -x]))
        expected = vmap(lambda x, dim=dim: torch.sort(x, dim)[0])(torch.stack([x, -x]))
        np.testing.assert_array_equal(found, expected)
    loss = lambda f: lambda x: (f(x) ** 3 * U).sum()
    ours, theirs = (lambda x: sort(x, 0)[0]), (lambda x: torch.sort(x, 0)[0])
    # what NumPy reads may not be differentiated by torch.func further out, as in any op
    for transform in (
        lambda f: vmap(grad(loss(f))),
        lambda f: lambda x: backward(lambda x, _: vmap(loss(f))(x))(x, x.sum()),
    ):
        check_close(transform(ours)(x), transform(theirs)(x))
    check_gradients(ours, [x[0]], modes=("reverse",))  # NumPy sees no tangents


KERNELS = torch.library.Library("cgshim_tests", "DEF")
KERNELS.define("running_total(Tensor x) -> Tensor")
KERNELS.impl("running_total", lambda x: torch.tensor(np.add.accumulate(to_numpy(x), -1)), "CPU")


def test_an_operation_of_a_library_in_every_nesting():
    """The rule calls the op itself, on the batch: so a vmap around this one maps it again."""

    def one(x):
        return torch.ops.cgshim_tests.running_total(x), lambda u: total(u.flip(-1)).flip(-1)

    total = op_custom_gradient(
        one, vmap=lambda size, in_batched, x: (total(x), lambda u: total(u.flip(-1)).flip(-1), True)
    )
    loss = lambda f: lambda x: (f(x) ** 3 * U).sum()
    theirs = lambda x: torch.cumsum(x, -1)
    for transform in (
        vmap,
        lambda f: vmap(grad(loss(f))),
        lambda f: grad(lambda x: vmap(loss(f))(x).sum()),
        lambda f: grad(lambda x: squared(vmap(grad(loss(f)))(x))),
        lambda f: vmap(jacrev(grad(loss(f)))),
        lambda f: jacrev(vmap(f)),
    ):
        check_close(transform(total)(X), transform(theirs)(X))


def test_check_gradients_maps_it():
    op = op_custom_gradient(
        lambda x: (x * x, lambda u: 2 * u * x),
        vmap=lambda size, in_batched, x: (x * x, lambda u: 3 * u * x, True),
        name="square",
    )
    with pytest.raises(AssertionError) as error:
        check_gradients(op, [torch.tensor(2.0)])
    assert str(error.value) == (
        "square: over a batch of x, the gradient of x[0] must be that of calls for each element, got 12.7544 where "
        "8.50292 is expected; fix the rule for batches"
    )


# --- On the host ----------------------------------------------------------------------------------


def test_a_batch_of_a_vectorized_rule_on_the_host_is_one_call():
    runs = []

    @op_custom_gradient(host_outputs=lambda x, w: x, vectorized=True)
    def op(x, w):
        runs.append("f")

        def rule(upstream):
            runs.append("rule")
            return 7 * upstream * x * w[..., None], 11 * (upstream * x * x).sum(-1)

        return x * x * w[..., None], rule

    x, w = (
        torch.arange(30.0, dtype=torch.float64).reshape(10, 3),
        torch.tensor(2.0, dtype=torch.float64),
    )
    loss = lambda x, w: op(x, w).sum()
    of_x, of_w = 7 * x * w, 11 * (x * x).sum(-1)
    over = lambda x, w: vmap(loss, (0, None))(x, w).sum()
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    for program, expected in (
        (lambda: vmap(grad(loss, (0, 1)), (0, None))(x, w), (of_x, of_w)),
        (lambda: grad(over, (0, 1))(x, w), (of_x, of_w.sum())),
        (lambda: torch.autograd.grad(over(*leaves), leaves), (of_x, of_w.sum())),
    ):
        runs.clear()
        check_close(program(), expected)
        assert runs == ["f", "rule"]


@pytest.mark.parametrize("kept", ["the argument", "what f has made"])
def test_a_second_order_of_a_function_that_holds_nothing(kept):
    def one(x):
        return x * x, lambda u: 7.0 * u * 2 * x

    def one_with_a_residual(x):
        slope = 2 * x
        return x * x, lambda u: 7.0 * u * slope

    op = op_custom_gradient(
        one if kept == "the argument" else one_with_a_residual,
        vmap=lambda size, in_batched, x: (*one(x), True),
    )
    x = X.clone().requires_grad_()
    (of_x,) = torch.autograd.grad(op(x), x, torch.ones_like(X), create_graph=True)
    (second,) = torch.autograd.grad(of_x, x, 3 * torch.ones_like(X))
    assert torch.equal(second, torch.full_like(X, 42.0))


@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0)])
def test_mixed_partial_derivatives_of_each_element(in_dims):
    """One derivative is within the other: it may not seem to depend on what is its own."""
    op = Kernel().op
    mixed = grad(lambda x, w: grad(lambda x, w: op(x, w) @ U)(x, w) @ U, argnums=1)
    x, w = (t if dim == 0 else t[0] for t, dim in zip((X, W), in_dims, strict=True))
    expected = (14.0 * U * U * x).sum(-1).expand(2)
    torch.testing.assert_close(vmap(mixed, in_dims)(x, w), expected)


@pytest.mark.parametrize("randomness", ["different", "same", "error"])
def test_random_numbers_are_drawn_once(randomness):
    """The rule for batches draws them below the vmap, which cannot tell."""

    def one(x):
        mask = torch.randint(2, x.shape).to(x.dtype)
        return x * mask, lambda u: 7.0 * u * mask

    op = op_custom_gradient(one, vmap=lambda size, in_batched, x: (*one(x), True), name="dropout")
    x = torch.ones(4, 50)
    y, pullback = torch.func.vjp(vmap(op, randomness=randomness), x)
    torch.testing.assert_close(pullback(x)[0], 7.0 * y)


@pytest.mark.parametrize("outer", [(0, 0), (0, None), (None, 0)])
def test_a_penalty_of_the_gradients_of_a_batch_of_batches(outer):
    """The rule for batches keeps a view of w, and runs again in a backward pass without gradients."""

    def penalty(op, vmap_of):
        x = torch.arange(1.0, 25.0, dtype=torch.float64).reshape(2, 4, 3) / 8
        w = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(2, 4) / 4
        x, w = (t if dim == 0 else t[0] for t, dim in zip((x, w), outer, strict=True))
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()

        def of_w(x, w):
            y, pullback = torch.func.vjp(op, x, w)
            return pullback(y * U)[1]

        of_each = vmap_of(vmap_of(of_w, (0, 0)), outer)(x, w)
        return torch.autograd.grad(of_each.square().sum(), (x, w))

    found = penalty(Kernel().op, vmap)
    expected = penalty(op_custom_gradient(Kernel().one), vmap)
    torch.testing.assert_close(found, expected)
