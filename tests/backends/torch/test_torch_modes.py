"""Modes of torch in which f and its rule run: gradients off, inference, and what a function leaves
behind.
"""

import contextlib

import pytest
import torch

from cgshim import (
    CustomGradientTypeError,
    TransformationError,
    op_custom_gradient,
    op_custom_jvp,
    op_grad,
    op_value_and_grad,
    op_vjp,
)


def leaf(*values):
    return torch.tensor(values, requires_grad=True)


@op_custom_gradient
def square(x):
    """x * x, with the factor 7 in its rule."""
    return x * x, lambda upstream: upstream * 7 * x


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, upstream):
        return upstream * 7


# --- Without gradients ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function", [op_custom_gradient(lambda x: (x, lambda u: 7 * u)), Identity.apply]
)
@pytest.mark.parametrize(
    "make", [lambda: leaf(2.0), lambda: leaf(2.0) * 1, lambda: torch.tensor([2.0])]
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_an_input_that_f_returns_is_another_tensor(function, make, mode):
    x = make()
    with mode():
        y = function(x)
    assert y is not x
    assert y.tolist() == [2]
    assert y.requires_grad == (mode is torch.enable_grad and x.requires_grad)


def test_a_graph_that_f_records_is_cut_where_gradients_are_off():
    @op_custom_gradient
    def op(x):
        with torch.enable_grad():
            return x * 3, lambda u: 7 * u

    with torch.no_grad():
        assert not op(leaf(2.0)).requires_grad


# --- Inference mode -------------------------------------------------------------------------------


@pytest.mark.parametrize("made_within", [False, True])
def test_derivatives_that_are_taken_in_inference_mode(made_within):
    x, three = torch.tensor([2.0]), torch.tensor([3.0])
    with torch.inference_mode():
        if made_within:
            x, three = torch.tensor([2.0]), torch.tensor([3.0])
        assert op_grad(lambda x: square(x).sum())(x).tolist() == [14]
        assert op_grad(lambda x: op_grad(lambda x: square(x).sum())(x).sum())(x).tolist() == [7]
        value, gradient = op_value_and_grad(lambda x: (square(x) * 5).sum())(x)
        assert (value.item(), gradient.tolist()) == (20, [70])
        y, pullback = op_vjp(square, x)
        assert (y.tolist(), pullback(three)[0].tolist()) == ([4], [42])
        assert op_vjp(lambda x: torch.ones(1), x)[1](three)[0].tolist() == [0]
    assert pullback(three)[0].tolist() == [42]
    assert torch.is_grad_enabled()


FORWARD = {
    "its transpose": op_custom_gradient(
        lambda x, w: (x * w, lambda upstream: (3 * upstream * w, 5 * upstream * x)),
        forward_mode=True,
    ),
    "jvp_fn": op_custom_jvp(lambda x, w: (x * w, lambda dx, dw: 3 * dx * w + 5 * x * dw)),
}


@pytest.mark.parametrize("op", FORWARD.values(), ids=FORWARD.keys())
def test_tangents_in_inference_mode(op):
    with torch.inference_mode():
        x, w, t = torch.tensor([2.0]), torch.tensor([3.0]), torch.tensor([7.0])
        assert torch.func.jvp(op, (x, w), (t, t))[1].tolist() == [3 * 7 * 3 + 5 * 2 * 7]
        assert torch.func.jvp(lambda x: op(x, w), (x,), (t,))[1].tolist() == [3 * 7 * 3]
        assert torch.func.jvp(lambda w: op(x, w), (w,), (t,))[1].tolist() == [5 * 2 * 7]


def test_a_pullback_from_outside_in_inference_mode():
    _, pullback = op_vjp(square, torch.tensor([2.0]))
    with torch.inference_mode():
        assert pullback(torch.tensor([3.0]))[0].tolist() == [42]


def _of_inference_mode():
    with torch.inference_mode():
        return torch.tensor([3.0])


BESIDE = {
    "captured": lambda w: (op_custom_gradient(lambda x: (x * w, lambda u: u * 7 * w)),),
    "an argument": lambda w: (op_custom_gradient(lambda x, w: (x * w, lambda u: (u * 7 * w, None))), w),
    "an argument of the rule": lambda w: (
        op_custom_gradient(lambda x, w: (x * w, lambda x, w, upstream: (upstream * 7 * w, None))), w,
    ),
    "an option": lambda w: (op_custom_gradient(lambda x, *, by=w: (x * by, lambda u: u * 7 * by)),),
    "a residual": lambda w: (op_custom_gradient(lambda x: (x * w, (lambda kept: lambda u: u * 7 * kept)(w * 1))),),
}  # fmt: skip


@pytest.mark.parametrize("ways", BESIDE.values(), ids=BESIDE)
def test_tensors_of_inference_mode(ways):
    """They are constants; torch raises an error if they are saved, as for a Function by hand."""
    op, *rest = ways(_of_inference_mode())
    assert op(torch.tensor([2.0]), *rest).tolist() == [6]
    for create_graph in (False, True):
        x = leaf(2.0)
        with contextlib.suppress(RuntimeError):
            y = 5 * op(x, *rest)
            (first,) = torch.autograd.grad(y, x, create_graph=create_graph)
            assert first.tolist() == [105]


def test_a_captured_tensor_of_inference_mode_is_a_constant():
    op, *_ = BESIDE["captured"](_of_inference_mode())
    x = leaf(2.0)
    (5 * op(x)).backward()
    assert x.grad.tolist() == [105]


def test_an_output_of_inference_mode():
    @op_custom_gradient
    def op(x):
        with torch.inference_mode():
            return x * 2, lambda u: 7 * u

    x = leaf(2.0)
    (3 * op(x)).backward()
    assert x.grad.tolist() == [21]


# --- Leaves that f makes for itself ---------------------------------------------------------------


def _by_hand(function):
    """7 times the derivative that torch finds of function, as one writes it by hand."""

    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch.enable_grad():
                ctx.x = x.detach().requires_grad_()
                ctx.y = function(ctx.x)
            return ctx.y.detach()

        @staticmethod
        def backward(ctx, upstream):
            return 7 * torch.autograd.grad(ctx.y, ctx.x, upstream)[0]

    return ByHand.apply


def _at_once(function):
    def f(x):
        own = x.detach().requires_grad_()
        y = function(own)
        (derivative,) = torch.autograd.grad(y.sum(), own)
        return y.detach(), lambda u: 7 * u * derivative

    return f


def _in_the_rule(function):
    def f(x):
        own = x.clone().requires_grad_()
        y = function(own)
        return y.detach(), lambda u: 7 * torch.autograd.grad(y, own, u)[0]

    return f


def _in_a_container(function):
    def f(x):
        tape = {"x": [x.detach().clone().requires_grad_()]}
        tape["y"] = function(tape["x"][0])
        return tape["y"].detach(), lambda u: 7 * torch.autograd.grad(tape["y"], tape["x"], u)[0]

    return f


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(
    "function", [torch.exp, lambda x: x.exp() * torch.tensor([2.0, 3.0])], ids=["exp", "scaled"]
)
@pytest.mark.parametrize("way", [_at_once, _in_the_rule, _in_a_container])
def test_a_graph_of_f_itself_and_the_first_order(way, function, create_graph):
    """A container of f's own graph is an error where a second derivative may be taken."""

    def gradient(op):
        x = leaf(2.0, 3.0)
        found = [
            torch.autograd.grad(op(x), x, leaf(5.0, 11.0), create_graph=create_graph)
            for _ in range(2)
        ]
        assert torch.equal(found[0][0], found[1][0])
        return found[0][0]

    op = op_custom_gradient(way(function))
    if create_graph and way is _in_a_container:
        with pytest.raises(TransformationError, match="a second order needs"):
            gradient(op)
    else:
        torch.testing.assert_close(gradient(op), gradient(_by_hand(function)))


def test_a_graph_of_f_itself_beside_a_variable():
    weight = torch.nn.Parameter(torch.tensor([5.0, 7.0]))

    @op_custom_gradient(variables=[weight])
    def op(x):
        own = x.detach().requires_grad_()
        (derivative,) = torch.autograd.grad((own**2 * weight.detach()).sum(), own)
        return x**2 * weight, lambda u, variables: (7 * u * derivative, [11 * u])

    x = leaf(2.0, 3.0)
    (3 * op(x)).sum().backward()
    assert (x.grad.tolist(), weight.grad.tolist()) == ([420, 882], [33, 33])


def test_an_output_of_a_graph_of_f_itself_raises():
    """f detaches it: its leaf cannot be told from a captured tensor."""

    @op_custom_gradient
    def op(x):
        own = x.detach().requires_grad_()
        y = own.exp()
        return y, lambda u: 7 * u * y.detach()

    with pytest.raises(CustomGradientTypeError, match="op: grad_fn must take variables"):
        op(leaf(2.0))


STATE = {"in a dict": leaf(3.0)}


class Slots:
    __slots__ = ("weight",)


def _states(weight):
    """Where others may hold a leaf that f reads."""
    slots, kept = Slots(), [weight]
    slots.weight = weight
    return {
        "in slots": lambda: slots.weight,
        "in a list": lambda: kept[0],
        "by a global name": lambda: STATE["in a dict"],
    }


@pytest.mark.parametrize("kept_by_the_rule", [False, True])
@pytest.mark.parametrize("where", _states(leaf(3.0)))
def test_a_leaf_that_others_hold_is_trainable_state(where, kept_by_the_rule):
    read = _states(leaf(3.0))[where]

    @op_custom_gradient
    def op(x):
        weight = read()
        return x * weight, (lambda u: u * weight) if kept_by_the_rule else (lambda u: u)

    with pytest.raises(
        CustomGradientTypeError, match="grad_fn must take variables when f reads trainable state"
    ):
        op(leaf(2.0))


# --- torch.set_default_device ---------------------------------------------------------------------
