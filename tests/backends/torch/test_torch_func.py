"""The transformations of torch.func and dual numbers, nested in each other and under torch.compile.

Rules are wrong on purpose, by a factor: a number that autodiff found by itself does not pass.
"""

import contextlib
import functools

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from cgshim import (
    CustomGradientTypeError,
    TransformationError,
    op_custom_gradient,
    op_custom_jvp,
    op_grad,
    op_vjp,
)

X = torch.tensor([0.5, -1.25, 2.0], dtype=torch.float64)


def _sine(x):
    slope = x.cos()
    return x.sin(), lambda upstream: upstream * 7 * slope


sine = op_custom_gradient(_sine)
linear_sine = op_custom_gradient(_sine, forward_mode=True)


@op_custom_gradient(forward_mode=True)
def weighted(tree, power, count):
    """Outputs of three shapes, an integer among them, from a tree, a static leaf and an integer."""
    a, b = tree["a"], tree["b"]

    def rule(u, of_count, v):
        return {"b": 7 * u * a[:, None] ** power, "a": 5 * (u * b).sum(-1) + v * a}, None, None

    return (a[:, None] ** power * b, count + 1, a.square()), rule


def expected(order, x):
    """The derivatives of linear_sine(x) ** 2: 7 cos for that of the op, autodiff's for that of its
    residual.
    """
    s, c = x.sin(), x.cos()
    return {1: 14 * s * c, 2: 98 * c * c - 14 * s * s, 3: -196 * c * s - 98 * c * s - 14 * s * c}[
        order
    ]


# --- Orders and nestings --------------------------------------------------------------------------


def _of_cube(x):
    return cube(x) * x


@op_custom_gradient
def cube(x):
    square = x * x
    return square * x, lambda upstream: upstream * 3 * square


@pytest.mark.parametrize(("order", "value"), [(1, 32.0), (2, 48.0), (3, 48.0), (4, 24.0)])
def test_every_order_goes_through_the_residuals(order, value):
    derivative = functools.reduce(lambda f, _: grad(f), range(order), _of_cube)
    assert derivative(torch.tensor(2.0)) == value
    assert vmap(derivative)(torch.tensor([2.0, 2.0])).tolist() == [value, value]


NESTINGS = {
    "grad": (1, lambda f: vmap(grad(f))),
    "grad of vmap": (1, lambda f: grad(lambda x: vmap(f)(x).sum())),
    "vjp": (1, lambda f: lambda x: vjp(lambda x: f(x), x)[1](torch.ones_like(x))[0]),
    "jacrev": (1, lambda f: lambda x: jacrev(f)(x).diagonal()),
    "jacrev of jacrev": (2, lambda f: lambda x: torch.einsum("iii->i", jacrev(jacrev(f))(x))),
    "grad of grad": (2, lambda f: vmap(grad(grad(f)))),
    "vmap of vmap of grad": (1, lambda f: lambda x: vmap(vmap(grad(f)))(x[:, None])[:, 0]),
    "grad of vmap of grad": (2, lambda f: grad(lambda x: vmap(grad(f))(x).sum())),
    "eager backward of vmap": (1, lambda f: lambda x: _backward(lambda x: vmap(f)(x), x)),
    "eager backward of grad": (2, lambda f: lambda x: _backward(vmap(grad(f)), x)),
    "grads in a batch": (1, lambda f: lambda x: _batched_backward(f, x).diagonal()),
}
FORWARD_NESTINGS = {
    "jvp": (1, lambda f: lambda x: jvp(f, (x,), (torch.ones_like(x),))[1]),
    "jacfwd": (1, lambda f: lambda x: jacfwd(f)(x).diagonal()),
    "hessian": (2, lambda f: lambda x: hessian(lambda x: f(x).sum())(x).diagonal()),
    "jacfwd of jacfwd": (2, lambda f: lambda x: torch.einsum("iii->i", jacfwd(jacfwd(f))(x))),
    "jacrev of jacfwd": (2, lambda f: lambda x: torch.einsum("iii->i", jacrev(jacfwd(f))(x))),
    "jacfwd of hessian": (
        3,
        lambda f: lambda x: torch.einsum("iii->i", jacfwd(hessian(lambda x: f(x).sum()))(x)),
    ),
    "vmap of jvp": (1, lambda f: vmap(lambda x: jvp(f, (x,), (torch.ones_like(x),))[1])),
    "jvp of vmap": (1, lambda f: lambda x: jvp(vmap(f), (x,), (torch.ones_like(x),))[1]),
    "dual numbers": (1, lambda f: lambda x: _dual(f, x)),
    "linearize": (1, lambda f: lambda x: torch.func.linearize(f, x)[1](torch.ones_like(x))),
}


