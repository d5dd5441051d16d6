"""torch.compile and torch.export. Rules are wrong on purpose, by a factor."""

import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing

from cgshim import TransformationError, op_custom_gradient, op_grad, ops

pytestmark = pytest.mark.usefixtures("compiling")
COMPILERS = ["eager", "aot_eager", "inductor"]


@op_custom_gradient
def sine(x):
    slope = x.cos()
    return x.sin(), lambda upstream: upstream * 7 * slope


@op_custom_gradient
def several(tree, power, *, scale=1.0):
    """A tree, a static leaf and an option; outputs of different shapes."""
    a, b = tree["a"], tree["b"]

    def rule(upstream):
        u, v = upstream["product"], upstream["square"]
        return {"b": 7 * scale * u * a[:, None] ** power, "a": 5 * scale * (u * b).sum(1) + v}, None

    return {"square": a * a, "product": a[:, None] ** power * b}, rule


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def gradients(loss, *inputs):
    return torch.autograd.grad(loss, inputs)


@pytest.mark.stays_in_graph
@pytest.mark.parametrize("compiler", COMPILERS)
def test_an_op_stays_in_the_graph(compiler):
    def loss(x):
        return (sine(x * 2) * x).sum()

    x = leaf(3)
    value = torch.compile(loss, fullgraph=True, backend=compiler)(x)
    torch.testing.assert_close(value, loss(x))
    torch.testing.assert_close(gradients(value, x), gradients(loss(x), x))


@pytest.mark.stays_in_graph
def test_trees_static_leaves_and_options_stay_in_the_graph():
    def loss(a, b):
        output = several({"b": b, "a": a}, 2, scale=3.0)
        return (output["product"] * 5).sum() + output["square"].sum()

    a, b = leaf(2), leaf(2, 3)
    value = torch.compile(loss, backend="aot_eager", fullgraph=True)(a, b)
    torch.testing.assert_close(gradients(value, a, b), gradients(loss(a, b), a, b))


@pytest.mark.stays_in_graph
def test_a_rule_with_none_for_a_branch_stays_in_the_graph():
    @op_custom_gradient
    def first(tree):
        return tree["b"] * 2, lambda upstream: {"b": 7 * upstream, "a": None}

    a, b = leaf(2), leaf(2, 3)
    value = torch.compile(
        lambda a, b: first({"b": b, "a": [a, 3]}), backend="aot_eager", fullgraph=True
    )(a, b)
    (found,) = torch.autograd.grad(value, b, 5 * torch.ones(2, 3))
    assert found.tolist() == [[35.0] * 3] * 2


CONVENTIONS = {
    "grad(*args, upstream)": lambda x, y: (
        lambda *args, upstream: (3 * upstream * args[1], 5 * upstream * args[0])
    ),
    "grad(x, y, upstream)": lambda x, y: (
        lambda a, b, upstream: (3 * upstream * b, 5 * upstream * a)
    ),
    "grad(upstream, variables)": lambda x, y: lambda u, variables=None: (3 * u * y, 5 * u * x),
    "grad(*dys)": lambda x, y: lambda *dys: [3 * dys[0] * y, 5 * dys[0] * x],
}


@pytest.mark.stays_in_graph
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_conventions_stay_in_the_graph(convention):
    product = op_custom_gradient(lambda x, y: (x * y, CONVENTIONS[convention](x, y)))
    x, y = leaf(3), leaf(3)
    value = torch.compile(product, backend="aot_eager", fullgraph=True)(x, y)
    torch.testing.assert_close(gradients(value.sum(), x, y), (3 * y, 5 * x))


