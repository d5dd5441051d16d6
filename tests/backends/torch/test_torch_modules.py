"""The state of modules under torch.func: functional_call, ensembles, MAML's step; beside
hand-written Functions.

Rules are wrong on purpose, by the factors 3 and 5: a number that autodiff found by itself does not
pass.
"""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vjp, vmap

from cgshim import CustomGradientTypeError, TransformationError, op_custom_gradient


class Line(torch.autograd.Function):
    """x * w + b by hand."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w, b):
        return x * w + b

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, upstream):
        x, w, _ = ctx.saved_tensors
        return 3 * upstream * w, 5 * upstream * x, 7 * upstream


class ByHand(torch.nn.Module):
    def __init__(self, w=9.0, b=11.0):
        super().__init__()
        self.w, self.b = torch.nn.Parameter(torch.tensor(w)), torch.nn.Parameter(torch.tensor(b))

    def forward(self, x):
        return Line.apply(x, self.w, self.b)


class ByVariables(ByHand):
    @op_custom_gradient(variables=lambda self: [self.w, self.b])
    def line(self, x):
        def rule(upstream, variables):
            w, _ = variables
            return 3 * upstream * w, [5 * upstream * x, 7 * upstream]

        return x * self.w + self.b, rule

    def forward(self, x):
        return self.line(x)


class ByResidual(ByHand):
    """The rule keeps a product of the argument and a variable."""

    @op_custom_gradient(variables=lambda self: {"w": self.w, "b": self.b})
    def line(self, x):
        product = self.w * x

        def rule(upstream, variables):
            w = variables["w"]
            return 3 * upstream * w, {"w": 5 * upstream * product / w, "b": 7 * upstream}

        return product + self.b, rule

    def forward(self, x):
        return self.line(x)


OPS = [ByVariables, ByResidual]
X, W, B = torch.tensor(2.0), torch.tensor(3.0), torch.tensor(-1.0)
FACTORS = torch.tensor([1.0, 10.0])


def call_of(kind):
    module = kind()
    return lambda w, b, x: functional_call(module, {"w": w, "b": b}, (x,))


# --- Ensembles ------------------------------------------------------------------------------------

ENSEMBLES = {
    "values": lambda call, p, x: vmap(call, (0, 0, None))(*p, x),
    "of the state": lambda call, p, x: vmap(grad(call, (0, 1)), (0, 0, None))(*p, x),
    "of the argument": lambda call, p, x: vmap(grad(call, 2), (0, 0, None))(*p, x),
    "of a batched argument": lambda call, p, x: vmap(grad(call, 2))(*p, x * FACTORS),
    "of vmap": lambda call, p, x: grad(
        lambda w: (vmap(call, (0, 0, None))(w, p[1], x) * FACTORS).sum()
    )(p[0]),
    "second order": lambda call, p, x: vmap(
        grad(lambda w, b, x: grad(lambda x: call(w, b, x) ** 2)(x)), (0, 0, None)
    )(*p, x),
    "jacrev": lambda call, p, x: vmap(
        jacrev(lambda w, b, x: call(w, b, x) ** 2, (0, 2)), (0, 0, None)
    )(*p, x),
    "some of the state": lambda call, p, x: vmap(grad(call, 2), (0, None, None))(p[0], p[1][0], x),
}


@pytest.mark.parametrize("transformation", ENSEMBLES.values(), ids=ENSEMBLES)
@pytest.mark.parametrize("kind", OPS)
def test_an_ensemble(kind, transformation):
    stacked, _ = stack_module_state([kind(1.0, 2.0), kind(3.0, 5.0)])
    state = [stacked["w"], stacked["b"]]
    expected = transformation(call_of(ByHand), state, X)
    torch.testing.assert_close(transformation(call_of(kind), state, X), expected)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("kind", OPS)
def test_backward_through_an_ensemble(kind, order):
    def gradients(kind):
        stacked, _ = stack_module_state([kind(1.0, 2.0), kind(3.0, 5.0)])
        x = X.clone().requires_grad_()
        loss = (
            vmap(call_of(kind), (0, 0, None))(stacked["w"], stacked["b"], x) ** 2 * FACTORS
        ).sum()
        inputs = [stacked["w"], stacked["b"], x]
        if order == 2:
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = first**2
        return torch.autograd.grad(loss, inputs)

    torch.testing.assert_close(gradients(kind), gradients(ByHand))


# --- functional_call in eager mode ----------------------------------------------------------------

PUT = {"a leaf": lambda w: w, "a clone": lambda w: w.clone(), "a function": lambda w: 2 * w * w}


@pytest.mark.parametrize("put", PUT.values(), ids=PUT)
def test_functional_call(put):
    """The rule runs after the module has its own Parameters back, and gets those that f read."""

    def gradients(kind):
        w, b, x = (t.clone().requires_grad_() for t in (W, B, X))
        loss = call_of(kind)(put(w), put(b), x) ** 2
        first = torch.autograd.grad(loss, (w, b, x), create_graph=True)
        return [
            first,
            *[
                torch.autograd.grad(g, (w, b, x), retain_graph=True, allow_unused=True)
                for g in first
            ],
        ]

    torch.testing.assert_close(gradients(ByVariables), gradients(ByHand))


def test_a_second_run_that_reads_another_state_is_an_error():
    """f runs again after functional_call has put the module's own Parameters back."""
    w, b, x = (t.clone().requires_grad_() for t in (W, B, X))
    loss = call_of(ByResidual)(w, b, x) ** 2
    with pytest.raises(TransformationError, match="another run of f does not make again"):
        torch.autograd.grad(torch.autograd.grad(loss, w, create_graph=True)[0], x)


