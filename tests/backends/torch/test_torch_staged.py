"""Graphs of an op: torch.export, torch.jit.trace, torch.fx and make_fx.

Rules are wrong on purpose, by the factor 7: a gradient of a graph is the rule's, or an error.
"""

import copy
import functools
import io
import pickle

import pytest
import torch
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch.func import grad, hessian, jvp, linearize, vmap
from torch.fx.experimental.proxy_tensor import (
    make_fx,
)

from cgshim import TransformationError, op_custom_gradient, op_custom_jvp, op_vjp

X = torch.tensor([0.5, -1.25])
REFUSED = "sine: the graph of an op .* got a derivative"


@op_custom_gradient(forward_mode=True)
def sine(x):
    slope = x.cos()
    return x.sin(), lambda upstream: upstream * 7 * slope


@op_custom_gradient
def product(x, w, *, scale=1.0):
    return (x * w * scale, x + w), lambda u, v: (3 * u * w + v, 5 * u * x - v)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x):
        return sine(self.linear(x)) * 2


class Reading(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))

    @op_custom_gradient
    def sine(self, x):
        return (x * self.weight).sin(), lambda upstream, variables: (7 * upstream, [5 * upstream])

    def forward(self, x):
        return self.sine(x) * 2


def leaf():
    return X.clone().requires_grad_()


def operations(module):
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


STAGES = {
    "export": lambda model, x: torch.export.export(model, (x,), strict=False).module(),
    "export, strict": lambda model, x: torch.export.export(model, (x,), strict=True).module(),
    "export, decomposed": lambda model, x: (
        torch.export.export(model, (x,), strict=False).run_decompositions().module()
    ),
    "jit.trace": lambda model, x: torch.jit.trace(model, (x,)),
    "make_fx": lambda model, x: make_fx(model)(x),
    "make_fx, symbolic": lambda model, x: make_fx(
        model, tracing_mode="symbolic", _allow_non_fake_inputs=True
    )(x),
    "make_fx, pre-dispatch": lambda model, x: make_fx(model, pre_dispatch=True)(x),
    "export of fx": lambda model, x: torch.export.export(
        torch.fx.symbolic_trace(model), (x,), strict=False
    ).module(),
}
STRICT = pytest.param("export, strict", marks=pytest.mark.stays_in_graph)
pytestmark = [  # of torch's own
    pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated"),
    # 2.10 and 2.12, which load
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning"),
]


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("stage", [STRICT if name == "export, strict" else name for name in STAGES])
def test_a_graph_computes_f_and_its_gradient_raises(stage, with_gradient):
    model = Model()
    graph = STAGES[stage](model, leaf() if with_gradient else X)
    with torch.no_grad():
        torch.testing.assert_close(graph(2 * X), model(2 * X))
    if "make_fx" not in stage:  # whose graphs have constants for what autograd does not record
        with pytest.raises(TransformationError, match=REFUSED):
            graph(leaf()).sum().backward()


@pytest.mark.parametrize("stage", ["export", STRICT, "jit.trace"])
def test_a_gradient_of_a_graph_with_a_parameter_raises(stage):
    model = Reading()
    graph = STAGES[stage](model, X)
    torch.testing.assert_close(graph(2 * X), model(2 * X))
    with pytest.raises(TransformationError, match=REFUSED):
        graph(X).sum().backward()