def _backward(f, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x).sum(), x)[0]


def _batched_backward(f, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x), x, torch.eye(len(x), dtype=x.dtype), is_grads_batched=True)[0]


def _dual(f, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


@pytest.mark.parametrize("op", [sine, linear_sine], ids=["reverse", "forward_mode"])
@pytest.mark.parametrize("nesting", NESTINGS)
def test_reverse_mode(nesting, op):
    order, transformation = NESTINGS[nesting]
    torch.testing.assert_close(transformation(lambda x: op(x) ** 2)(X), expected(order, X))


# linearize of torch 2.13
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr:UserWarning")
@pytest.mark.parametrize("nesting", FORWARD_NESTINGS)
def test_forward_mode_is_the_transpose_of_the_rule(nesting):
    order, transformation = FORWARD_NESTINGS[nesting]
    torch.testing.assert_close(transformation(lambda x: linear_sine(x) ** 2)(X), expected(order, X))


# linearize of torch 2.13
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr:UserWarning")
@pytest.mark.parametrize("nesting", FORWARD_NESTINGS)
def test_forward_mode_that_was_not_promised_is_refused(nesting):
    _, transformation = FORWARD_NESTINGS[nesting]
    with pytest.raises(TransformationError) as error:
        transformation(sine)(X)
    assert str(error.value) == (
        "_sine: forward mode needs a rule that is linear in upstream, got jvp, jacfwd or a dual number; "
        "if it is, say so with op_custom_gradient(forward_mode=True)"
    )


@pytest.mark.parametrize("factor", [7, 7j])
def test_a_complex_tangent_that_is_zero_but_for_rounding(factor):
    """The parts of a complex product cancel: what is left of them is no measure of its size."""
    z = torch.tensor([0.3 + 0.2j, -0.5 + 0.7j, -0.7 + 0.1j], dtype=torch.complex128)
    op = op_custom_gradient(lambda z: (z.imag, lambda u: factor * u * z), forward_mode=True)
    _, tangent = jvp(op, (z,), (2j * z * factor,))
    torch.testing.assert_close(tangent, torch.zeros(3, dtype=torch.float64))


def test_forward_mode_past_an_op_needs_no_promise():
    value, tangent = jvp(lambda t: sine(X) * t, (torch.tensor(2.0),), (torch.tensor(3.0),))
    torch.testing.assert_close((value, tangent), (2 * X.sin(), 3 * X.sin()))


def test_forward_mode_of_a_tree():
    a, b, count = torch.randn(2), torch.randn(2, 3), torch.tensor(4)
    tangents = torch.randn(2), torch.randn(2, 3)
    (_, count, _), (of_product, of_count, of_square) = jvp(
        lambda a, b: weighted({"b": b, "a": a}, 1, count), (a, b), tangents
    )
    torch.testing.assert_close(
        of_product, 5 * tangents[0][:, None] * b + 7 * a[:, None] * tangents[1]
    )
    torch.testing.assert_close(of_square, tangents[0] * a)
    assert (count, of_count) == (5, 0)


# --- vmap -----------------------------------------------------------------------------------------


@op_custom_gradient
def product(x, y):
    return x * y, lambda upstream: (3 * upstream * y, 5 * upstream * x)


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize(
    ("in_dims", "shapes"), [((0, None), (1, 0)), ((None, 0), (0, 1)), ((0, 0), (1, 1))]
)
def test_vmap_over_some_arguments(in_dims, shapes, size):
    x, y = (torch.randn((size, 2) if batched else 2) for batched in shapes)
    of_x, of_y = vmap(grad(lambda x, y: (2 * product(x, y)).sum(), argnums=(0, 1)), in_dims)(x, y)
    torch.testing.assert_close(of_x, (6 * y).expand(size, 2))
    torch.testing.assert_close(of_y, (10 * x).expand(size, 2))


@pytest.mark.parametrize("by", [grad, lambda f: lambda y: jacobian(f, y)])
def test_an_output_without_the_batch_has_its_upstream_once(by):
    """generate_vmap_rule of a Function by hand gives each member the whole of it: 168 becomes 504."""

    @op_custom_gradient
    def both(x, y):
        return (x * y, y * y), lambda d1, d2: (7 * d1 * y, 5 * (d1 * x).sum() + 3 * d2 * y)

    x, y, weights = (
        torch.tensor([[3.0], [5.0], [11.0]]),
        torch.tensor(7.0),
        torch.tensor([1.0, 2.0, 5.0]),
    )

    def loss(y):
        products, squares = vmap(both, (0, None))(x, y)
        assert squares.tolist() == [49, 49, 49]
        return (weights * (products.sum(-1) + squares)).sum()

    of_products = 5 * (weights * x.sum(-1)).sum()
    torch.testing.assert_close(by(loss)(y), of_products + 3 * weights.sum() * y)


def test_an_output_without_an_outer_batch_has_its_upstream_once():
    op = op_custom_gradient(
        lambda x, y: ((x * y, x * x), lambda d1, d2: (7 * d1 * y + 3 * d2 * x, 5 * d1 * x))
    )
    x, y, weights = (
        torch.tensor([3.0, 5.0]),
        torch.tensor([7.0, 11.0, 13.0]),
        torch.tensor([1.0, 2.0, 5.0]),
    )

    def loss(x):
        products, squares = vmap(vmap(op, (0, None)), (None, 0))(x, y)
        return (weights[:, None] * (products + squares)).sum()

    torch.testing.assert_close(grad(loss)(x), 7 * (weights * y).sum() + 3 * weights.sum() * x)


@pytest.mark.parametrize("derivative", [jacfwd, jacrev])
@pytest.mark.parametrize("op", [
    op_custom_gradient(lambda x, y: (y * y, lambda u: (7 * u * x, 5 * u * y)), forward_mode=True),
    op_custom_jvp(lambda x, y: (y * y, lambda dx, dy: 7 * dx * x + 5 * dy * y)),
])  # fmt: skip
def test_an_output_without_the_batch_has_a_batch_of_tangents(op, derivative):
    """generate_vmap_rule of a Function by hand gives each the sum of all."""
    x, y = torch.tensor([3.0, 5.0, 11.0]), torch.tensor(7.0)
    by_x = derivative(lambda x: vmap(op, (0, None))(x, y))(x)
    torch.testing.assert_close(by_x, 7 * torch.diag(x))
    by_y = derivative(lambda y: vmap(op, (0, None))(x, y))(y)
    torch.testing.assert_close(by_y, torch.full((3,), 35.0))
    _, tangents = jvp(lambda x: vmap(vmap(op, (0, None)), (None, 0))(x, y[None]), (x,), (x,))
    torch.testing.assert_close(tangents, 7 * (x * x)[None])


def test_gradients_per_sample_of_a_module():
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 3)
            self.weight = torch.nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            return product(self.linear(x), self.weight.expand(3))

    module, x = Scale(), torch.randn(4, 2)
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    loss = lambda parameters, x: functional_call(module, parameters, (x,)).sum()
    gradients = vmap(grad(loss), (None, 0))(parameters, x)
    torch.testing.assert_close(gradients["weight"], 5 * module.linear(x).sum(-1).detach())
    torch.testing.assert_close(gradients["linear.weight"], (4.5 * x)[:, None].expand(4, 3, 2))