@pytest.mark.parametrize("kind", OPS)
def test_a_module_has_its_own_state_after_the_rule(kind):
    module, x = kind(), X.clone().requires_grad_()
    own = dict(module.named_parameters())
    functional_call(module, {"w": W.clone().requires_grad_()}, (x,)).backward()
    assert x.grad.item() == 9
    assert all(parameter is own[name] for name, parameter in module.named_parameters())
    assert (module.w.grad, module.b.grad.item()) == (None, 7)


@pytest.mark.parametrize("first", ["the Parameters", "clones"])
def test_the_step_of_maml(first):
    def gradients(kind):
        module = kind(2.0, 1.0)
        fast = {
            name: p.clone() if first == "clones" else p for name, p in module.named_parameters()
        }
        for _ in range(2):
            loss = functional_call(module, fast, (X,)) ** 2
            steps = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {
                name: p - 0.01 * step for (name, p), step in zip(fast.items(), steps, strict=True)
            }
        (functional_call(module, fast, (X,)) ** 2).backward()
        return module.w.grad, module.b.grad

    torch.testing.assert_close(gradients(ByVariables), gradients(ByHand))


@pytest.mark.parametrize("kind", OPS)
def test_the_step_of_maml_by_torch_func(kind):
    def gradients(kind):
        call = call_of(kind)

        def loss(w, b):
            of_w, of_b = grad(lambda w, b: call(w, b, X) ** 2, (0, 1))(w, b)
            return call(w - 0.01 * of_w, b - 0.01 * of_b, X) ** 2

        return grad(loss, (0, 1))(W, B), vjp(loss, W, B)[1](torch.tensor(3.0))

    torch.testing.assert_close(gradients(kind), gradients(ByHand))


def test_undeclared_state_is_an_error_under_torch_func():
    class Undeclared(ByHand):
        @op_custom_gradient
        def line(self, x):
            return x * self.w, lambda upstream, variables: (upstream * self.w, [upstream * x])

        def forward(self, x):
            return self.line(x)

    call = call_of(Undeclared)
    with pytest.raises(CustomGradientTypeError, match=r"undeclared f32\[\].*variables="):
        grad(lambda w: call(w, B, X))(W)


# --- Forward mode ---------------------------------------------------------------------------------


class Forward(ByHand):
    @op_custom_gradient(forward_mode=True, variables=lambda self: [self.w, self.b])
    def forward(self, x):
        def rule(upstream, variables):
            w, _ = variables
            return 3 * upstream * w, [5 * upstream * x, 7 * upstream]

        return x * self.w + self.b, rule


def dual(function, w):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(w, w))


TANGENTS = {
    "jvp": lambda f, w: jvp(f, (w,), (w,)),
    "a dual number": dual,
    "vmap of jvp": lambda f, w: vmap(lambda w: jvp(f, (w,), (w,)))(w[None]),
    "grad in jvp": lambda f, w: jvp(lambda w: grad(lambda z: f(w) * z)(w), (w,), (w,)),
    "vmap in jvp": lambda f, w: jvp(lambda w: vmap(lambda z: f(w) * z)(w[None]), (w,), (w,)),
}


def test_a_tangent_of_a_variable():
    call = call_of(Forward)
    assert jvp(lambda w: call(w, B, X), (W,), (torch.tensor(0.5),))[1].item() == 5 * 2 * 0.5
    assert jvp(lambda w: call(w, B, 2 * w), (W,), (W,))[1].item() == 5 * 6 * 3 + 3 * 3 * 6


@pytest.mark.parametrize("argument", ["constant", "differentiated too"])
@pytest.mark.parametrize("differentiate", TANGENTS.values(), ids=TANGENTS)
def test_a_tangent_in_an_option_is_refused(differentiate, argument):
    @op_custom_gradient(forward_mode=True)
    def scaled(x, *, by):
        return x * by, lambda upstream: 3 * upstream * by

    with pytest.raises(
        CustomGradientTypeError, match="f must be given every tensor that is differentiated"
    ):
        differentiate(lambda w: scaled(X if argument == "constant" else 2 * w, by=w), W)


def test_forward_over_reverse_of_the_state():
    call = call_of(Forward)
    assert hessian(lambda w: call(w, B, X) ** 2)(W).item() == 200
    assert jvp(lambda x: call(W, B, x), (X,), (X,))[1].item() == 18
