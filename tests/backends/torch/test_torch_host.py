"""op_host on PyTorch: eager tensors, torch.func, torch.compile, graphs. Rules are wrong on purpose,
by a factor.
"""

import functools
import importlib
import itertools
import re
import subprocess
import sys
import threading

import numpy as np
import optree
import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import cgshim_torch._host as names
from cgshim import (
    BackendError,
    CustomGradientTypeError,
    Spec,
    TransformationError,
    op_custom_gradient,
    op_host,
    use_backend,
)
from cgshim_torch._versions import STAYS_IN_GRAPH

X = torch.tensor([0.5, -1.25, 3.0])
W = torch.tensor([2.0, 5.0])
UP = torch.tensor([1.0, -2.0, 3.0])
COMPILERS = ["eager", "aot_eager"]
REFUSED = (
    "total: what runs on the host has no derivative of its own, got a derivative of its result; "
    "call it within op_custom_gradient, and write the rule with ops that have one"
)
CALLS = itertools.count()


def calls():
    """Return how many calls on the host there have been since this was asked before."""
    global CALLS
    number, CALLS = next(CALLS), itertools.count()
    return number


@op_custom_gradient(host_outputs=lambda tree: tree["a"])
def minus(tree):
    first, second = tree.values()
    return first - second, lambda u: {key: (7 * u, -5 * u)[at] for at, key in enumerate(tree)}


@pytest.fixture(autouse=True)
def _counted_from_zero():
    calls()


@op_host(outputs=lambda x, w, **_: x)
def total(x, w, *, scale=1.0, **_):
    next(CALLS)
    return scale * np.cumsum(x) * w.sum()


@op_host(outputs=lambda u, x: (u, Spec(x.shape, "float64")), vectorized=True)
def sines(u, x):
    next(CALLS)
    return 3.0 * np.sin(u), x[..., ::-1].astype("float64")


@op_host(outputs=lambda u: u)
def adjoint(u):
    next(CALLS)
    return np.cumsum(u[::-1])[::-1] * 7.0


@op_host(outputs=lambda x: x)
def failing(x):
    raise ZeroDivisionError(f"a singular matrix of {x.size}")


@op_custom_gradient
def op(x, w):
    """A kept host result, and ops in the rule; the factors 7 and 11 are in the rule alone."""
    y = total(x, w, scale=2.0)
    return y, lambda upstream: (adjoint(upstream), 11.0 * (upstream * y).sum() * w)


@op_custom_gradient
def keeping(x, w):
    y = total(x, w)
    return 3.0 * y, lambda upstream: (5.0 * upstream * y, 13.0 * upstream.sum() * w)


def value(x, w, scale=1.0):
    return scale * torch.cumsum(x, -1) * w.sum(-1, keepdim=True)


def gradients(x, w, u):
    of_x = torch.cumsum(u.flip(-1), -1).flip(-1) * 7.0
    return of_x, 11.0 * (u * value(x, w, 2.0)).sum(-1, keepdim=True) * w


def leaf(x):
    return x.clone().requires_grad_()


close = torch.testing.assert_close


# --- Eager ----------------------------------------------------------------------------------------


def test_f_and_its_result_share_memory_with_the_tensors():
    seen, made = [], []

    @op_host(outputs=lambda x: x)
    def double(x):
        seen.append(x)
        y = 2.0 * x
        made.append(y.__array_interface__["data"][0])
        return y

    x = torch.arange(6.0)
    for given in (x, leaf(x), x[3:]):
        result = double(given)
        assert seen[-1].__array_interface__["data"][0] == given.data_ptr()
        assert not seen[-1].flags.writeable
        assert result.data_ptr() == made[-1]
        close(result.detach(), 2 * given.detach())
        result.detach().add_(1.0)  # it is the caller's own


def test_a_call_does_not_ask_for_dynamo(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "cgshim_torch._compile.calls", None
    )  # importing it takes a second
    close(total(X, W), value(X, W))


def test_a_result_that_f_has_locked_is_copied():
    @op_host(outputs=lambda x: x)
    def locked(x):
        y = 2.0 * x
        y.flags.writeable = False
        return y

    close(locked(X).add_(1.0), 2 * X + 1)


@pytest.mark.parametrize(
    "given",
    [torch.arange(6.0).reshape(2, 3).mT, torch.arange(6.0)[::2], torch.tensor([1 + 2j, 3j]).conj(),
     torch.tensor([1 + 2j, 3j]).conj().imag, torch.tensor(2.0).expand(3), torch.tensor(3.5), torch.zeros(0, 2),
     torch.eye(2).to_sparse(), torch.tensor([True, False]), torch.tensor([1, -2], dtype=torch.int8),
     torch.tensor([1.5, 2.0], dtype=torch.float16), torch.nn.Parameter(torch.ones(2))],
)  # fmt: skip
def test_any_tensor_goes_to_the_host(given):
    @op_host(outputs=lambda x: x)
    def conjugate(x):
        assert x.flags.c_contiguous
        return np.conj(x) if x.dtype.kind == "c" else x

    found = conjugate(given)
    dense = given.detach().to_dense() if given.is_sparse else given.detach()
    close(found.detach(), dense.conj().resolve_conj().resolve_neg().contiguous())


