"""What a call means under torch.compile: f runs once, wherever the graph ends, and its rule speaks
for its gradient.

Each case runs compiled and not, beside a hand-written Function where one can do the same.
"""

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

from cgshim import CustomGradientValueError, TransformationError, op_custom_gradient, op_vjp

pytestmark = pytest.mark.usefixtures("compiling")
COMPILERS = ["eager", "aot_eager"]


class Product(torch.autograd.Function):
    """x * w by hand, with the factors 3 and 5 in its rule."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, upstream):
        x, w = ctx.saved_tensors
        return 3 * upstream * w, 5 * upstream * x


def _product(x, w):
    return x * w, lambda upstream: (3 * upstream * w, 5 * upstream * x)


product = op_custom_gradient(_product)


def leaf(*values):
    return torch.tensor(values, requires_grad=True)


def compiled(function, compiler="aot_eager", **options):
    return torch.compile(function, backend=compiler, **options)


def gradients_of(function, *inputs, upstream=(2.0, -3.0)):
    return torch.autograd.grad(function(*inputs), inputs, torch.tensor(upstream))


# --- f runs once ----------------------------------------------------------------------------------


def test_f_runs_once_after_a_reset_of_dynamo():
    weight, calls = torch.nn.Parameter(torch.tensor(3.0)), []

    @op_custom_gradient
    def scaled(x):
        calls.append(1)
        return 10 * x * weight, lambda upstream, variables: (7 * upstream, [5 * upstream])

    for count in (1, 2):
        y = compiled(lambda x: scaled(x) * 2, "eager")(torch.tensor(2.0))
        assert (y.item(), len(calls)) == (120, count)
        # as reset() does with what it compiled
        torch._C._dynamo.eval_frame.reset_code(type(scaled).__call__.__code__)
        torch._dynamo.reset()


@pytest.mark.parametrize("compiler", COMPILERS)
def test_f_that_captures_a_parameter_runs_once(compiler):
    weight, calls = torch.nn.Parameter(torch.tensor(3.0)), []

    @op_custom_gradient
    def scaled(x):
        calls.append(1)
        return 10 * x * weight, lambda upstream, variables: (7 * upstream, [5 * upstream])

    y = compiled(lambda x: scaled(x) * 2, compiler)(torch.tensor(2.0))
    y.backward()
    assert (y.item(), weight.grad.item(), len(calls)) == (120, 10, 1)


class Counting(torch.nn.Module):
    """x * weight, with the factors 3 and 5 in its rule; it counts its calls in a buffer, and the
    rule its own.
    """

    def __init__(self, breaks=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0, 4.0]))
        self.register_buffer("calls", torch.tensor(0))
        self.rules = []
        self.breaks = breaks

    @op_custom_gradient
    def forward(self, x):
        self.calls.add_(1)
        if self.breaks:
            torch._dynamo.graph_break()

        def rule(upstream, variables):
            self.rules.append(len(variables))
            return 3 * upstream * variables[0], [5 * upstream * x]

        return x * self.weight, rule


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_f_with_parameters_runs_once_in_each_call(compiler, breaks):
    layer, x = Counting(breaks), leaf(1.0, -2.0)
    model = compiled(torch.nn.Sequential(torch.nn.Identity(), layer), compiler)
    for calls in (1, 2, 3):
        gradients = torch.autograd.grad(model(x), [x, layer.weight], torch.tensor([2.0, -3.0]))
        torch.testing.assert_close(gradients, gradients_of(Product.apply, x, layer.weight))
        assert (layer.calls.item(), layer.rules) == (calls, [1] * calls)


def test_f_that_breaks_the_graph_runs_once():
    calls = []

    @op_custom_gradient
    def breaking(x, w):
        calls.append(1)
        y = x * w
        torch._dynamo.graph_break()
        return y, lambda upstream: (3 * upstream * w, 5 * upstream * x)

    x, w = leaf(1.0, -2.0), leaf(2.0, 4.0)
    found = gradients_of(compiled(lambda x, w: breaking(x, w) * 2), x, w)
    torch.testing.assert_close(found, gradients_of(lambda x, w: Product.apply(x, w) * 2, x, w))
    assert calls == [1]


# --- Whatever an op is, and is given --------------------------------------------------------------


class Methods(torch.nn.Module):
    """Ops as methods of a Module: of an instance, of the class, and with an option."""

    factor = 3.0

    @op_custom_gradient
    def plain(self, x, w):
        return x * w, lambda upstream: (self.factor * upstream * w, 5 * upstream * x)

    @op_custom_gradient
    def with_option(self, x, *ws, factor=1.0):
        return x * ws[0], lambda upstream: (factor * upstream * ws[0], 5 * upstream * x)

    def forward(self, x, w, name):
        return self.plain(x, w) if name == "plain" else self.with_option(x, w, factor=3.0)


@pytest.mark.parametrize("fullgraph", [False, pytest.param(True, marks=pytest.mark.stays_in_graph)])
@pytest.mark.parametrize("name", ["plain", "with_option"])
def test_an_op_as_a_method_of_a_module(name, fullgraph):
    x, w = leaf(1.0, -2.0), leaf(2.0, 4.0)
    model = compiled(Methods(), fullgraph=fullgraph)
    found = gradients_of(lambda x, w: model(x, w, name), x, w)
    torch.testing.assert_close(found, gradients_of(Product.apply, x, w))


class Reading(torch.nn.Module):
    """An op as a method that reads a Parameter, which no graph can hold."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0, 4.0]))

    @op_custom_gradient
    def scaled(self, x):
        return x * self.weight, lambda upstream, variables: (
            3 * upstream * variables[0],
            [5 * upstream * x],
        )

    def forward(self, x):
        return self.scaled(x) * 2


