"""op_vjp with variables, and layers that a rule runs again."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap

from cgshim import (
    CustomGradientTypeError,
    TransformationError,
    op_custom_gradient,
    op_stop_gradient,
    op_vjp,
)

X = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.7, -1.1]], dtype=torch.float64)
UPSTREAM = torch.tensor([[2.0, -3.0], [0.5, 7.0]], dtype=torch.float64)


def recompute(layer):
    """Return a layer as an op whose rule keeps arguments and variables, and runs the layer again."""
    names = [name for name, _ in layer.named_parameters()]

    @op_custom_gradient(variables=lambda: list(layer.parameters()))
    def recomputed(x, **options):
        def grad(upstream, variables):
            parameters = dict(zip(names, variables, strict=True))
            again = lambda x: functional_call(layer, parameters, (x,), options)
            trained = [
                v for v, is_trained in zip(variables, are_trained, strict=False) if is_trained
            ]
            gradients, of_trained = op_vjp(again, x, variables=trained)[1](upstream)
            of_trained = iter(of_trained)
            return gradients, [
                next(of_trained) if is_trained else None for is_trained in are_trained
            ]

        are_trained = [p.requires_grad for p in layer.parameters()]
        return layer(op_stop_gradient(x), **options), grad

    return recomputed


@pytest.fixture
def layer():
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2), torch.nn.Tanh()
    ).double()


def derivatives(fn, tensors, order):
    """The gradients by all tensors, and in the second order those of a weighted sum of their
    squares.
    """
    gradients = torch.autograd.grad(
        (UPSTREAM * fn(tensors[0])).sum(), tensors, create_graph=order > 1
    )
    if order == 1:
        return gradients
    return torch.autograd.grad(
        sum((at + 2) * g.square().sum() for at, g in enumerate(gradients)), tensors
    )


# --- Layers under recompute -----------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("compiler", [None, "eager", "aot_eager"])
def test_a_layer(layer, compiler, order, compiling):
    again = recompute(layer)
    if compiler:
        again = torch.compile(again, backend=compiler)
    tensors = [X.clone().requires_grad_(), *layer.parameters()]
    torch.testing.assert_close(
        derivatives(again, tensors, order), derivatives(layer, tensors, order)
    )


def test_it_runs_again_in_the_backward_pass(layer):
    runs = []
    layer.register_forward_hook(lambda *_: runs.append(1))
    output = recompute(layer)(X)
    assert len(runs) == 1
    output.backward(UPSTREAM)
    assert len(runs) == 2


def test_a_frozen_layer_and_no_differentiated_argument(layer):
    layer[0].requires_grad_(False)
    tensors = list(layer[2].parameters())
    found = torch.autograd.grad(recompute(layer)(X), tensors, UPSTREAM)
    torch.testing.assert_close(found, torch.autograd.grad(layer(X), tensors, UPSTREAM))


class LayerInALayer(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.inner = layer, recompute(layer[0])

    def forward(self, x):
        return torch.tanh(self.layer[2](torch.tanh(self.inner(x))))


def test_a_layer_in_a_layer(layer):
    again = recompute(LayerInALayer(layer))
    tensors = [X.clone().requires_grad_(), *layer.parameters()]
    torch.testing.assert_close(derivatives(again, tensors, 2), derivatives(layer, tensors, 2))


def test_a_layer_whose_saved_tensors_are_moved(layer):
    tensors = [X.clone().requires_grad_(), *layer.parameters()]
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        found = derivatives(recompute(layer), tensors, 2)
    torch.testing.assert_close(found, derivatives(layer, tensors, 2))


@pytest.mark.parametrize("order", [1, 2])
def test_functional_call(layer, order):
    start = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    put = lambda: {name: 3.0 * p for name, p in start.items()}

    class Again(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer
            self.again = recompute(layer)

        def forward(self, x):
            return self.again(x)

    module, tensors = Again(), [X.clone().requires_grad_(), *start.values()]
    again = lambda x: functional_call(
        module, {f"layer.{name}": p for name, p in put().items()}, (x,)
    )
    plain = lambda x: functional_call(layer, put(), (x,))
    torch.testing.assert_close(
        derivatives(again, tensors, order), derivatives(plain, tensors, order)
    )


class Seeded(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, seed):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.layer(x)


@pytest.mark.parametrize("order", [1, 2])
def test_dropout_has_the_same_mask_twice(order):
    layer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(), torch.nn.Tanh()).double()
    run = Seeded(layer)
    again = recompute(run)
    tensors = [X.clone().requires_grad_(), *layer.parameters()]
    before = torch.get_rng_state()
    found = [
        derivatives(lambda x, seed=seed: again(x, seed=seed), tensors, order) for seed in range(5)
    ]
    plain = [derivatives(lambda x, seed=seed: run(x, seed), tensors, order) for seed in range(5)]
    torch.testing.assert_close(found, plain)
    # the masks are not all the same
    assert len({weight.abs().sum().item() for _, weight, _ in found}) > 2
    assert torch.equal(before, torch.get_rng_state())


# --- op_vjp ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("recording", [True, False])
def test_gradients_by_parameters(layer, recording):
    """As torch.autograd has them; nothing is left in .grad."""
    x = X.clone().requires_grad_()
    parameters = list(layer.parameters())
    with torch.set_grad_enabled(recording):
        output, pullback = op_vjp(layer, x, variables=parameters)
        (of_x,), of_parameters = pullback(UPSTREAM)
    assert output.requires_grad is of_x.requires_grad is of_parameters[0].requires_grad is recording
    expected = torch.autograd.grad(layer(x), [x, *parameters], UPSTREAM)
    torch.testing.assert_close([of_x, *of_parameters], list(expected))
    assert all(p.grad is None for p in parameters)


def test_a_variable_that_is_an_argument_too():
    """Each has its own gradient; a tensor that is not a leaf can be a variable."""
    leaf = torch.tensor(3.0, requires_grad=True)
    w = 2.0 * leaf
    _, pullback = op_vjp(lambda x: x * w * w, w, variables=[w])
    (of_x,), (of_w,) = pullback(torch.tensor(5.0))
    assert (of_x.item(), of_w.item()) == (5 * 36, 5 * 72)
    assert torch.autograd.grad(of_w, leaf)[0].item() == 5 * 4 * 6 * 2


def test_a_variable_that_does_not_require_grad_is_refused():
    with pytest.raises(CustomGradientTypeError) as raised:
        op_vjp(lambda x: x * UPSTREAM, X, variables=[UPSTREAM])
    assert str(raised.value) == (
        "op_vjp: variables must require grad, got f64[2,2]; call its requires_grad_(), or pass it as an argument"
    )


def _under_dual_numbers(fn):
    def run(x):
        with forward_ad.dual_level():
            return fn(forward_ad.make_dual(x, torch.ones_like(x)))

    return run


@pytest.mark.parametrize(
    "transform",
    [lambda fn: grad(lambda x: fn(x).sum()), vmap, _under_dual_numbers],
    ids=["grad", "vmap", "dual numbers"],
)
def test_a_transformation_is_refused(layer, transform):
    parameters = list(layer.parameters())
    by_hand = lambda x: op_vjp(layer, x, variables=parameters)[1](UPSTREAM[0])[0][0]
    with pytest.raises(TransformationError) as raised:
        transform(by_hand)(X[0] if transform is not vmap else X)
    assert str(raised.value) == (
        "op_vjp: variables have gradients only outside of torch.func and dual numbers, got a transformation; "
        "pass them as arguments"
    )


def test_a_rule_under_torch_func_is_refused(layer):
    with pytest.raises(TransformationError, match="pass them as arguments"):
        grad(lambda x: recompute(layer)(x).sum())(X)


def test_compiled_code_breaks_the_graph(layer, compiling):
    gradients = lambda x: op_vjp(layer, x, variables=list(layer.parameters()))[1](UPSTREAM)
    found = torch.compile(gradients, backend="aot_eager")(X)
    torch.testing.assert_close(found, gradients(X))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(gradients, backend="aot_eager", fullgraph=True)(X)


@pytest.mark.parametrize("order", [1, 2])
def test_a_layer_twice(order):
    """The argument of the second one was made from the Parameters that it reads."""
    layer = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()).double()
    last = torch.tensor([[1.0, -2.0], [0.5, 3.0], [-1.0, 0.25]], dtype=torch.float64)
    again, tensors = recompute(layer), [X.clone().requires_grad_(), *layer.parameters()]
    found = derivatives(lambda x: again(again(again(x))) @ last, tensors, order)
    torch.testing.assert_close(
        found, derivatives(lambda x: layer(layer(layer(x))) @ last, tensors, order)
    )


def test_a_layer_that_is_given_its_own_weight_raises():
    layer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh()).double()
    with pytest.raises(CustomGradientTypeError, match="either an argument or a variable"):
        recompute(layer)(layer[0].weight)


class Wave(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.length, self.height = (
            torch.nn.Parameter(torch.tensor(w, dtype=torch.float64)) for w in (2.0, 3.0)
        )

    def forward(self, x):
        return torch.sin(x * self.length) * self.height**2


def test_a_variable_that_was_made_from_another_is_an_error():
    """autograd would count the gradient of the first one twice."""
    wave, x = Wave(), torch.tensor([[0.5, 1.5], [-0.3, 0.7]], dtype=torch.float64)
    again = torch.nn.Module()
    again.wave, again.forward = wave, recompute(wave)
    output = functional_call(again, {"wave.length": 5.0 * wave.height}, (x,))
    with pytest.raises(CustomGradientTypeError, match="must not be made of one another"):
        output.sum().backward()


def test_a_variable_made_into_the_argument_with_infinite_slope():
    """What ends at the argument is nothing, and not zero times infinity."""
    w = torch.tensor([0.0, 4.0], dtype=torch.float64, requires_grad=True)
    _, pullback = op_vjp(lambda x: 3 * x * w, w.sqrt(), variables=[w])
    (of_x,), (of_w,) = pullback(torch.ones_like(w))
    torch.testing.assert_close(of_x, 3 * w)
    torch.testing.assert_close(of_w, 3 * w.sqrt())
