"""needs_input_grad on PyTorch: what ctx.needs_input_grad of a Function by hand would say, at each
level.

The rule is wrong on purpose, and by another number for each way in which it is asked.
"""

from contextvars import ContextVar

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from cgshim import op_custom_gradient
from cgshim_torch._versions import STAYS_IN_GRAPH

X, W = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])


def _product(x, w, *, needs_input_grad):
    """x * w, with 100 more if f may need the gradient of x, and 200 if that of w; and a factor that
    says the same.
    """
    by_f = 100 * needs_input_grad[0] + 200 * needs_input_grad[1]

    def rule(upstream, needs_input_grad):
        of_x, of_w = needs_input_grad
        factor = 7 + 10 * of_x + 20 * of_w
        return factor * upstream * w if of_x else None, factor * upstream * x if of_w else None

    return x * w + by_f, rule


product = op_custom_gradient(_product)


def leaf(tensor):
    return tensor.clone().requires_grad_()


def told_f(output):
    """What f was told, as its output says it."""
    said = round(float((output.detach() - X * W)[..., 0].max()) / 100)
    return bool(said & 1), bool(said & 2)


def gradients(op, x, w):
    """What f was told, and the gradients of those that require one."""
    output = op(x, w)
    return told_f(output), torch.autograd.grad(output.sum(), [t for t in (x, w) if t.requires_grad])


def check(found, told, *expected):
    assert found[0] == told
    torch.testing.assert_close(found[1], expected)


@pytest.fixture(params=[None, "aot_eager"], ids=["called", "aot_eager"])
def op(request, compiling):
    if request.param is None:
        return product
    return torch.compile(
        lambda x, w: product(x, w), backend=request.param, fullgraph=STAYS_IN_GRAPH
    )


def test_what_requires_grad_is_needed(op):
    check(gradients(op, leaf(X), W), (True, False), 17 * W)
    check(gradients(op, X, leaf(W)), (False, True), 27 * X)
    check(gradients(op, leaf(X), leaf(W)), (True, True), 37 * W, 37 * X)


def test_an_undifferentiated_call_needs_nothing(op):
    assert told_f(op(X, W)) == (False, False)
    with torch.no_grad():
        assert told_f(op(leaf(X), leaf(W))) == (False, False)
    with torch.inference_mode():
        assert told_f(op(leaf(X), leaf(W))) == (False, False)


@pytest.mark.parametrize("compiler", [None, "eager"])
def test_each_of_five_arguments(compiler, compiling):
    @op_custom_gradient
    def total(a, b, c, d, e):
        def rule(upstream, needs_input_grad):
            return [
                7 * at * upstream if needed else None
                for at, needed in enumerate(needs_input_grad, 1)
            ]

        return a + b + c + d + e, rule

    function = lambda *args: total(*args)
    if compiler is not None:
        function = torch.compile(function, backend=compiler, fullgraph=STAYS_IN_GRAPH)
    args = [X, leaf(X), W, leaf(W), leaf(W)]
    found = torch.autograd.grad(
        function(*args), [args[at] for at in (1, 3, 4)], torch.tensor([2.0, -3.0])
    )
    torch.testing.assert_close(found, tuple(7 * at * torch.tensor([2.0, -3.0]) for at in (2, 4, 5)))


def test_what_is_detached_in_compiled_code_is_not_needed(compiling):
    function = lambda x, w: product((2 * x).detach(), 3 * w)
    between = torch.compile(function, backend="aot_eager", fullgraph=STAYS_IN_GRAPH)
    x, w = leaf(X), leaf(W)
    (found,) = torch.autograd.grad(between(x, w).sum(), w)
    torch.testing.assert_close(found, 27 * 3 * 2 * X)


def test_a_graph_that_is_kept_gives_any_gradient_later():
    x, w = leaf(X), leaf(W)
    output = product(x, w).sum()
    for tensor, expected in ((x, 37 * W), (w, 37 * X), (x, 37 * W)):
        (found,) = torch.autograd.grad(output, tensor, retain_graph=True)
        torch.testing.assert_close(found, expected)


def test_as_a_function_by_hand_is_told():
    seen = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, upstream):
            seen.append(ctx.needs_input_grad)
            x, w = ctx.saved_tensors
            return upstream * w, upstream * x

    def rule_of(x, w):
        def rule(upstream, needs_input_grad):
            seen.append(needs_input_grad)
            return upstream * w, upstream * x

        return x * w, rule

    for op in (Product.apply, op_custom_gradient(rule_of)):
        for x, w in ((leaf(X), W), (X, leaf(W)), (leaf(X), leaf(W)), (2 * leaf(X), leaf(W))):
            output = op(x, w).sum()
            asked = [t for t in (x, w) if t.requires_grad]
            torch.autograd.grad(output, asked[:1], retain_graph=True)
            output.backward(inputs=asked[-1:], retain_graph=True)
    by_hand, ours = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert by_hand == ours
    assert set(ours) == {(True, False), (False, True), (True, True)}


# --- The transformations of torch.func ------------------------------------------------------------


def loss(x, w):
    return product(x, w).sum()