def test_a_method_that_reads_a_parameter_leaves_the_graph():
    model, x = Reading(), leaf(1.0, -2.0)
    found = torch.autograd.grad(compiled(model)(x), [x, model.weight], torch.tensor([2.0, -3.0]))
    torch.testing.assert_close(
        found, gradients_of(lambda x, w: Product.apply(x, w) * 2, x, model.weight)
    )


@pytest.mark.parametrize("put", [lambda w: w, lambda w: w * 1], ids=["leaf", "clone"])
def test_functional_call_in_a_compiled_function(put):
    model, x, w = Reading(), leaf(1.0, -2.0), leaf(7.0, 11.0)
    found = gradients_of(
        compiled(lambda x, w: functional_call(model, {"weight": put(w)}, (x,))), x, w
    )
    torch.testing.assert_close(found, gradients_of(lambda x, w: Product.apply(x, w) * 2, x, w))


@pytest.mark.stays_in_graph
def test_a_tree_with_a_static_leaf_in_one_graph():
    @op_custom_gradient
    def op(pair, options):
        a, b = pair
        return a * b * options["scale"], lambda upstream: (
            [3 * upstream * b, 5 * upstream * a],
            None,
        )

    x, w = leaf(1.0, -2.0), leaf(2.0, 4.0)
    found = gradients_of(compiled(lambda x, w: op([x, w], {"scale": 2}), fullgraph=True), x, w)
    torch.testing.assert_close(found, gradients_of(Product.apply, x, w))


@dataclasses.dataclass
class Pair:
    left: object
    right: object


torch.utils._pytree.register_pytree_node(
    Pair, lambda pair: ([pair.left, pair.right], None), lambda children, _: Pair(*children)
)
TREES = {
    "list": lambda a, b: [a, b],
    "tuple in list": lambda a, b: [(a,), b],
    "list in tuple": lambda a, b: (a, [b]),
    "dict": lambda a, b: {"b": a, "a": [b]},
    "defaultdict": lambda a, b: defaultdict(list, {"b": a, "a": [b]}),
    "registered": lambda a, b: Pair(a, (b,)),
    "dict in registered": lambda a, b: Pair({"b": a, "a": b}, []),
    "registered in registered": lambda a, b: Pair(Pair((), {"b": a, "a": b}), ()),
}