DERIVATIVES = {
    "grad": lambda graph: grad(lambda x: graph(x).sum())(X),
    "jvp": lambda graph: jvp(graph, (X,), (X,)),
    "vmap of grad": lambda graph: vmap(grad(lambda x: graph(x).sum()))(X[None]),
    "grad around another": lambda graph: grad(
        lambda x: grad(lambda z: (z * graph(x)).sum())(x).sum()
    )(X),
    "grad around vmap of another": lambda graph: grad(
        lambda xs: vmap(grad(lambda z: (z * graph(xs[0])).sum()))(xs).sum()
    )(X[None]),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_a_derivative_of_a_graph_by_torch_func_raises(derivative):
    """It is cgshim's error, or torch's for an operation without a batching rule."""
    graph = STAGES["export"](Model(), X)
    with pytest.raises(
        (TransformationError, RuntimeError), match=f"{REFUSED}|without_gradient|setup_context"
    ):
        derivative(graph)


@pytest.mark.parametrize("stage", ["export", STRICT, "make_fx"])
def test_without_gradients_a_graph_is_that_of_f(stage):
    with torch.no_grad():
        graph = STAGES[stage](Model(), X)
    assert not [target for target in operations(graph) if target.startswith("cgshim")]


@pytest.mark.parametrize("kind", ["export", "jit"])
def test_a_graph_is_saved_and_loaded(kind):
    model, file = Model(), io.BytesIO()
    if kind == "export":
        torch.export.save(torch.export.export(model, (X,), strict=False), file)
    else:
        torch.jit.save(torch.jit.trace(model, (X,)), file)
    file.seek(0)
    loaded = torch.export.load(file).module() if kind == "export" else torch.jit.load(file)
    torch.testing.assert_close(loaded(X), model(X))


# --- Gradients within a graph ---------------------------------------------------------------------


def first_order(x):
    return torch.autograd.grad(sine(x).sum(), x, create_graph=True)[0]


WITHIN = {
    "torch.autograd": (first_order, lambda x: 7 * x.cos()),
    "grad": (grad(lambda x: sine(x).sum()), lambda x: 7 * x.cos()),
    "vmap of grad": (vmap(grad(sine)), lambda x: 7 * x.cos()),
    "jvp": (lambda x: jvp(sine, (x,), (x,))[1], lambda x: 7 * x * x.cos()),
    "hessian": (hessian(lambda x: sine(x).sum()), lambda x: (-7 * x.sin()).diag()),
    "vmap": (vmap(sine), torch.sin),
}


@pytest.mark.parametrize(("function", "expected"), WITHIN.values(), ids=WITHIN)
def test_a_derivative_inside_make_fx_is_the_rules(function, expected):
    graph = make_fx(function)(leaf())
    torch.testing.assert_close(graph(2 * leaf()).detach(), expected(2 * X))


def test_a_tangent_in_a_graph_is_not_the_one_that_was_given():
    """An output that is changed in place takes its tangent along."""
    shifted = op_custom_gradient(lambda x: (x + 1, lambda upstream: upstream), forward_mode=True)
    graph = make_fx(lambda x, v: (jvp(lambda x: shifted(x).mul_(2), (x,), (v,))[1], v * 3))(
        X, 2 * X
    )
    torch.testing.assert_close(graph(X, 5 * X), (10 * X, 15 * X))


def test_a_graph_of_a_gradient_by_torch_func_is_differentiable():
    graph, x = make_fx(grad(lambda x: sine(x).sum()))(X), leaf()
    (second,) = torch.autograd.grad(graph(x), x, torch.tensor([2.0, -3.0]))
    torch.testing.assert_close(second, -7 * X.sin() * torch.tensor([2.0, -3.0]))


by_tangents = op_custom_jvp(lambda x: (x.sin(), lambda dx: 7 * dx * x.cos()))


@pytest.mark.parametrize("op", [sine, by_tangents])
def test_a_joint_graph_has_the_rule(op):
    x = leaf()
    y = aot_function(
        lambda x: op(x) * 2, fw_compiler=lambda graph, _: make_boxed_func(graph.forward)
    )(x)
    (gradient,) = torch.autograd.grad(y, x, torch.tensor([2.0, -3.0]))
    torch.testing.assert_close(gradient, 14 * X.cos() * torch.tensor([2.0, -3.0]))


def pulled_back(x):
    y, pullback = op_vjp(lambda x: 7 * x.sin(), x)
    return y / 7, pullback


def over_batch(size, in_batched, x):
    return x.sin(), lambda upstream: upstream * 7 * x.cos(), True


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize(
    "gradient",
    [
        grad(lambda x: op_custom_gradient(pulled_back)(x).sum()),
        vmap(grad(op_custom_gradient(lambda x: over_batch(0, (), x)[:2], vmap=over_batch))),
    ],
)
def test_make_fx_of_a_pullback_and_of_a_rule_for_batches(gradient, mode):
    graph = make_fx(gradient, tracing_mode=mode)(X)
    torch.testing.assert_close(graph(2 * X), 7 * (2 * X).cos())


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_graph_is_made_of_a_second_order_that_runs_f_again(mode):
    def f(x):
        square = torch.square(x)
        return square * x, lambda upstream: 7 * upstream * square

    def second(x):
        x = x.detach().requires_grad_()
        y = op_custom_gradient(f)(x)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad((3 * first).sum(), x)[0]

    torch.testing.assert_close(make_fx(second, tracing_mode=mode)(X)(2 * X), 84 * X)


# linearize of torch 2.13
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr:UserWarning")
def test_linearize_makes_a_graph_of_the_rule():
    torch.testing.assert_close(linearize(sine, X)[1](2 * X), 14 * X * X.cos())


# --- torch.fx -------------------------------------------------------------------------------------


class Products(torch.nn.Module):
    def forward(self, x, w):
        p, s = product(x, w, scale=2.0)
        return p * s + product(x, torch.tensor([3.0, 5.0]))[0]


def gradients(function):
    x, w = leaf(), torch.tensor([2.0, 7.0], requires_grad=True)
    return torch.autograd.grad(function(x, w), (x, w), torch.tensor([2.0, -3.0]))


@pytest.mark.parametrize(
    "again", [lambda g: g, copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))]
)
def test_symbolic_trace_records_the_op_itself(again):
    graph = torch.fx.symbolic_trace(Products())
    names = [str(target) for target in operations(graph) if "product" in str(target)]
    assert len(names) == 2
    torch.testing.assert_close(gradients(again(graph)), gradients(Products()))


def times(x, factor):
    return x * factor, lambda upstream: 7 * upstream


@pytest.mark.parametrize("f", [lambda x: times(x, 2), functools.partial(times, factor=2)])
def test_symbolic_trace_of_an_op_without_a_name(f):
    double = op_custom_gradient(f)
    graph, x = torch.fx.symbolic_trace(lambda x: double(x) + x), leaf()
    graph(x).backward(torch.tensor([2.0, -3.0]))
    assert x.grad.tolist() == [16, -24]


def test_symbolic_trace_of_an_op_with_state_raises():
    with pytest.raises(TransformationError, match=r"sine: torch.fx .* f32\[2\]; pass it as an arg"):
        torch.fx.symbolic_trace(Reading())