def test_bfloat16_is_float32_on_the_host():
    seen = []

    @op_host(outputs=lambda x: x)
    def third(x):
        seen.append(x.dtype)
        return x / 3

    x = torch.tensor([1.0, 2.5], dtype=torch.bfloat16)
    expected = (x.float() / 3).bfloat16()
    close(third(x), expected)
    close(vmap(third)(x), expected)
    close(make_fx(third)(x)(x), expected)
    assert set(seen) == {np.dtype("float32")}


def test_a_declared_dtype_has_the_meaning_that_it_has_in_numpy():
    for declared, expected in (
        ("int", torch.int64),
        ("float", torch.float64),
        ("half", torch.float16),
    ):
        op = op_host(
            lambda x: x, outputs=lambda x, declared=declared: Spec(x.shape, declared), name="kept"
        )
        assert op(X).dtype is expected
        assert make_fx(op)(X)(X).dtype is expected


def test_no_tensor_among_the_arguments():
    count = op_host(
        lambda *, n: np.arange(n, dtype="f"),
        outputs=lambda *, n: Spec((n,), "float32"),
        name="count",
    )
    with use_backend("torch"):
        close(count(n=3), torch.tensor([0.0, 1.0, 2.0]))


def test_a_dtype_that_torch_has_not_is_refused():
    text = op_host(lambda x: x, outputs=lambda x: Spec(x.shape, "longdouble"), name="text")
    with pytest.raises(CustomGradientTypeError) as error:
        text(X)
    assert str(error.value) == (
        "op_host: outputs must declare dtypes that torch has, got longdouble; declare another one"
    )


def test_results_without_values_have_declared_shapes():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        assert total(torch.empty(4), torch.empty(2)).shape == (4,)
    fake = total(mode.from_tensor(X), mode.from_tensor(W))
    assert type(fake) is type(mode.from_tensor(X))
    meta = total(X.to("meta"), leaf(W.to("meta")))
    assert meta.is_meta
    assert meta.shape == (3,)
    assert calls() == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_grad_modes_and_autocast(mode):
    with mode(), torch.autocast("cpu"):
        found = total(leaf(X), W)
        assert found.dtype is torch.float32
        close(found.detach(), value(X, W))
        assert found.is_inference() is torch.is_inference_mode_enabled()


def test_the_rule_of_an_op_on_the_host():
    x, w = leaf(X), leaf(W)
    y = op(x, w)
    close(y.detach(), value(X, W, 2.0))
    assert calls() == 1
    close(torch.autograd.grad(y, (x, w), UP), gradients(X, W, UP))
    assert calls() == 1


# --- The derivative -------------------------------------------------------------------------------


def test_only_a_derivative_that_is_taken_is_refused():
    x = leaf(X)
    y = total(x, W)
    assert y.requires_grad
    close(torch.autograd.grad((x * y.detach()).sum(), x)[0], value(X, W))
    close(torch.autograd.grad((x * x).sum() + 0 * total(x, W).detach().sum(), x)[0], 2 * X)
    with pytest.raises(TransformationError) as error:
        torch.autograd.grad(y.sum(), x)
    assert str(error.value) == REFUSED