@pytest.mark.stays_in_graph
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_tree_is_the_same_as_when_it_is_called(tree):
    """With the order of its leaves, in which a rule is given the upstreams."""
    op = op_custom_gradient(lambda x, w: (tree(2 * x, 3 * w), lambda u, v: (5 * u, 7 * v)))
    function = compiled(lambda x, w: op(x, w), "eager", fullgraph=True)
    shown = []
    for call in (op, function):
        x, w = leaf(1.0, -2.0), leaf(2.0, 4.0)
        output = call(x, w)
        sum((11.0 * y * y).sum() for y in torch.utils._pytree.tree_leaves(output)).backward()
        values = torch.utils._pytree.tree_map(lambda t: t.tolist(), output)
        shown.append((values, x.grad.tolist(), w.grad.tolist()))
    assert shown[0] == shown[1]


@pytest.mark.stays_in_graph
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_tree_that_holds_all_tensors_of_a_call(tree):
    """A registered class is none that tells the framework of the call."""

    def f(pair):
        a, b = torch.utils._pytree.tree_leaves(pair)  # in a dict's own order
        return a * b, lambda u: tree(3 * u * b, 5 * u * a)

    op = op_custom_gradient(f)
    for function in (op, compiled(op, fullgraph=True)):
        x, w = leaf(1.0, -2.0), leaf(2.0, 4.0)
        found = gradients_of(lambda x, w, function=function: function(tree(x, w)), x, w)
        torch.testing.assert_close(found, gradients_of(Product.apply, x, w))


@dataclasses.dataclass
class Linear:
    w: object
    bias: object = None
    name: object = None


torch.utils._pytree.register_dataclass(Linear)


@pytest.mark.stays_in_graph
@pytest.mark.parametrize("bias", [None, leaf(5.0, 7.0)])
def test_none_in_a_dataclass_which_torch_takes_for_no_field(bias):
    """Its registry takes a dataclass apart by the fields that are not None."""

    def f(x, linear):
        zero = 0 if linear.bias is None else linear.bias
        return x * linear.w + zero, lambda u: (3 * u * linear.w, Linear(5 * u * x))

    op = op_custom_gradient(f)
    for function in (op, compiled(op, fullgraph=True)):
        x, w = leaf(1.0, -2.0), leaf(2.0, 4.0)
        found = gradients_of(lambda x, w, call=function: call(x, Linear(w, bias)), x, w)
        torch.testing.assert_close(found, gradients_of(Product.apply, x, w))


def test_a_field_of_a_dataclass_has_its_name_in_messages():
    op = op_custom_gradient(lambda linear: (linear.w, lambda u: Linear(u.sum())), name="op")
    with pytest.raises(CustomGradientValueError, match=r"^op: the gradient of linear\.w must have"):
        op(Linear(leaf(1.0, -2.0))).sum().backward()


@pytest.mark.stays_in_graph
@pytest.mark.parametrize("keys", ["za", "az"])
def test_a_dict_has_its_keys_in_the_order_in_which_it_is_called(keys):
    """As in eager mode, in an argument and in an output, but flat by sorted key."""

    @op_custom_gradient
    def op(tree):
        a, b = tree.values()
        return {"z": a * b, "y": a}, lambda of_y, of_z: {
            key: (3 * of_z * b, 5 * of_z * a)[at] for at, key in enumerate(tree)
        }

    function = compiled(lambda x, w: op(dict(zip(keys, (x, w), strict=True))), fullgraph=True)
    x, w = leaf(1.0, -2.0), leaf(2.0, 4.0)
    assert list(function(x, w)) == ["z", "y"]
    found = gradients_of(lambda x, w: function(x, w)["z"], x, w)
    torch.testing.assert_close(found, gradients_of(Product.apply, x, w))


