"""Tensors that reach f by another way than its arguments, and the backend's vjp."""

import pytest
import torch
from torch.autograd import forward_ad

from cgshim import CustomGradientTypeError, op_custom_gradient, op_grad, op_value_and_grad, op_vjp


class Line(torch.nn.Module):
    """w[1] * x + w[0], with the factors 3, 5 and 7 in its rule."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        self.linear = torch.nn.Linear(3, 3)

    @op_custom_gradient(variables=lambda self: [self.weight, self.linear.weight, self.linear.bias])
    def forward(self, x):
        def rule(upstream, variables):
            assert [id(v) for v in variables] == [
                id(p) for p in (self.weight, self.linear.weight, self.linear.bias)
            ]
            of_weight = 7 * torch.stack([upstream.sum(), (upstream * x).sum()])
            return 3 * upstream * self.weight[1], [of_weight, None, 5 * upstream]

        return self.weight[1] * self.linear(x) + self.weight[0], rule


def test_parameters_of_a_module_are_declared():
    module, x = Line(), torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (2 * module.forward(x)).sum().backward()
    assert x.grad.tolist() == [12, 12, 12]
    assert module.weight.grad.tolist() == [42, 84]
    assert module.linear.bias.grad.tolist() == [10, 10, 10]
    assert module.linear.weight.grad is None


def test_variables_have_gradients_when_no_argument_needs_one():
    module = Line()
    module.forward(torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert module.weight.grad.tolist() == [21, 42]


def test_a_second_order_goes_through_variables():
    weight = torch.nn.Parameter(torch.tensor(3.0))
    op = op_custom_gradient(
        lambda x: (
            x * weight,
            lambda upstream, variables: (7 * upstream * weight, [5 * upstream * x]),
        )
    )
    x = torch.tensor(2.0, requires_grad=True)
    (of_x,) = torch.autograd.grad(op(x), x, create_graph=True)
    assert [g.item() for g in torch.autograd.grad(of_x, weight)] == [7]
    (of_weight,) = torch.autograd.grad(op(x), weight, create_graph=True)
    assert [g.item() for g in torch.autograd.grad(of_weight, x)] == [5]


def test_a_frozen_parameter_is_a_constant():
    weight = torch.nn.Parameter(torch.tensor(3.0), requires_grad=False)
    x = torch.tensor(2.0, requires_grad=True)
    op_custom_gradient(lambda x: (x * weight, lambda upstream: 7 * upstream * weight))(x).backward()
    assert x.grad.item() == 21


@pytest.mark.parametrize("kind", ["leaf", "other"])
def test_a_captured_tensor_needs_a_rule_with_variables(kind):
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    captured = weight if kind == "leaf" else weight * 2

    @op_custom_gradient
    def scaled(x):
        return x * captured, lambda upstream: upstream * captured

    with pytest.raises(
        CustomGradientTypeError, match=r"scaled: grad_fn must take variables .* f32\[2\]"
    ):
        scaled(torch.ones(2))


def test_two_captured_tensors_must_be_declared():
    weight, bias = Line().weight, Line().weight
    op = op_custom_gradient(
        lambda x: (x * weight + bias, lambda u, variables: (u * weight, [u * x, u])), name="op"
    )
    with pytest.raises(CustomGradientTypeError, match="op: an op must declare"):
        op(torch.ones(2))


def test_what_is_captured_may_be_used_without_gradients():
    captured = torch.tensor([2.0, 3.0], requires_grad=True) * 2
    op = op_custom_gradient(lambda x: (x * captured, lambda upstream: upstream * captured))
    with torch.no_grad():
        assert op(torch.ones(2)).tolist() == [4, 6]


def test_an_op_inside_f_hands_its_variables_on():
    weight = torch.nn.Parameter(torch.tensor(3.0))
    inner = op_custom_gradient(
        lambda x: (x * weight, lambda u, variables: (2 * u * weight, [5 * u * x]))
    )
    outer = op_custom_gradient(lambda x: (inner(x), lambda u, variables: (7 * u, [11 * u])))
    x = torch.tensor(2.0, requires_grad=True)
    outer(x).backward()
    assert (x.grad.item(), weight.grad.item()) == (7, 11)


def test_an_inner_op_defines_the_second_order(fused):
    x = torch.tensor(2.0, requires_grad=True)
    (first,) = torch.autograd.grad(fused(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first, x, create_graph=True)
    (third,) = torch.autograd.grad(second, x)
    assert (first.item(), second.item(), third.item()) == (32, 10, 5)


# --- Graphs that f begins itself -----------------------------------------------------------------


def by_op_vjp(x):
    y, pullback = op_vjp(lambda x: x * x, x)
    return y, lambda upstream: 5 * pullback(upstream)[0]


def by_autograd(x):
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        y = z * z
    return y.detach(), lambda u: 5 * torch.autograd.grad(y, z, u, retain_graph=True)[0]


def by_attribute(x):
    with torch.enable_grad():
        z = x.detach()
        z.requires_grad = True
        y = z * z
    return y.detach(), lambda u: 5 * torch.autograd.grad(y, z, u, retain_graph=True)[0]


def by_factory(x):
    with torch.enable_grad():
        one = torch.ones(2, requires_grad=True)
        y = one * x * x
    return y.detach(), lambda u: 10 * torch.autograd.grad(y, one, u, retain_graph=True)[0] / x


@pytest.mark.parametrize("f", [by_op_vjp, by_autograd, by_attribute, by_factory])
def test_f_may_begin_a_graph_of_its_own(f):
    op, x = op_custom_gradient(f), torch.tensor([3.0, 4.0], requires_grad=True)
    (of_x,) = torch.autograd.grad(op(x), x, torch.tensor([1.0, 10.0]))
    assert of_x.tolist() == [30, 400]


def test_a_captured_tensor_beside_a_graph_of_f_itself():
    weight = torch.tensor(3.0, requires_grad=True)

    @op_custom_gradient
    def op(x):
        own = by_autograd(x)[0]
        return own * weight, lambda u, variables: (5 * u, [7 * (u * x).sum()])

    x = torch.tensor([3.0, 4.0], requires_grad=True)
    found = torch.autograd.grad(op(x), [x, weight], torch.tensor([1.0, 10.0]))
    assert [g.tolist() for g in found] == [[5, 50], 7 * 43]


# --- vjp, which op_vjp and op_grad stand on -------------------------------------------------------


@op_custom_gradient
def cube(x):
    square = x * x
    return square * x, lambda upstream: upstream * 3 * square


def test_vjp_nests():
    derivative = lambda x: cube(x) * x
    for expected in (32, 48, 48, 24):
        derivative = op_grad(derivative)
        assert derivative(torch.tensor(2.0)).item() == expected
    assert not derivative(torch.tensor(2.0)).requires_grad


@pytest.mark.parametrize("outside", ["nothing", "the input", "the upstream", "a captured tensor"])
def test_results_require_grad_only_when_something_outside_does(outside):
    x = torch.tensor([2.0, 3.0], requires_grad=outside == "the input")
    by = torch.tensor(5.0, requires_grad=outside == "a captured tensor")
    upstream = torch.ones(2, requires_grad=outside == "the upstream")
    output, pullback = op_vjp(lambda x: cube(x) * by, x)
    (gradient,) = pullback(upstream)
    assert gradient.tolist() == [60, 135]
    assert gradient.requires_grad == (outside != "nothing")
    assert output.requires_grad == (outside in ("the input", "a captured tensor"))


def test_a_nested_derivative_requires_grad_only_for_the_outside():
    x, w = torch.tensor(2.0), torch.tensor(3.0)
    mixed = op_grad(op_grad(lambda x, w: x * x * w * w), argnums=1)
    assert mixed(x, w).item() == 24
    assert not mixed(x, w).requires_grad
    w.requires_grad_()
    assert torch.autograd.grad(mixed(x, w), w)[0].item() == 8
    _, pullback = op_vjp(lambda x: x**3, x)
    assert not op_vjp(pullback, x)[1]((x,))[0].requires_grad


def test_a_derivative_of_a_vjp_with_respect_to_what_it_captures():
    by = torch.tensor(5.0, requires_grad=True)
    gradient = op_grad(lambda x: cube(x) * by**2)(torch.tensor(2.0))
    gradient.backward()
    assert (gradient.item(), by.grad.item()) == (300, 120)


WEIGHT = torch.tensor(5.0, requires_grad=True)


class Slope:
    def __init__(self):
        self.by = WEIGHT

    @op_custom_gradient
    def method(self, x):
        return x * 2, lambda upstream: 7 * upstream * self.by


BY_A_RULE = {
    "in its closure": (
        lambda by: op_custom_gradient(lambda x: (x * 2, lambda upstream: 7 * upstream * by))
    )(WEIGHT),
    "in an attribute": Slope().method,
}


@pytest.mark.parametrize("op", BY_A_RULE.values(), ids=BY_A_RULE)
def test_a_tensor_that_only_the_rule_reads_and_op_vjp(op):
    _, pullback = op_vjp(op, torch.tensor(2.0))
    (gradient,) = pullback(torch.tensor(3.0))
    assert gradient.item() == 105
    assert torch.autograd.grad(gradient, WEIGHT)[0].item() == 21


def test_pullbacks_many_times_and_without_dependence():
    x, y = torch.tensor([1.0, 2.0]), torch.tensor(3.0)
    (_, constant), pullback = op_vjp(lambda x, y, n: (x * n, torch.ones(2)), x, y, torch.tensor(4))
    for factor in (1.0, 2.0):
        of_x, of_y, of_n = pullback((torch.full((2,), factor), torch.ones(2)))
        assert (of_x.tolist(), of_y.item(), of_n) == ([4 * factor, 4 * factor], 0, None)
    assert not constant.requires_grad


def test_vjp_inside_torch_func_and_without_gradients():
    derivative = lambda x: op_grad(lambda x: cube(x) * x)(x)
    assert torch.func.grad(derivative)(torch.tensor(2.0)) == 48
    assert torch.vmap(derivative)(torch.tensor([2.0, 1.0])).tolist() == [32, 4]
    with torch.no_grad():
        value, gradient = op_value_and_grad(lambda x: cube(x) * x)(torch.tensor(2.0))
    assert (value.item(), gradient.item(), gradient.requires_grad) == (16, 32, False)


def test_the_same_tensor_as_two_arguments():
    x = torch.tensor(2.0, requires_grad=True)
    of_x, of_y = op_grad(lambda x, y: x * x * y, argnums=(0, 1))(x, x)
    assert (of_x.item(), of_y.item()) == (8, 4)


def dual(fn, w):
    with forward_ad.dual_level():
        return fn(forward_ad.make_dual(w, torch.ones_like(w)))


FORWARD = {
    "jvp": lambda fn, w: torch.func.jvp(fn, (w,), (w,)),
    "jacfwd": lambda fn, w: torch.func.jacfwd(fn)(w),
    "hessian": lambda fn, w: torch.func.hessian(fn)(w),
    "vmap of jvp": lambda fn, w: torch.vmap(lambda w: torch.func.jvp(fn, (w,), (w,)))(w[None]),
    "jvp of vmap": lambda fn, w: torch.func.jvp(torch.vmap(fn), (w[None],), (w[None],)),
    "a dual number": dual,
}
READERS = {
    "beside a constant": lambda op, w: op(torch.tensor(3.0)),
    "beside what is differentiated too": lambda op, w: op(2 * w),
    "alone": lambda op, w: op(3.0),
}


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("differentiate", FORWARD.values(), ids=FORWARD)
def test_forward_mode_through_a_captured_tensor_raises(differentiate, read, forward_mode):
    """The output would have no tangent, or f's own."""

    def fn(w):
        return read(
            op_custom_gradient(lambda x: (x * w, lambda u: 7 * u), forward_mode=forward_mode), w
        )

    with pytest.raises(CustomGradientTypeError, match=r"pass (it|them) as"):
        differentiate(fn, torch.tensor(5.0))
    assert fn(torch.tensor(5.0)) == read(lambda x: x * torch.tensor(5.0), torch.tensor(5.0))