def test_an_upstream_of_none_is_not_a_derivative():
    @op_custom_gradient
    def first(x, y):
        return x * 3, lambda upstream: (5 * upstream, None)

    class First(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return 3 * x

        @staticmethod
        def backward(ctx, upstream):
            return 5 * upstream, None

    for function in (First.apply, lambda x, y: first(x, y.detach())):
        x = leaf(X)
        close(torch.autograd.grad(function(x, total(x, W)), x, UP)[0], 5 * UP)


def test_the_second_derivative_through_the_output_is_the_rule():
    x, w = leaf(X), leaf(W)
    _, of_w = torch.autograd.grad(op(x, w), (x, w), UP, create_graph=True)
    close(torch.autograd.grad(of_w.sum(), x)[0], gradients(X, W, 11 * UP * W.sum())[0])


def test_the_second_derivative_through_a_kept_result_is_refused():
    x, w = leaf(X), leaf(W)
    of_x, of_w = torch.autograd.grad(keeping(x, w), (x, w), UP, create_graph=True)
    close(of_x.detach(), 5 * UP * value(X, W))
    close(torch.autograd.grad(of_w.sum(), w, retain_graph=True)[0], 13 * UP.sum() * torch.ones(2))
    with pytest.raises(TransformationError) as error:
        torch.autograd.grad(of_x.sum(), x)
    assert str(error.value) == REFUSED


TRANSFORMED = {
    "grad": lambda: grad(lambda x: (x * total(x, W)).sum())(X),
    "grad of a product with zero": lambda: grad(lambda x: (0 * total(x, W)).sum())(X),
    "jacrev": lambda: jacrev(total)(X, W),
    "vmap of grad": lambda: vmap(grad(lambda x: (x * total(x, W)).sum()))(X[None]),
    "grad of vmap": lambda: grad(lambda x: vmap(total, (0, None))(x[None], W).sum())(X),
    "jvp": lambda: jvp(total, (X, W), (X, W)),
    "jacfwd": lambda: jacfwd(total)(X, W),
    "hessian": lambda: hessian(lambda x: (x * total(x, W)).sum())(X),
    "the outer of two levels": lambda: grad(
        lambda x: grad(lambda y: (y * total(x, W)).sum())(X).sum()
    )(X),
    "both levels": lambda: grad(lambda x: grad(lambda x: (keeping(x, W) * UP).sum())(x).sum())(X),
}


@pytest.mark.parametrize("transformed", TRANSFORMED)
def test_the_derivative_is_refused_at_every_level(transformed):
    with pytest.raises(TransformationError) as error:
        TRANSFORMED[transformed]()
    assert str(error.value) == REFUSED


@op_host(outputs=lambda x: (x, Spec((), "int64"), Spec(x.shape, "complex128")))
def exp(x):
    return np.exp(x), 3, 1j * x


@functools.partial(op_custom_gradient, forward_mode=True)
def kept_output(x):
    """exp(x), where every derivative is 7 times the last one."""
    y, _, _ = exp(x)
    return y, lambda upstream: 7.0 * upstream * y


@functools.partial(op_custom_gradient, forward_mode=True)
def kept_result(x):
    y, _, z = exp(x)
    return 3.0 * y + z.imag.float(), lambda upstream: 7.0 * upstream * y


E, V, XS = X.exp(), torch.tensor([2.0, -1.0, 4.0]), torch.stack([X, 2 * X])
PUSHED = {
    "jvp": (lambda op: jvp(op, (X,), (V,))[1], 7 * E * V),
    "jacfwd": (lambda op: jacfwd(op)(X), torch.diag(7 * E)),
    "vmap of jvp": (lambda op: vmap(lambda x: jvp(op, (x,), (V,))[1])(XS), 7 * XS.exp() * V),
    "jvp of vmap": (lambda op: jvp(vmap(op), (X,), (V,))[1], 7 * E * V),
    "gradient of the tangent": (
        lambda op: grad(lambda v: (UP * jvp(op, (X,), (v,))[1]).sum())(V),
        7 * E * UP,
    ),
}
TWICE = {
    "hessian": (lambda op: hessian(lambda x: (UP * op(x)).sum())(X), torch.diag(49 * E * UP)),
    "jvp of jvp": (lambda op: jvp(lambda x: jvp(op, (x,), (V,))[1], (X,), (UP,))[1], 49 * E * V * UP),
    "jvp of vmap of jvp": (
        lambda op: jvp(vmap(lambda x: jvp(op, (x,), (UP[1],))[1]), (X,), (V,))[1], 49 * E * V * UP[1]
    ),
    "jvp of jacrev": (lambda op: jvp(jacrev(op), (X,), (V,))[1], torch.diag(49 * E * V)),
    "jacrev of jacfwd": (lambda op: jacrev(jacfwd(lambda x: (UP * op(x)).sum()))(X), torch.diag(49 * E * UP)),
}  # fmt: skip


@pytest.mark.parametrize("pushed", PUSHED)
def test_forward_mode_of_an_op_needs_no_tangent_of_the_host(pushed):
    push, expected = PUSHED[pushed]
    for op in (kept_output, kept_result):
        close(push(op), expected)


@pytest.mark.parametrize("pushed", TWICE)
def test_the_tangent_of_a_kept_result_is_refused(pushed):
    push, expected = TWICE[pushed]
    close(push(kept_output), expected)
    with pytest.raises(TransformationError) as error:
        push(kept_result)
    assert str(error.value) == REFUSED.replace("total", "exp")


def test_dual_numbers():
    with forward_ad.dual_level():
        x = forward_ad.make_dual(leaf(X), V)
        for op in (kept_output, kept_result):
            close(forward_ad.unpack_dual(op(x)).tangent, 7 * E * V)
        gradient = torch.autograd.grad(kept_output(x), x, UP, create_graph=True)[0]
        close(forward_ad.unpack_dual(gradient).tangent, 49 * E * V * UP)
        for refused in (
            lambda: torch.autograd.grad(kept_result(x), x, UP, create_graph=True),
            lambda: exp(x),
        ):
            with pytest.raises(TransformationError) as error:
                refused()
            assert str(error.value) == REFUSED.replace("total", "exp")


def test_f_that_differentiates_the_host_itself_is_refused():
    def dual(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(exp(forward_ad.make_dual(X, V))[0]).tangent

    for taken in (lambda x: jvp(exp, (x,), (V,))[1][0], dual):
        f = op_custom_gradient(
            lambda x, taken=taken: (taken(x), lambda upstream: upstream), forward_mode=True
        )
        for transformed in (lambda f=f: f(X), lambda f=f: grad(lambda x: f(x).sum())(X)):
            with pytest.raises(TransformationError) as error:
                transformed()
            assert str(error.value) == REFUSED.replace("total", "exp")


def test_a_batch_of_torchs_older_vmap_is_refused():
    op = op_custom_gradient(
        lambda x: (2 * x, lambda u: 7 * u), host_outputs=lambda x: x, vectorized=True, name="op"
    )
    x = leaf(X)
    for batched in (
        lambda: torch.autograd.grad(op(x), x, torch.eye(3), is_grads_batched=True),
        lambda: torch.autograd.functional.jacobian(op, x, vectorize=True),
    ):
        with pytest.raises(TransformationError) as error:
            batched()
        assert str(error.value) == (
            "the gradient of op: what runs on the host must be given tensors that have values, got a "
            "batch of is_grads_batched, or of vectorize=True; use torch.func.vmap, jacrev or jacfwd"
        )


def test_a_constant_at_every_level():
    close(grad(lambda x: (x * total(x, W).detach()).sum())(X), value(X, W))
    close(
        grad(lambda x: grad(lambda y: (x * y * total(y, W).detach()).sum())(X).sum())(X),
        value(X, W),
    )


def test_differentiating_a_graph_called_by_hand_raises():
    graph = make_fx(lambda x: total(x, W))(X)
    for transformed in (
        lambda: grad(lambda x: graph(x).sum())(X),
        lambda: grad(lambda x: grad(lambda y: (y * graph(x)).sum())(X).sum())(X),
    ):
        with pytest.raises(TransformationError) as error:
            transformed()
        assert str(error.value) == REFUSED
    close(vmap(graph)(X.expand(2, 3)), value(X, W).expand(2, 3))


# --- torch.func -----------------------------------------------------------------------------------


def test_nested_vmap_calls_f_for_each_element():
    x, w = torch.randn(5, 3, 4), torch.randn(2, 4)
    found = vmap(vmap(total, in_dims=(0, None)), in_dims=(2, 1), out_dims=1)(x, w)
    assert calls() == 20
    expected = torch.stack(
        [torch.stack([value(row, w[:, k]) for row in x[..., k]]) for k in range(4)], 1
    )
    close(found, expected)
    close(vmap(vmap(total, in_dims=(None, 0)), in_dims=(0, None))(x[0], w),
          torch.stack([torch.stack([value(row, v) for v in w]) for row in x[0]]))  # fmt: skip


def test_nested_vmap_calls_a_vectorized_f_once():
    u, x = torch.randn(3, 4), torch.randn(2, 5, 4)
    for of in (
        vmap(vmap(sines, in_dims=(0, None)), in_dims=(1, 2)),
        vmap(vmap(sines, in_dims=(None, 0)), (None, 2)),
    ):
        calls()
        first, second = of(u, x)
        assert calls() == 1
        assert second.dtype is torch.float64
        close(
            second[..., 0],
            (x.permute(2, 0, 1)[..., -1] if first.ndim == 3 else second[..., 0]).double(),
        )
    close(first, (3 * u.sin()).expand(4, 2, 3, 4))
    close(second, x.permute(2, 0, 1).flip(-1).double())


def test_vmap_of_nothing():
    assert vmap(total, in_dims=(0, None))(torch.zeros(0, 3), W).shape == (0, 3)
    assert calls() == 0


def test_the_rule_at_every_level():
    xs, ws = torch.stack([X, 2 * X]), torch.stack([W, W - 3, W + 1])
    of_x, of_w = gradients(X, W, UP)
    loss = lambda x, w: (op(x, w) * UP).sum()
    close(grad(loss, (0, 1))(X, W), (of_x, of_w))
    close(jacrev(op)(X, W), torch.stack([gradients(X, W, u)[0] for u in torch.eye(3)]))
    close(
        vmap(grad(loss, 1), in_dims=(0, None))(xs, W),
        torch.stack([gradients(x, W, UP)[1] for x in xs]),
    )
    close(
        vmap(grad(loss, 1), in_dims=(None, 0))(X, ws),
        torch.stack([gradients(X, w, UP)[1] for w in ws]),
    )
    close(
        grad(lambda w: vmap(loss, in_dims=(0, None))(xs, w).sum())(W),
        sum(gradients(x, W, UP)[1] for x in xs),
    )
    close(
        vmap(jacrev(op))(xs, ws[:2])[1],
        torch.stack([gradients(xs[1], ws[1], u)[0] for u in torch.eye(3)]),
    )


def test_nothing_is_left_of_calls_in_loops():
    before = len(names._calls), len(names._names)
    for scale in range(5):
        vmap(lambda x, scale=scale: total(x, W, scale=[scale]))(X[None])
        total(leaf(X), W, scale=scale)
    assert (len(names._calls), len(names._names)) == before


# --- torch.compile --------------------------------------------------------------------------------


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_an_op_on_the_host_stays_in_the_graph(compiler):
    x, w = leaf(X), leaf(W)
    found = torch.compile(op, backend=compiler, fullgraph=STAYS_IN_GRAPH)(x, w)
    close(found.detach(), value(X, W, 2.0))
    assert calls() == 1
    close(torch.autograd.grad(found, (x, w), UP), gradients(X, W, UP))
    assert calls() == 1


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_only_a_derivative_that_is_taken_raises_when_compiled(compiler):
    def several(x):
        y = total(x * 2, W)
        return (x * y.detach()).sum(), y, (x * total(x, W)).sum()

    compiled = torch.compile(several, backend=compiler, fullgraph=STAYS_IN_GRAPH)
    x = leaf(X)
    first, y, second = compiled(x)
    assert y.requires_grad
    close(torch.autograd.grad(first, x, retain_graph=True)[0], value(2 * X, W))
    for taken in (y.sum(), second):
        with pytest.raises(TransformationError) as error:
            torch.autograd.grad(taken, x, retain_graph=True)
        assert str(error.value) == REFUSED


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_function_on_the_host_calls_another(compiler):
    assert calls() == 0
    compiled = torch.compile(lambda x: nesting(x) + 1, backend=compiler, fullgraph=STAYS_IN_GRAPH)
    close(compiled(X), value(X, W).flip(0) + 1)
    assert calls() == 1


@op_host(outputs=lambda x: x)
def nesting(x):
    return total(x, W.numpy())[::-1]


@pytest.mark.stays_in_graph
@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_sizes_stay_dynamic(compiler):
    frames = []

    def counted(graph, inputs):
        frames.append(graph)
        return torch._dynamo.lookup_backend(compiler)(graph, inputs)

    compiled = torch.compile(
        lambda x, w: op(x * 2, w) + x, backend=counted, fullgraph=True, dynamic=True
    )
    for size in (3, 5, 8):
        x = leaf(torch.arange(float(size)))
        found = compiled(x, W)
        close(found.detach(), value(2 * x.detach(), W, 2.0) + x.detach())
        close(torch.autograd.grad(found.sum(), x)[0], 14 * torch.arange(size, 0, -1.0) + 1)
    assert len(frames) == 1


@pytest.mark.usefixtures("compiling")
def test_options_static_arguments_and_trees_in_one_graph():
    @op_host(outputs=lambda tree, *_: {"b": tree["a"], "a": (Spec((2,), "int32"), tree["b"][0])})
    def mixed(tree, mode, power=None):
        factor = {"twice": 2, "thrice": 3}[mode]
        return {
            "b": factor * tree["a"] ** (power or 1),
            "a": (np.array([7, 9]), tree["b"][0] * tree["b"][1]),
        }

    def several(x, n, s):
        first = mixed({"b": [x, 5], "a": x}, "twice")
        second = mixed({"b": [x, 5.5], "a": x}, "thrice", n)
        return first, second, total(x, W, scale=s), total(x, W, scale=x.shape[0]), total(x, W)

    compiled = torch.compile(several, backend="aot_eager", fullgraph=STAYS_IN_GRAPH)
    for n, s in ((2, 3.0), (3, 0.5), (1, 0.0)):
        found, expected = compiled(X, n, s), several(X, n, s)
        assert found[0]["a"][0].dtype is torch.int32
        for a, b in zip(*map(optree.tree_leaves, (found, expected)), strict=True):
            close(a, b)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.factor = 5.0

    @op_host(outputs=lambda self, x: x)
    def scaled(self, x):
        return x * self.factor

    def forward(self, x):
        return op(self.linear(x), W) + self.scaled(x)


@pytest.mark.usefixtures("compiling")
def test_modules_and_methods():
    layer, x = Layer(), X.expand(4, 3)
    close(layer.scaled(X), 5 * X)
    expected = vmap(lambda x: functional_call(layer, {}, x))(x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=STAYS_IN_GRAPH)
    close(compiled(X), expected[0])
    layer.factor = 6.0
    close(layer(X), expected[0] + X)
    close(compiled(X), expected[0] + X)  # f runs on the host: it reads the factor there
    compiled(X).sum().backward()
    of_x, _ = gradients(layer.linear(X).detach(), W, torch.ones(3))
    close(layer.linear.bias.grad, of_x)


@pytest.mark.usefixtures("compiling")
def test_torch_func_within_a_compiled_function():
    compile = lambda f: torch.compile(f, backend="aot_eager", fullgraph=STAYS_IN_GRAPH)
    close(compile(vmap(lambda x: total(x, W)))(X.expand(2, 3)), value(X, W).expand(2, 3))
    close(compile(grad(lambda x: (x * total(x, W).detach()).sum()))(X), value(X, W))
    with pytest.raises(Exception, match="has no derivative of its own"):
        compile(grad(lambda x: (x * total(x, W)).sum()))(X)
    nested = grad(lambda x: grad(lambda y: (y * total(x, W)).sum())(X).sum())
    with pytest.raises(Exception, match="has no derivative of its own"):
        compile(nested)(X)


@pytest.mark.usefixtures("compiling")
def test_what_the_compiled_function_makes_is_refused():
    class Factor:
        by = 2.0

        def __init__(self, by):
            self.by = by

    scaled = op_host(lambda x, factor: x * factor.by, outputs=lambda x, factor: x, name="scaled")
    close(
        torch.compile(lambda x, f: scaled(x, f), backend="eager", fullgraph=STAYS_IN_GRAPH)(
            X, Factor(3.0)
        ),
        3 * X,
    )
    with_option = torch.compile(
        lambda x, f: total(x, W, other=f), backend="eager", fullgraph=STAYS_IN_GRAPH
    )
    close(with_option(X, Factor(3.0)), value(X, W))
    message = (
        "scaled: a graph knows a function on the host by its name, "
        "got an op or an argument that the compiled function makes; make it outside of the function"
    )
    compiled = torch.compile(
        lambda x: scaled(x, Factor(3.0)), backend="eager", fullgraph=STAYS_IN_GRAPH
    )
    if not STAYS_IN_GRAPH:
        close(compiled(X), 3 * X)
        return
    with pytest.raises(Exception, match=message):
        compiled(X)


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("compiler", [None, *COMPILERS])
def test_errors_arrive_as_they_were_raised(compiler):
    failing_rule = op_custom_gradient(lambda x: (x * 3, lambda upstream: failing(upstream)))
    once = (
        (lambda f: f)
        if compiler is None
        else lambda f: torch.compile(f, backend=compiler, fullgraph=STAYS_IN_GRAPH)
    )
    with pytest.raises(ZeroDivisionError, match="a singular matrix of 3"):
        once(lambda x: failing(x) * 2)(X)
    value = once(lambda x: failing_rule(x) * 2)(leaf(X))
    with pytest.raises(ZeroDivisionError, match="a singular matrix of 3"):
        value.sum().backward()


@pytest.mark.usefixtures("compiling")
def test_dtypes_and_shapes_when_compiled():
    @op_host(outputs=lambda x: x)
    def kept(x):
        return x

    compiled = torch.compile(lambda x: kept(x), backend="aot_eager", fullgraph=STAYS_IN_GRAPH)
    for x in (torch.tensor([1.5, 2.0], dtype=torch.bfloat16), torch.tensor([1.5], dtype=torch.float16),
              torch.tensor(3), torch.tensor([True]), torch.zeros(0, 3), torch.tensor([1 + 2j]),
              torch.arange(6.0).reshape(2, 3).mT):  # fmt: skip
        close(compiled(x), x)
    with torch.autocast("cpu"), torch.inference_mode():
        close(compiled(X), X)


# --- Graphs ---------------------------------------------------------------------------------------

MODES = {"real": {}, "fake": {"tracing_mode": "fake"}, "symbolic": {"tracing_mode": "symbolic"},
         "pre_dispatch": {"pre_dispatch": True}}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_make_fx_records_the_operation(mode):
    graph = make_fx(lambda x, w: total(x, w) * 2, **MODES[mode])(X, W)
    close(graph(X + 1, 3 * W), value(X + 1, 3 * W) * 2)
    with pytest.raises(TransformationError) as error:
        graph(leaf(X), W).sum().backward()
    assert str(error.value) == REFUSED


def test_make_fx_of_transformations():
    xs = torch.stack([X, 2 * X])
    close(
        make_fx(lambda x, w: vmap(total, in_dims=(0, None))(x, w))(xs, W)(xs + 1, W),
        value(xs + 1, W),
    )
    loss = lambda x, w: (op(x, w) * UP).sum()
    close(make_fx(lambda x, w: grad(loss, 1)(x, w))(X, W)(X + 1, W), gradients(X + 1, W, UP)[1])


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated")
def test_jit_trace_records_the_operation():
    with torch.inference_mode():
        traced = torch.jit.trace(lambda x: total(x, W) * 2, X)
    close(traced(X + 1), value(X + 1, W) * 2)
    with pytest.raises(TransformationError) as error:
        traced(leaf(X)).sum().backward()
    assert str(error.value) == REFUSED


def test_the_operation_passes_the_checks_of_torch():
    graph = make_fx(lambda x, w: total(x, w, scale=2.0))(X, W)
    (name,) = [
        node.args[1] for node in graph.graph.nodes if node.target is torch.ops.cgshim.host.default
    ]
    torch.library.opcheck(torch.ops.cgshim.host.default, ([X, W], name))
    for of_a_program in (torch.ops.cgshim.host_to_one, torch.ops.cgshim.host_to_many):
        torch.library.opcheck(
            of_a_program.default, ([X, W], name), test_utils=["test_schema", "test_faketensor"]
        )


def name_in_a_graph(f, *inputs):
    (node,) = [
        n for n in make_fx(f)(*inputs).graph.nodes if n.target is torch.ops.cgshim.host.default
    ]
    return node.args[1]


def test_names_of_calls():
    name = lambda **options: name_in_a_graph(lambda x: total(x, W, **options), X)
    place, static = re.split("#[0-9a-f]+[?]", name(scale=2.0, other=None))
    assert (place, static) == (f"{__name__}:total", "((), {'scale': 2.0, 'other': None})")
    for no_literal in (np.float32(1), Local, {"k": float("nan")}):
        assert name(other=no_literal).startswith("total#")
    strange = name(other=["a#b?c>d|01", {"k": (1, 2)}])
    elsewhere = strange.replace("#", "#0", 1)  # only this process knows the number
    for own in (strange, elsewhere):
        close(torch.ops.cgshim.host([X, W], own)[0], value(X, W))
    of_batch = elsewhere.replace("?((),", "?(((True, False),),")
    close(torch.ops.cgshim.host([X[None], W], of_batch)[0], value(X, W)[None])
    local = op_host(lambda x, **_: x, outputs=lambda x, **_: x, name="local")
    named = lambda **options: name_in_a_graph(lambda x: local(x, **options), X)
    assert named(n=(1, 2)) == named(n=(1, 2))
    different = [1, 1.0, True, (1,), (1.0,), [1], 0.0, -0.0, "1", np.float32(1)]
    assert len({named(n=n) for n in different}) == len(different)


@pytest.mark.stays_in_graph
@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("dynamic", [False, True])
def test_names_in_compiled_code(dynamic):
    """Other processes find the op, and no program on disk that this one has made."""
    found = []

    def noting(graph, inputs):
        found.extend(n.args[1] for n in graph.graph.nodes if n.target in HOST)
        return graph.forward

    torch.compile(
        lambda x: total(x, W, scale=2.0), backend=noting, fullgraph=True, dynamic=dynamic
    )(X)
    [(place, static)] = [re.split("#[0-9a-f]+[?]", name) for name in found]
    assert (place, static) == (f"{__name__}:total", "((), {'scale': 2.0})")


HOST = (torch.ops.cgshim.host, torch.ops.cgshim.host.default)


def test_threads_share_names():
    local = op_host(lambda x, n: x * n, outputs=lambda x, n: x, name="local")
    found = []
    barrier = threading.Barrier(8)

    def work(n):
        barrier.wait()
        for _ in range(20):
            call = names.HostCall(local.held_function, [names.ONE_TENSOR], {"n": (n,)})
            found.append((n, names.name_of(call)))
            close(vmap(lambda x: local(x, n))(X), n * X)

    threads = [threading.Thread(target=work, args=(n % 2,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 160
    assert len(set(found)) == 2


# --- Other processes ------------------------------------------------------------------------------

MODULE = """
import numpy as np, torch
from cgshim import op_custom_gradient, op_host

@op_host(outputs=lambda x, **_: x)
def total(x, *, scale=1.0):
    return scale * np.cumsum(x)

@op_custom_gradient
def op(x):
    return total(x, scale=3.0), lambda upstream: 7.0 * upstream

class Model(torch.nn.Module):
    def forward(self, x):
        return op(x) + total(x, scale=2.0)

class Items(torch.utils.data.Dataset):
    def __len__(self): return 6
    def __getitem__(self, at): return total(torch.tensor([at, 1.0]), scale=10.0)
"""

LOADED = """
import sys, torch, cgshim, cgshim_torch
for path in sys.argv[1:]:
    model = torch.export.load(path).module()
    try:
        print(model(torch.tensor([1.0, 2.0, 4.0])).tolist())
    except cgshim.BackendError as error:
        print(error)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "host_module_of_a_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import host_module_of_a_test

    yield host_module_of_a_test
    del sys.modules["host_module_of_a_test"]


def test_a_name_leads_to_the_op_of_a_module_that_was_reloaded(module, tmp_path):
    call = functools.partial(torch.ops.cgshim.host, [X], "host_module_of_a_test:total")
    close(call()[0], torch.cumsum(X, -1))
    (tmp_path / "host_module_of_a_test.py").write_text(
        MODULE.replace("np.cumsum(x)", "7 * np.cumsum(x)")
    )
    importlib.reload(module)
    close(call()[0], 7 * torch.cumsum(X, -1))


class Local(torch.nn.Module):
    """A model with an op that no module holds."""

    def __init__(self):
        super().__init__()
        self.op = op_host(lambda x: x * 2, outputs=lambda x: x, name="local")

    def forward(self, x):
        return self.op(x)


@pytest.mark.usefixtures("compiling")
def test_exported_models_in_another_process(module, tmp_path, monkeypatch):
    """It finds the op of the first model in its module, and has no place of the second one's."""
    paths = [str(tmp_path / f"{name}.pt2") for name in ("found", "local")]
    for model, path in zip((module.Model(), Local()), paths, strict=True):
        torch.export.save(torch.export.export(model, (X,), strict=False), path)
    close(torch.export.export(Local(), (X,), strict=False).module()(X + 1), 2 * (X + 1))
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    command = [sys.executable, "-W", "ignore", "-c", LOADED, *paths]
    program = subprocess.run(command, capture_output=True, text=True)
    assert program.returncode == 0, program.stderr
    assert program.stdout.splitlines() == [
        str([5.0, 15.0, 35.0]),
        "local: a graph knows a function on the host by its name, got ModuleNotFoundError: No module named "
        "'local'; define the op in a module, and call it with tensors and with literals as options",
    ]


EDITED = """
import numpy as np
from cgshim import Spec, op_host
SIZE = {size}

@op_host(outputs=lambda x, **_: Spec({declared}))
def total(x, *, scale=1.0):
    return scale * np.cumsum(x)[:SIZE]
"""


EDITIONS = [
    ("(SIZE,), x.dtype", 3),
    ("(SIZE,), x.dtype", 2),
    ("(SIZE,), 'int64'", 2),
]


@pytest.mark.usefixtures("compiling")
def test_compiled_code_on_disk_is_for_what_was_declared(module, tmp_path):
    """Each edition of the module is compiled again, and finds on disk the programs of those
    before.
    """
    for number, (declared, size) in enumerate(EDITIONS):
        # Python tells editions by their lengths
        text = EDITED.format(declared=declared, size=size) + "#" * number
        (tmp_path / "host_module_of_a_test.py").write_text(text)
        importlib.reload(module)
        torch._dynamo.reset()
        function = torch.compile(
            lambda x: module.total(x, scale=2.0) * 2 + 1, fullgraph=STAYS_IN_GRAPH
        )
        numbers = [5, 13, 29][:size] if "int" in declared else [5.0, 13.0, 29.0][:size]
        found = function(torch.tensor([1.0, 2.0, 4.0])).tolist()
        assert str(found) == str(numbers), declared


@pytest.mark.parametrize(
    ("name", "got"),
    [("no_such_module_here:f", "ModuleNotFoundError: No module named 'no_such_module_here'"),
     ("math:f", "AttributeError: module 'math' has no attribute 'f'"),
     (f"{__name__}:op", f"AttributeError: no op_host at {__name__}:op")],
)  # fmt: skip
def test_a_name_that_leads_nowhere_is_refused(name, got):
    with pytest.raises(BackendError) as error:
        torch.ops.cgshim.host([X], name)
    assert str(error.value) == (
        f"{name.partition(':')[2]}: a graph knows a function on the host by its name, got {got}; "
        "define the op in a module, and call it with tensors and with literals as options"
    )


@pytest.mark.parametrize(("start", "workers"), [("fork", 2), ("spawn", 1)])
def test_workers_of_a_loader_call_the_host(module, start, workers):
    if start == "fork":
        total(X, W)
    loader = torch.utils.data.DataLoader(
        module.Items(), batch_size=3, num_workers=workers, multiprocessing_context=start
    )
    close(torch.cat(list(loader)), torch.tensor([[10.0 * at, 10.0 * at + 10.0] for at in range(6)]))


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_dicts_with_another_order_of_keys_are_other_arguments(compiling, compiler):
    for keys, value, gradients in (("za", -2, (7, -5)), ("az", 2, (-5, 7)), ("za", -2, (7, -5))):
        function = lambda x, y, keys=keys: minus({key: {"z": x, "a": y}[key] for key in keys})
        x, y = torch.tensor(3.0, requires_grad=True), torch.tensor(5.0, requires_grad=True)
        if compiler:
            function = torch.compile(function, backend=compiler)
        output = function(x, y)
        found = torch.autograd.grad(output, (x, y))
        assert (output.item(), tuple(g.item() for g in found)) == (value, gradients)