def test_a_numpy_argument_is_a_constant():
    x, w = leaf(1.0, -2.0), np.array([2.0, 4.0], np.float32)
    y = compiled(lambda x, w: product(x, w) * 2)(x, w)
    assert y.tolist() == [4, -16]
    (gradient,) = torch.autograd.grad(y, x, torch.tensor([2.0, -3.0]))
    torch.testing.assert_close(
        gradient, gradients_of(Product.apply, x, 2 * torch.from_numpy(w).requires_grad_())[0]
    )


@op_custom_gradient
def product_with_tree(tree, x):
    return x * tree["w"][0], lambda upstream: (None, 3 * upstream * tree["w"][0])


@pytest.mark.stays_in_graph
@pytest.mark.parametrize("w", [np.array([2.0, 4.0], np.float32), np.array([1, 0]) > 0])
@pytest.mark.parametrize("op", [
    lambda x, w: product(x, w), lambda x, w: product_with_tree({"w": [w]}, x),
], ids=["an argument", "in a tree"])  # fmt: skip
def test_a_numpy_array_is_a_constant_within_a_whole_graph(op, w):
    x = leaf(1.0, -2.0)
    for function in (op, lambda x, _: op(x, w)):
        y = compiled(function, fullgraph=True)(x, w)
        (gradient,) = torch.autograd.grad(y, x, torch.tensor([2.0, -3.0]))
        assert y.tolist() == [1.0 * w[0], -2.0 * w[1]]
        assert gradient.tolist() == [6.0 * w[0], -9.0 * w[1]]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_an_output_is_changed_in_place(compiler):
    x, w = leaf(1.0, -2.0), leaf(2.0, 4.0)
    expected = gradients_of(lambda x, w: Product.apply(x, w).mul_(3), x, w)
    function = compiled(lambda x, w: product(x, w), compiler)
    torch.testing.assert_close(gradients_of(lambda x, w: function(x, w).mul_(3), x, w), expected)
    torch.testing.assert_close(
        gradients_of(compiled(lambda x, w: product(x, w).mul_(3), compiler), x, w), expected
    )  # fmt: skip


@op_custom_gradient
def matmul(x, w):
    return x @ w, lambda upstream: (3 * upstream @ w.T, 5 * x.T @ upstream)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_rule_runs_under_autocast_as_f_did(compiler):
    x, w = (torch.tensor(values, requires_grad=True) for values in ([[1.0, 2.0]], [[0.5], [-0.25]]))

    def gradients(op):
        with torch.autocast("cpu", torch.bfloat16):
            y = op(x, w)
        return y.dtype, torch.autograd.grad(y, (x, w), torch.tensor([[3.0]], dtype=y.dtype))

    dtype, found = gradients(compiled(lambda x, w: matmul(x, w), compiler))
    assert dtype is torch.bfloat16
    torch.testing.assert_close(found, gradients(matmul)[1])
    torch.testing.assert_close(found[0], torch.tensor([[4.5, -2.25]]))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_an_op_that_is_made_in_the_compiled_function(compiler):
    x, w = leaf(1.0, -2.0), leaf(2.0, 4.0)
    found = gradients_of(compiled(lambda x, w: op_custom_gradient(_product)(x, w), compiler), x, w)
    torch.testing.assert_close(found, gradients_of(Product.apply, x, w))


def test_another_op_of_that_name_with_another_default():
    def scaled_by(factor):
        @op_custom_gradient
        def op(x, factor=factor, *, slope=7 * factor):
            return x * factor, lambda upstream: slope * upstream

        return op

    function, x = compiled(lambda x: op(x)), leaf(1.0, -2.0)
    for factor in (3.0, 5.0):
        op = scaled_by(factor)
        (gradient,) = gradients_of(function, x)
        assert function(x).tolist() == [factor, -2 * factor]
        assert gradient.tolist() == [14 * factor, -21 * factor]


# --- Transformations of what is compiled ----------------------------------------------------------


def _sine(x):
    return x.sin(), lambda upstream: upstream * 7 * x.cos()