# --- Captured values ------------------------------------------------------------------------------


def test_variables_are_found_under_functional_call():
    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))

        def forward(self, x):
            @op_custom_gradient(variables=[self.weight])
            def line(x):
                def rule(upstream, variables):
                    (weight,) = variables
                    return 3 * upstream * weight[1], [
                        5 * torch.stack([upstream.sum(), (upstream * x).sum()])
                    ]

                return self.weight[0] + self.weight[1] * x, rule

            return line(x)

    x, weight = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])
    of_weight, of_x = grad(
        lambda w, x: 2 * functional_call(Line(), {"weight": w}, (x,)).sum(), (0, 1)
    )(weight, x)
    assert of_weight.tolist() == [30.0, 60.0]
    assert of_x.tolist() == [30.0, 30.0, 30.0]


@pytest.mark.parametrize(
    "transformation", [grad, lambda f: lambda x: vmap(grad(f))(x[None]), jacrev]
)
def test_a_tensor_of_an_outer_level_is_refused(transformation):
    @op_custom_gradient
    def scaled(x, *, by):
        return x * by, lambda upstream: upstream * by

    def outer(y):
        return transformation(lambda x: scaled(x, by=y * 2))(torch.tensor(3.0)).sum()

    with pytest.raises(CustomGradientTypeError, match=r"scaled: .*pass them as arguments"):
        grad(outer)(torch.tensor(2.0))