FUNC = {
    "grad by x": (lambda: grad(loss)(X, W), 17 * W),
    "grad by w": (lambda: grad(loss, 1)(X, W), 27 * X),
    "grad by both": (lambda: torch.stack(grad(loss, (0, 1))(X, W)), torch.stack([37 * W, 37 * X])),
    "vjp of both": (
        lambda: torch.stack(vjp(product, X, W)[1](torch.ones(2))),
        torch.stack([37 * W, 37 * X]),
    ),
    "vmap of grad": (lambda: vmap(grad(loss, 1))(X, W), 27 * X),
    "grad of vmap": (lambda: grad(lambda w: vmap(product)(X, w).sum())(W), 27 * X),
    "grad of vmap over one": (
        lambda: grad(lambda w: vmap(product, (None, 0))(X[0], w).sum())(W),
        27 * X[:1].expand(2),
    ),
    "jacrev": (lambda: jacrev(loss)(X, W), 17 * W),
    "w further in than x": (
        lambda: grad(lambda x: grad(lambda w: loss(x, w))(W).sum())(X),
        torch.full((2,), 27.0),
    ),
    "x further in than w": (
        lambda: grad(lambda w: grad(lambda x: loss(x, w))(X).sum())(W),
        torch.full((2,), 17.0),
    ),
    "vmap in autograd": (
        lambda: torch.autograd.grad(vmap(product)(x := leaf(X), W).sum(), x)[0],
        17 * W,
    ),
}


@pytest.mark.parametrize(("take", "expected"), FUNC.values(), ids=FUNC)
def test_each_level_of_torch_func_asks_for_its_own(take, expected):
    torch.testing.assert_close(take(), expected)


def test_forward_mode_asks_for_all():
    linear = op_custom_gradient(_product, forward_mode=True)
    output, found = jvp(lambda x: linear(x, W), (X,), (torch.tensor([2.0, -3.0]),))
    assert told_f(output) == (True, True)
    torch.testing.assert_close(found, 37 * W * torch.tensor([2.0, -3.0]))


def test_an_upstream_that_depends_on_both_at_every_level():
    """The numbers of nested transformations are those of an op that leaves nothing out."""

    def told(x, w):
        def rule(upstream, needs_input_grad):
            of_x, of_w = needs_input_grad
            return 7 * upstream * w * x if of_x else None, 11 * upstream * x * w if of_w else None

        return (x * w).sin(), rule

    def untold(x, w):
        return (x * w).sin(), lambda upstream: (7 * upstream * w * x, 11 * upstream * x * w)

    def each(f):
        op = op_custom_gradient(f, forward_mode=True)
        of = lambda x, w: (op(x, w) ** 2).sum()
        yield grad(lambda x: grad(of, 1)(x, W).sum())(X)
        yield grad(lambda w: grad(of, 0)(X, w).sum())(W)
        yield jacrev(jacrev(of), 1)(X, W)
        yield hessian(of, 1)(X, W)
        yield vmap(jacrev(grad(of, 1)), (0, None))(torch.stack([X, W]), W)
        yield jvp(grad(of), (X, W), (W, X))[1]
        x, w = leaf(X), leaf(W)
        (first,) = torch.autograd.grad(of(x, w), x, create_graph=True)
        yield from torch.autograd.grad((first * w).sum(), (x, w))

    for ours, expected in zip(each(told), each(untold), strict=True):
        torch.testing.assert_close(ours, expected)


# --- What runs f again, or another thing than f ---------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_asks_for_the_same_when_it_runs_f_again(use_reentrant):
    x = leaf(X)
    output = checkpoint(product, x, W, use_reentrant=use_reentrant)
    # a reentrant one runs f without gradients first
    assert told_f(output) == (not use_reentrant, False)
    output.sum().backward()
    torch.testing.assert_close(x.grad, 17 * W)


def test_another_run_of_f_is_told_what_the_first_one_was():
    told = ContextVar("told")  # a list would be put back after the other run

    @op_custom_gradient
    def op(x, w, *, needs_input_grad):
        assert told.get(needs_input_grad) == needs_input_grad
        told.set(needs_input_grad)
        slope = 2 * x * w
        return x * x * w, lambda upstream: (upstream * slope, None)

    x = leaf(X)
    (first,) = torch.autograd.grad(op(x, W).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 2 * W)
    assert told.get() == (True, False)


def test_a_parameter_that_another_tensor_stands_for():
    layer = torch.nn.Module()
    layer.w = torch.nn.Parameter(W.clone())
    layer.forward = lambda x: product(x, layer.w)
    torch.testing.assert_close(grad(lambda w: functional_call(layer, {"w": w}, X).sum())(W), 27 * X)
    layer.w.requires_grad_(False)
    check(gradients(lambda x, w: layer(x), leaf(X), W), (True, False), 17 * W)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated")
def test_a_graph_of_f_alone_needs_nothing():
    class Layer(torch.nn.Module):
        def forward(self, x, w):
            return product(x, w)

    assert told_f(torch.export.export(Layer(), (X, W), strict=False).module()(X, W)) == (
        False,
        False,
    )
    traced = torch.jit.trace(product, (X, W))
    assert told_f(traced(X, W)) == (False, False)


def test_a_graph_of_the_gradient_has_what_it_needs_alone():
    graph = make_fx(lambda x, w: torch.autograd.grad(product(x.requires_grad_(), w).sum(), x)[0])(
        X.clone(), W
    )
    torch.testing.assert_close(graph(X.clone(), W), 17 * W)


def test_an_op_that_fx_has_recorded_is_told_when_the_graph_runs():
    graph = torch.fx.symbolic_trace(lambda x, w: product(x, w))
    check(gradients(graph, leaf(X), W), (True, False), 17 * W)