def tangent_of(function, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(
            function(forward_ad.make_dual(x, torch.full_like(x, 2.0)))
        ).tangent


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("gradients", [False, True])
def test_a_compiled_function_is_called_again_under_dual_numbers(compiler, gradients):
    promised = op_custom_gradient(_sine, forward_mode=True)
    x = torch.tensor([0.5, -1.25])
    with torch.set_grad_enabled(gradients):
        function = compiled(lambda x: promised(x), compiler)
        refusing = compiled(lambda x: op_custom_gradient(_sine)(x), compiler)
        for f in (function, refusing):
            torch.testing.assert_close(f(x), x.sin())
        torch.testing.assert_close(tangent_of(function, x), 14 * x.cos())
        torch.testing.assert_close(jvp(function, (x,), (x,))[1], 7 * x * x.cos())
        with pytest.raises(
            TransformationError, match="forward mode needs a rule that is linear in upstream"
        ):
            tangent_of(refusing, x)
        torch.testing.assert_close(function(x), x.sin())


@pytest.mark.parametrize("compiler", COMPILERS)
def test_vmap_of_grad_of_an_op(compiler):
    x = torch.tensor([0.5, -1.25])
    torch.testing.assert_close(
        compiled(vmap(grad(op_custom_gradient(_sine))), compiler)(x), 7 * x.cos()
    )


# --- Compiled autograd ----------------------------------------------------------------------------


@pytest.mark.parametrize("of_backward", ["eager", "aot_eager"])
@pytest.mark.parametrize("of_forward", [None, "eager"])
def test_compiled_autograd(of_forward, of_backward):
    """The graph of the backward pass is found again by its shape: each rule has to be that of its
    own call.
    """
    for factor in (7.0, 11.0):

        @op_custom_gradient
        def op(x, w, factor=factor):
            y = x * w
            return y * y, lambda upstream: (factor * upstream * y, 5 * upstream * x)

        x, w = leaf(1.0, -2.0), leaf(2.0, 4.0)
        function = op if of_forward is None else compiled(lambda x, w, op=op: op(x, w), of_forward)
        with compiled_autograd._enable(torch.compile(backend=of_backward)):
            function(x, w).backward(torch.tensor([2.0, -3.0]))
        assert x.grad.tolist() == [4 * factor, 24 * factor]
        assert w.grad.tolist() == [10, 30]


class Exp(torch.autograd.Function):
    """exp(x * w) by hand, whose rule keeps an argument and the output."""

    @staticmethod
    def forward(ctx, x, w):
        y = torch.exp(x * w)
        ctx.save_for_backward(w, y)
        return y

    @staticmethod
    def backward(ctx, upstream):
        w, y = ctx.saved_tensors
        return 3 * upstream * w * y, 5 * upstream * y


def _exp(x, w):
    y = torch.exp(x * w)
    return y, lambda upstream: (3 * upstream * w * y, 5 * upstream * y)


@pytest.mark.stays_in_graph
@pytest.mark.parametrize("function", [Exp.apply, op_custom_gradient(_exp)], ids=["by hand", "op"])
def test_compiled_autograd_of_kept_arguments_and_outputs(function):
    """It finds what is saved as autograd saves it, and fails on anything else that ctx holds."""
    compiled_autograd.reset()
    expected = gradients_of(Exp.apply, leaf(1.0, -2.0), leaf(2.0, 4.0))
    x, w = leaf(1.0, -2.0), leaf(2.0, 4.0)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        compiled(lambda x, w: function(x, w), fullgraph=True)(x, w).backward(
            torch.tensor([2.0, -3.0])
        )
    torch.testing.assert_close((x.grad, w.grad), expected)


def test_compiled_autograd_of_variables():
    model, x = Reading(), leaf(1.0, -2.0)

    @torch.compile(backend="aot_eager")
    def step(x):
        (model(x) * torch.tensor([2.0, -3.0])).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        step(x)
    expected = gradients_of(lambda x, w: Product.apply(x, w) * 2, x, model.weight)
    torch.testing.assert_close((x.grad, model.weight.grad), expected)


# --- Sizes that a second batch makes symbolic -----------------------------------------------------


class Mean(torch.autograd.Function):
    """The mean by hand, which keeps a size; with the factor 7 in its rule."""

    @staticmethod
    def forward(ctx, x):
        ctx.size = x.shape[0]
        return x.mean()

    @staticmethod
    def backward(ctx, upstream):
        return (upstream * 7 / ctx.size).expand(ctx.size)


def sized(function):
    return op_custom_gradient(lambda x: (x.mean(), function(x)))


def _of_shape(x):
    shape = x.shape
    return lambda u: (u * 7 / shape[0]).expand(shape)


def _of_a_list(x):
    sizes = [x.shape[0], x.numel()]
    return lambda u: (u * 7 / sizes[1]).expand(sizes[0])


def _of_another_function(x):
    size = len(x)

    def spread(u):
        return (u * 7 / size).expand(size)

    return lambda u: spread(u)


def _with_arguments(x):
    double = 2 * x.shape[0]
    return lambda x, upstream: (upstream * 14 / double).expand(double // 2)


spread = op_custom_gradient(lambda x, n: (x.mean(), lambda u: ((u * 7 / n).expand(n), None)))
optional = op_custom_gradient(lambda x, *, n: (x.mean(), lambda u: (u * 7 / n).expand(n)))
in_a_tree = op_custom_gradient(
    lambda tree: (
        tree["x"].mean(),
        lambda u: {"x": (u * 7 / tree["n"]).expand(tree["n"]), "n": None},
    )
)


def _returned(x):
    size = x.shape[0]
    return (x.mean(), size), lambda upstream: (upstream[0] * 7 / size).expand(size)


returned = op_custom_gradient(_returned)
SIZED = {
    "by hand": Mean.apply,
    "shape": sized(_of_shape),
    "list": sized(_of_a_list),
    "function": sized(_of_another_function),
    "arguments": sized(_with_arguments),
    "static leaf": lambda x: spread(x, x.shape[0]),
    "option": lambda x: optional(x, n=x.shape[0]),
    "tree": lambda x: in_a_tree({"x": x, "n": x.shape[0]}),
    "output": lambda x: returned(x)[0] * returned(x)[1] / x.shape[0],
    "two ops": lambda x: (
        spread(x, len(x)) / 2 + optional(x[1:], n=x.shape[0] - 1) * 0 + Mean.apply(x) / 2
    ),
}


@pytest.mark.stays_in_graph
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("function", SIZED.values(), ids=SIZED)
def test_a_rule_keeps_a_size_that_becomes_symbolic(function, dynamic):
    compiled = torch.compile(
        lambda x: function(x) * 2, backend="aot_eager", dynamic=dynamic, fullgraph=True
    )
    for size in (3, 5, 8):
        x = leaf(*map(float, range(size)))
        value = compiled(x)
        assert value.item() == size - 1
        torch.testing.assert_close(torch.autograd.grad(value, x)[0], torch.full((size,), 14 / size))


# --- Outputs in the memory of an argument ---------------------------------------------------------

reversal = op_custom_gradient(lambda x: (x, lambda u: -7 * u))
tail = op_custom_gradient(lambda x: (x[1:], lambda u: torch.cat([u.new_zeros(1), -7 * u])))
CHANGED = {
    "in place": (lambda y, x: y.mul_(2), [-14.0, -14.0, -14.0]),
    "relu": (lambda y, x: torch.relu_(y), [-7.0, -7.0, -7.0]),
    "the argument too": (lambda y, x: y.add_(1) * x[-len(y) :], [-5.0, -11.0, -17.0]),
}


@pytest.mark.stays_in_graph
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("change", CHANGED)
@pytest.mark.parametrize("made", [False, True])
def test_an_output_that_aliases_an_argument_changes_in_place(change, made, compiler):
    """Not compiled, and compiled by hand, this is an error of torch's own: both are views. Compiled
    it is a copy.
    """
    function, gradient = CHANGED[change]
    for op, expected in ((reversal, gradient), (tail, [0.0, *gradient[1:]])):
        x = leaf(1.0, 2.0, 3.0)

        def loss(x, op=op):
            argument = x * 1 if made else x
            return function(op(argument), argument).sum()

        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            loss(x)
        value = torch.compile(loss, backend=compiler, fullgraph=True)(x)
        assert torch.autograd.grad(value, x)[0].tolist() == expected
        assert x.tolist() == [1, 2, 3]


def test_a_kept_argument_is_changed_in_place_later():
    """By hand too: what a graph saves is read as it is then."""
    squared = op_custom_gradient(lambda x: (x * x, lambda u: 7 * u * x))

    def loss(x):
        argument = x * 1
        y = squared(argument)
        argument.mul_(3)
        return y.sum()

    x = leaf(1.0, 2.0, 3.0)
    try:
        (gradient,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(x), x)
    except RuntimeError:
        return
    assert gradient.tolist() == [7, 14, 21]


@pytest.mark.parametrize(
    ("decorated", "message"),
    [
        (
            {"once_differentiable": True},
            "its gradient is once_differentiable",
        ),
    ],
    ids=["once_differentiable"],
)
def test_why_a_graph_breaks(decorated, message, refuses_whole_graph):
    op = op_custom_gradient(lambda x: (x * x, lambda u: u * 7), **decorated)
    with refuses_whole_graph(message):
        torch.compile(op, backend="eager", fullgraph=True)(leaf(2.0))


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


# --- What f has made, and the rule differentiates -------------------------------------------------


def _pulled_back(vjp):
    def f(x):
        y, pullback = vjp(lambda x: x * torch.tanh(x), x)
        return y, lambda u: 7 * pullback(u)[0]

    return op_custom_gradient(f)


@pytest.mark.parametrize("vjp", [op_vjp, torch.func.vjp])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_pullback_that_f_has_made(vjp, compiler):
    """Dynamo hands its tensors to the backward pass without their graph: the gradient would be
    zero.
    """
    op = _pulled_back(vjp)
    found = gradients_of(compiled(lambda x: op(x), compiler), leaf(1.0, 2.0))
    torch.testing.assert_close(found, gradients_of(op, leaf(1.0, 2.0)))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(lambda x: op(x), compiler, fullgraph=True)(leaf(1.0, 2.0))


def test_a_pullback_of_the_rule_stays_in_the_graph():
    def f(x):
        fn = lambda x: x * torch.tanh(x)
        return fn(x), lambda u: 7 * op_vjp(fn, x)[1](u)[0]

    op = op_custom_gradient(f)
    found = gradients_of(compiled(op, fullgraph=True), leaf(1.0, 2.0))
    torch.testing.assert_close(found, gradients_of(op, leaf(1.0, 2.0)))


# --- Default values of a rule ---------------------------------------------------------------------


def _and_a_size(x):
    return x * 2, lambda u, size=x.shape[0]: u * size


def _and_two(x):
    return x * 2, lambda upstream, factor=2, shift=0: upstream * factor + shift


def _and_needed(x):
    return x * 2, lambda u, factor=2, needs_input_grad=None: u * factor * needs_input_grad[0]


def _with_arguments(x):
    return x * 2, lambda x, upstream=None, factor=2: upstream * factor


def _a_tree(x):
    return (x * 2, x * 3, x), lambda u, factor=1: u[0] * 2 * factor


def _several(x):
    return (x * 2, x * 3), lambda one, other, factor=2: one * factor + other


def _several_and_variables(x):
    def rule(one, other, variables=None):
        return one * 2 + other

    return (x * 2, x * 3), rule


IN_GRAPH = [_and_a_size, _and_two, _and_needed, _with_arguments, _a_tree]


@pytest.mark.parametrize("f", [*IN_GRAPH, _several, _several_and_variables])
def test_a_rule_with_default_values(f):
    """Dynamo does not tell how many there are: it hides them, or fails."""
    op = op_custom_gradient(f)
    first = lambda x: torch.utils._pytree.tree_leaves(op(x))[0]
    (found,) = gradients_of(compiled(first, fullgraph=f in IN_GRAPH), leaf(1.0, 2.0))
    assert found.tolist() == [4, -6]