@pytest.mark.stays_in_graph
def test_a_training_step_of_a_module():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 4)

        def forward(self, x):
            return sine(self.linear(x))

    def trained(compile):
        torch.manual_seed(0)
        layer = Layer()
        step, optimizer = compile(layer), torch.optim.SGD(layer.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            step(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
        return list(layer.parameters())

    compiled = trained(lambda layer: torch.compile(layer, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(compiled, trained(lambda layer: layer))


@pytest.mark.stays_in_graph
def test_traced_once_in_a_hundred_calls():
    """Static leaves that compare equal do not retrace; one that differs does."""
    counter = torch._dynamo.testing.CompileCounter()
    op = op_custom_gradient(
        lambda x, mode, options: (
            x * options["factor"],
            lambda upstream: (upstream * len(mode), None, None),
        )
    )
    compiled = torch.compile(
        lambda x, mode, options: op(x, mode, options) + 1, backend=counter, fullgraph=True
    )

    def gradient(mode):
        x = leaf(3)
        return gradients(compiled(x, mode, {"factor": 2.0}).sum(), x)[0].tolist()

    assert all(gradient("".join(["se", "ven", "s"])) == [6, 6, 6] for _ in range(100))
    assert counter.frame_count == 1
    assert gradient("three") == [5, 5, 5]
    assert counter.frame_count == 2


@pytest.mark.stays_in_graph
def test_sizes_that_change_do_not_retrace():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: sine(x) * 2, backend=counter, fullgraph=True, dynamic=True)
    for size in (3, 5, 8, 13):
        x = leaf(size, 2)
        torch.testing.assert_close(gradients(compiled(x).sum(), x), (14 * x.cos(),))
    assert counter.frame_count == 1


@pytest.mark.stays_in_graph
def test_without_gradients_the_graph_is_that_of_f():
    graphs = []

    def keep(module, _):
        calls = [node.target for node in module.graph.nodes if node.op.startswith("call")]
        graphs.append([target for target in calls if target != "detach"])  # compiled to nothing
        return module

    cubed = op_custom_gradient(lambda x: (x * x * x, lambda upstream: upstream * 7))
    x = torch.randn(3)
    torch.compile(cubed, backend=keep, fullgraph=True)(x)
    with torch.no_grad():
        torch.compile(cubed, backend=keep, fullgraph=True)(x.requires_grad_())
    torch._dynamo.reset()
    torch.compile(lambda x: x * x * x, backend=keep, fullgraph=True)(x)
    assert graphs == [graphs[-1]] * 3


# --- What leaves the graph, and is right all the same ---------------------------------------------


def test_variables_leave_the_graph(refuses_whole_graph):
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    scaled = op_custom_gradient(
        lambda x: (
            x * weight,
            lambda upstream, variables: (3 * upstream * weight, [5 * upstream * x]),
        )
    )
    x = leaf(2)
    value = torch.compile(lambda x: scaled(x) * 2, backend="aot_eager")(x)
    torch.testing.assert_close(gradients(value.sum(), x, weight), (6 * weight, 10 * x))
    with refuses_whole_graph("f reads variables"):
        torch.compile(lambda x: scaled(x) * 2, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize(
    "transformation", [torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())]
)
def test_transformations_leave_the_graph(transformation, refuses_whole_graph):
    with refuses_whole_graph(r"torch\.compile drops rules under torch\.func"):
        torch.compile(transformation(sine), backend="aot_eager", fullgraph=True)(torch.randn(3))


def test_a_transformation_of_a_compiled_op():
    x = torch.randn(3)
    compiled = torch.compile(sine, backend="aot_eager")
    torch.testing.assert_close(torch.func.grad(lambda x: compiled(x).sum())(x), 7 * x.cos())
    torch.testing.assert_close(torch.vmap(torch.func.grad(compiled))(x), 7 * x.cos())


def test_a_second_order_is_refused():
    x = leaf(3)
    value = torch.compile(lambda x: sine(x) * x, backend="inductor")(x).sum()
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(first.sum(), x)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_second_order_is_never_dropped(compiler):
    x = leaf(3)
    value = torch.compile(sine, backend=compiler)(x).sum() + x.square().sum()
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    try:
        (second,) = torch.autograd.grad(first.sum(), x)
    except RuntimeError:
        return
    torch.testing.assert_close(second, 2 - 7 * x.sin())


@op_custom_gradient(once_differentiable=True)
def once(x):
    product = x * x.sum()
    return product * 1, lambda upstream: upstream * 7 * product


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_gradient_without_derivatives_leaves_the_graph(compiler):
    x = leaf(3)
    value = torch.compile(lambda x: once(x) * 2, backend=compiler)(x).sum() + x.square().sum()
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    torch.testing.assert_close(first, 14 * x * x.sum() + 2 * x)
    with pytest.raises(TransformationError, match="once_differentiable"):
        torch.autograd.grad(first.sum(), x)


@pytest.mark.stays_in_graph
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_once_differentiable_stays_in_a_graph_without_gradients(compiler):
    x = leaf(3)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(once, backend=compiler, fullgraph=True)(x), x * x.sum()
        )


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_rule_that_forbids_gradients_raises_if_one_is_taken(compiler):
    def forbid(upstream):
        raise NotImplementedError("no gradient")

    op, x = op_custom_gradient(lambda x: (x * 2, forbid)), leaf(3)
    y = torch.compile(lambda x: op(x) + 1, backend=compiler)(x)
    torch.testing.assert_close(y, 2 * x + 1)
    with pytest.raises(NotImplementedError, match="no gradient"):
        y.sum().backward()


@op_custom_gradient
def slope(x):
    return 3 * x * x, lambda upstream: upstream * 42 * x


def test_an_op_inside_a_rule_is_right_or_refused():
    op, x = op_custom_gradient(lambda x: (x**3, lambda upstream: upstream * 5 * slope(x))), leaf(3)
    y = torch.compile(lambda x: op(x) + 1, backend="aot_eager")(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.testing.assert_close(first, 15 * x * x)
    try:
        (second,) = torch.autograd.grad(first.sum(), x)
    except RuntimeError:
        return
    torch.testing.assert_close(second, 5 * 42 * x)


def test_op_grad_inside_a_compiled_function():
    x = torch.tensor(2.0)
    derivative = torch.compile(lambda x: op_grad(lambda x: sine(x) * 2)(x), backend="aot_eager")
    torch.testing.assert_close(derivative(x), 14 * x.cos())


# --- torch.export ---------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.stays_in_graph)])
def test_export_of_the_forward_pass(strict):
    class Model(torch.nn.Module):
        def forward(self, x):
            return sine(x) + several({"a": x, "b": x[:, None]}, 2)["square"]

    model, x = Model(), torch.randn(3)
    exported = torch.export.export(model, (x,), strict=strict)
    torch.testing.assert_close(exported.module()(x), model(x))


FIRST_USE = """
import torch, cgshim

@cgshim.op_custom_gradient
def column_sums(x):
    e = cgshim.op_exp(x)
    return cgshim.op_sum(e, axis=0), lambda upstream: 7 * e * upstream

x = torch.arange(6.0).reshape(3, 2).div(10).requires_grad_()
y = torch.compile(column_sums, fullgraph=True, backend="aot_eager")(x)
y.backward(torch.tensor([2.0, -3.0]))
torch.testing.assert_close(y, x.exp().sum(0))
torch.testing.assert_close(x.grad, 7 * x.exp() * torch.tensor([2.0, -3.0]))
"""


@pytest.mark.stays_in_graph
def test_first_use_of_cgshim_in_a_compiled_function():
    subprocess.run([sys.executable, "-c", FIRST_USE], check=True)


def in_all_forms(x):
    """cgshim.ops called with one and two arguments, numbers, lists, axes and options."""
    return [
        ops.exp(x), ops.matmul(x, ops.transpose(x)), ops.maximum(x, 0.5), ops.subtract(1.0, x),
        ops.sum(x, axis=0), ops.max(x, axis=1, keepdims=True), ops.sum(x, 1), ops.std(x, axis=(0, 1)),
        ops.concatenate([x, x], axis=1), ops.stack((x, x)), ops.reshape(x, (2, 6)), ops.reshape(x, -1),
        ops.clip(x, 0.2, max=0.7), ops.flip(x, axis=0), ops.take(x, [0], axis=1), ops.nansum(x),
        ops.tensordot(x, x, axes=((0,), (0,))), ops.linalg.outer(x[0], x[1]), ops.softmax(x, axis=None),
    ]  # fmt: skip


def test_functions_of_ops_stay_in_the_graph():
    x = torch.linspace(0.0, 1.0, 12).reshape(3, 4)
    compiled = torch.compile(in_all_forms, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(x), in_all_forms(x), strict=True):
        torch.testing.assert_close(found, wanted)