def test_an_inner_op_defines_the_second_order(fused):
    x = torch.tensor(2.0)
    assert grad(fused)(x) == 32
    assert grad(grad(fused))(x) == 10
    assert vmap(grad(grad(fused)))(x[None]) == 10


# --- Never dropped --------------------------------------------------------------------------------


@op_custom_gradient(forward_mode=True)
def dead_sine(x):
    return x.sin(), lambda upstream: torch.zeros_like(upstream)


WAYS = {
    "plain": dead_sine,
    "vmap": vmap(dead_sine),
    "grad": grad(lambda x: dead_sine(x).sum()),
    "grad of vmap": grad(lambda x: vmap(dead_sine)(x).sum()),
    "vmap of grad": vmap(grad(dead_sine)),
    "jacrev": lambda x: jacrev(dead_sine)(x).sum(0),
    "jvp": lambda x: jvp(dead_sine, (x,), (torch.ones_like(x),))[1],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
@pytest.mark.usefixtures("compiling")
def test_a_rule_is_never_dropped(way, compiler):
    transformed = WAYS[way] if compiler is None else torch.compile(WAYS[way], backend=compiler)
    x = X.clone().requires_grad_()
    result = transformed(x)
    if way in ("plain", "vmap"):
        torch.testing.assert_close(result, X.sin())
        (result,) = torch.autograd.grad(result.sum(), x)
    assert result.tolist() == [0, 0, 0]


def test_a_tensor_that_outlived_its_transformation():
    """torch wraps it still, and a Function that does not look inside is connected with nothing."""
    kept = []

    def keep(x):
        kept.append(x)
        return (x * x).sum()

    x = torch.tensor([2.0, 3.0], requires_grad=True)
    torch.func.grad(keep)(x)
    square = op_custom_gradient(lambda x: (x * x, lambda upstream: 7 * upstream * x))
    (gradient,) = torch.autograd.grad(square(kept[0]), x, torch.tensor([5.0, 11.0]))
    assert gradient.tolist() == [70.0, 231.0]


# --- A rule given forward -------------------------------------------------------------------------


@op_custom_jvp
def given_forward(x):
    y = x.exp()
    return y, lambda dx: 3 * y * dx


def test_the_tangent_of_jvp_fn_is_differentiable():
    x, v = torch.tensor(0.7, requires_grad=True), torch.tensor(0.5)
    (gradient,) = torch.autograd.grad(jvp(given_forward, (x,), (v,))[1], x)
    torch.testing.assert_close(gradient, 9 * x.exp() * v)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(given_forward(forward_ad.make_dual(x, v))).tangent
        (gradient,) = torch.autograd.grad(tangent, x)
    torch.testing.assert_close(gradient, 9 * x.exp() * v)


def test_forward_over_forward_of_jvp_fn():
    x = torch.tensor(0.7)
    second = jacfwd(jacfwd(lambda x: given_forward(x) ** 2))(x)
    torch.testing.assert_close(second, 36 * (2 * x).exp())


def test_a_jvp_runs_f_and_jvp_fn_once_on_values():
    runs = []

    @op_custom_jvp
    def op(x):
        runs.append("f")

        def pushed(dx):
            runs.append(float(dx))
            return 7 * dx

        return 2 * x, pushed

    assert jvp(op, (torch.tensor(2.0),), (torch.tensor(3.0),))[1] == 21.0
    assert runs == ["f", 3.0]


def test_f_with_a_jvp_fn_may_not_capture_differentiated_tensors():
    w = torch.tensor(2.0, requires_grad=True)
    op = op_custom_jvp(lambda x: (x * w, lambda dx: dx * 3), name="reads")
    for derivative in (
        lambda x: jvp(op, (x,), (x,)),
        lambda x: jvp(
            lambda w: jvp(
                op_custom_jvp(lambda x: (x * w, lambda dx: dx), name="reads"), (x,), (x,)
            )[0],
            (x,),
            (x,),
        ),
        lambda x: op(x.requires_grad_()),
    ):
        with pytest.raises(CustomGradientTypeError, match=r"reads: .*argument"):
            derivative(torch.tensor(3.0))


def test_f_of_a_jvp_fn_may_not_write_into_its_argument():
    op = op_custom_jvp(lambda x: (x.mul_(2), lambda dx: dx), name="writes")
    with pytest.raises(CustomGradientTypeError, match="writes: f must not write into arguments"):
        jvp(op, (torch.tensor(3.0),), (torch.tensor(1.0),))


def _cubed(x):
    return x**3


def _by_arguments(pull):
    return lambda x: (_cubed(x), lambda x, upstream: 7 * pull(_cubed, x)[1](upstream)[0])


def _kept(pull):
    return lambda x: (_cubed(x), lambda upstream: 7 * pull(_cubed, x)[1](upstream)[0])


@pytest.mark.parametrize("pull", [vjp, op_vjp])
@pytest.mark.parametrize("rule", [_by_arguments, _kept])
def test_a_rule_differentiates_a_helper_below_a_vmap(rule, pull):
    """What torch.func wraps in the rule is of a batch that the rule is given."""
    op = op_custom_gradient(rule(pull))
    assert torch.equal(vmap(grad(op))(X), 21 * X**2)
    assert torch.equal(grad(lambda x: vmap(op)(x).sum())(X), 21 * X**2)
    torch.testing.assert_close(vmap(grad(grad(op)))(X), 42 * X)


def _by_op_grad(x):
    return _cubed(x), lambda u: 7 * u * op_grad(lambda x: _cubed(x).sum())(x)


@pytest.mark.parametrize("f", [_by_arguments(op_vjp), _kept(op_vjp), _by_op_grad])
def test_a_rule_differentiates_a_helper_after_a_transformation(f):
    """The pullback of torch.func.vjp comes later: what it has wrapped says that it requires grad."""
    op = op_custom_gradient(f, forward_mode=True)
    first = lambda x: vjp(op, x)[1](2 * X)[0]
    torch.testing.assert_close(first(X), 42 * X**3)
    torch.testing.assert_close(vjp(first, X)[1](X)[0], 84 * X**3)
    torch.testing.assert_close(grad(lambda x: (first(x) * X).sum())(X), 84 * X**3)
    torch.testing.assert_close(jvp(first, (X,), (X,))[1], 84 * X**3)
    torch.testing.assert_close(vmap(lambda x: vjp(op, x)[1](x)[0])(X), 21 * X**3)
    kept = []
    vjp(lambda x: kept.append(vjp(op, x)[1]) or x, X)
    torch.testing.assert_close(kept[0](X)[0], 21 * X**3)


# --- Rules without gradients ----------------------------------------------------------------------


class Stopped(torch.autograd.Function):
    """By hand: x * w, whose rule makes constants."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @torch.no_grad()
    def backward(ctx, u):
        x, w = ctx.saved_tensors
        return 3 * u * w, 5 * u * x


@op_custom_gradient
def stopped(x, w):
    @torch.no_grad()
    def grad(u):
        return 3 * u * w, 5 * u * x

    return x * w, grad


def _square_of_gradients(f):
    return grad(lambda x, w: (grad(f, argnums=(0, 1))(x, w)[1] ** 2).sum(), argnums=(0, 1))


STOPPED = {
    "vmap of grad": lambda f: vmap(grad(lambda x, w: f(x, w) * x, argnums=(0, 1))),
    "vmap of vmap of grad": lambda f: lambda x, w: vmap(vmap(grad(f, argnums=(0, 1))))(x[None], w[None]),
    "grad of grad": lambda f: _square_of_gradients(lambda x, w: f(x, w).sum()),
}  # fmt: skip


@pytest.mark.parametrize("way", STOPPED)
def test_a_rule_is_decorated_to_make_constants(way):
    x, w = X, X + 3
    found, expected = (STOPPED[way](f)(x, w) for f in (stopped, Stopped.apply))
    torch.testing.assert_close(found, expected)


# --- What f has done itself -----------------------------------------------------------------------
#
# A first order by hand does not look at it: a Function's forward records nothing.


def _raising(x):
    def rule(u):
        raise ValueError("this derivative is not taken")

    return 2 * x, rule


raising = op_custom_gradient(_raising)


@op_custom_gradient
def of_changed_values(x):
    y = x.exp()
    residual = y.clone() + raising(x)
    y.mul_(2)  # exp has saved it
    return y, lambda u: 7 * u * residual


@op_custom_gradient
def of_computed_values(x):
    return 2 * x.exp(), lambda u: 7 * u * (x.exp() + 2 * x)


FIRST_ORDERS = {
    "grad": lambda f: grad(lambda x: (f(x) * X).sum())(X),
    "vmap of grad": lambda f: vmap(grad(f))(X),
    "grad of vmap": lambda f: grad(lambda x: (vmap(f)(x) * X).sum())(X),
    "grad of vmap of vmap": lambda f: grad(lambda x: (vmap(vmap(f))(x[None]) * X).sum())(X),
    "vmap of vmap of grad": lambda f: vmap(vmap(grad(f)))(X[None]),
    "jacrev": lambda f: jacrev(f)(X),
    "a pullback, later": lambda f: vjp(f, X)[1](X)[0],
    "autograd of vmap": lambda f: torch.autograd.grad((vmap(f)(X_OF_GRAPH) * X).sum(), X_OF_GRAPH),
}
X_OF_GRAPH = X.clone().requires_grad_()


@pytest.mark.parametrize("way", FIRST_ORDERS)
def test_an_intermediate_changed_in_place_under_torch_func(way):
    """f is recorded there, so torch raises its own error; the derivative is right or an error."""
    with contextlib.suppress(RuntimeError):
        found, expected = map(FIRST_ORDERS[way], (of_changed_values, of_computed_values))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "second",
    [
        lambda f: grad(lambda x: (grad(lambda x: (f(x) * X).sum())(x) ** 2).sum())(X),
        lambda f: grad(
            lambda x: (torch.autograd.grad((f(x) * X).sum(), x, create_graph=True)[0] ** 2).sum()
        )(X),
        lambda f: vmap(grad(grad(f)))(X),
    ],
)
def test_a_second_order_goes_through_what_f_has_done(second):
    with pytest.raises((RuntimeError, ValueError)):  # torch's own, or the inner rule's
        second(of_changed_values)

    @op_custom_gradient
    def of_values(x):
        residual = x.exp() + 2 * x
        return 2 * x.exp(), lambda u: 7 * u * residual

    torch.testing.assert_close(second(of_values), second(of_computed_values))


class Numbers:
    factor = 3.0


RULES_WITH_FUNC = {
    "vmap": lambda u, s, n: vmap(lambda u, s: u * s * n.factor)(u, s),
    "grad": lambda u, s, n: u * grad(lambda z: (z.sin() * s).sum())(s) * n.factor,
    "vmap of grad": lambda u, s, n: u * vmap(grad(lambda z: z.sin() * z))(s) * n.factor,
    "jacrev": lambda u, s, n: jacrev(lambda z: z.sin() * s)(s) @ u * n.factor,
    "jvp": lambda u, s, n: jvp(lambda z: z.sin() * s, (s,), (u,))[1] * n.factor,
}


@pytest.mark.parametrize("rule", RULES_WITH_FUNC)
@pytest.mark.parametrize(
    "way",
    [
        lambda f: grad(lambda x: (f(x) * X).sum())(X),
        lambda f: vmap(grad(lambda x: (f(x) * X).sum()))(torch.stack([X, 2 * X])),
        lambda f: jacrev(grad(lambda x: (f(x) * X).sum()))(X),
        lambda f: jvp(f, (X,), (2 * X,))[1],
        lambda f: jacfwd(grad(lambda x: (f(x) * X).sum()))(X),
    ],
)
def test_a_rule_that_reads_an_object_calls_torch_func(rule, way):
    turn, numbers = RULES_WITH_FUNC[rule], Numbers()

    @op_custom_gradient(forward_mode=True)
    def op(x):
        s = x.sin()
        return 2 * x, lambda u: turn(u, s, numbers)

    @op_custom_gradient(forward_mode=True)
    def in_the_rule(x):
        return 2 * x, lambda u: turn(u, x.sin(), Numbers)

    torch.testing.assert_close(way(op), way(in_the_rule))


class Kept:
    """A rule that holds what f made where no other tensor can be put while it runs."""

    def __init__(self, s):
        self.s = s

    def rule(self, u):
        return 7 * u * self.s


kept_in_an_object = op_custom_gradient(lambda x: (x.exp(), Kept(x.sin()).rule), forward_mode=True)
kept_in_a_variable = op_custom_gradient(lambda x: (x.exp(), lambda u: 7 * u * x.sin()))


def _pulled_back(f):
    """A pullback that is called when its level of torch.func is over."""

    def pulled(x):
        y, pullback = vjp(f, x)
        return pullback(y * X)[0]

    return pulled


def _along(f):
    return lambda x: jvp(f, (x,), (X + 1,))[1]


@pytest.mark.parametrize(
    "way",
    [
        lambda f: _pulled_back(_pulled_back(_pulled_back(f)))(X),
        lambda f: jacrev(jacrev(f))(X),
        lambda f: _along(jacfwd(f))(X),
        lambda f: jacfwd(jacfwd(f))(X),
    ],
)
def test_a_higher_derivative_of_a_residual_in_an_object_raises(way):
    with pytest.raises(TransformationError, match="keeps in an object"):
        way(kept_in_an_object)
