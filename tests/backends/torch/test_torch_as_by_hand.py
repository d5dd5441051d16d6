"""What a Function by hand does, and an op once did not: each beside its twin, with 5 and 7 in
rules.
"""

import contextlib
import functools
import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import CheckpointError, checkpoint

from cgshim import CustomGradientTypeError, op_custom_gradient


def leaf(*values):
    return torch.tensor(values, requires_grad=True)


# --- Captured leaves of a subclass ----------------------------------------------------------------


class Named(torch.Tensor):
    """A subclass that adds nothing."""


class NamedParameter(torch.nn.Parameter):
    """A subclass of Parameter."""


class Scaled(torch.autograd.Function):
    """By hand: w * x."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, u):
        x, w = ctx.saved_tensors
        return 7 * u * w, 5 * u * x


LEAVES = {
    "a tensor": lambda: torch.tensor([3.0, -2.0]).as_subclass(Named).requires_grad_(),
    "a Parameter of one": lambda: torch.nn.Parameter(torch.tensor([3.0, -2.0]).as_subclass(Named)),
    "a subclass of Parameter": lambda: NamedParameter(torch.tensor([3.0, -2.0])),
}


@pytest.mark.parametrize("make", LEAVES.values(), ids=LEAVES)
def test_a_captured_leaf_of_a_subclass_is_a_variable(make):
    def gradients(function):
        x, w = leaf(2.0, 11.0), make()
        function(x, w).backward(torch.tensor([1.0, 3.0]))
        return x.grad.tolist(), w.grad.tolist()

    def ours(x, w):
        return op_custom_gradient(lambda x: (x * w, lambda u, variables: (7 * u * w, [5 * u * x])))(
            x
        )

    assert gradients(ours) == gradients(Scaled.apply)


def test_a_captured_leaf_of_a_subclass_needs_variables():
    w = LEAVES["a tensor"]()
    with pytest.raises(
        CustomGradientTypeError, match="grad_fn must take variables when f reads trainable state"
    ):
        op_custom_gradient(lambda x: (x * w, lambda u: 7 * u * w))(leaf(2.0, 11.0))


# --- Autocast remembers what it has cast ----------------------------------------------------------


@pytest.mark.parametrize("before", ["nothing", "the layer", "the op"])
def test_a_layer_that_is_used_twice_in_one_block_of_autocast(before):
    """autocast keeps the weight that it has cast: its graph was made before f ran."""
    layer, x = torch.nn.Linear(2, 2), torch.tensor([[1.0, 2.0]], requires_grad=True)

    @op_custom_gradient(variables=[layer.weight, layer.bias])
    def op(x):
        y = layer(layer(x))
        assert y.dtype is torch.bfloat16
        return y.float(), lambda u, variables: (
            7 * u,
            [None if v.dim() == 2 else 5 * u[0] for v in variables],
        )

    with torch.autocast("cpu", torch.bfloat16):
        if before != "nothing":
            (layer if before == "the layer" else op)(x)
        y = op(x)
        after = layer(x)
        assert torch.is_autocast_cache_enabled()
    y.backward(torch.tensor([[1.0, 3.0]]))
    assert (x.grad.tolist(), layer.weight.grad, layer.bias.grad.tolist()) == (
        [[7, 21]],
        None,
        [5, 15],
    )
    after.sum().backward()
    assert layer.weight.grad.tolist() == [[1, 2], [1, 2]]


# --- Classes are freed ----------------------------------------------------------------------------


def _a_method():
    class Layer:
        def __init__(self):
            self.factor = torch.tensor([7.0])

        @op_custom_gradient
        def scaled(self, x):
            kept = x * x
            return kept * 2, lambda u: u * self.factor * kept

    return Layer, lambda x: Layer().scaled(x)


def _a_static_argument():
    class Settings:
        __slots__ = ("factor",)

        def __init__(self):
            self.factor = torch.tensor([7.0])

    @op_custom_gradient
    def scaled(x, settings):
        kept = x * x
        return kept * 2, lambda u: (u * settings.factor * kept, None)

    return Settings, lambda x: scaled(x, Settings())


@pytest.mark.parametrize("make", [_a_method, _a_static_argument])
def test_a_class_that_a_function_has_made_is_freed(make):
    kind, op = make()
    x = leaf(2.0)
    (first,) = torch.autograd.grad(op(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert (first.item(), second.item()) == (28, 28)
    alive = weakref.ref(kind)
    del kind, op, first, second
    gc.collect()
    assert alive() is None


# --- Changes in place that a rule does not read ---------------------------------------------------


class Residual(torch.autograd.Function):
    """By hand: x ** 3 + bias, which keeps x ** 2 alone."""

    @staticmethod
    def forward(ctx, x, bias):
        square = x * x
        ctx.save_for_backward(square)
        return square * x + bias

    @staticmethod
    def backward(ctx, u):
        (square,) = ctx.saved_tensors
        return 7 * u * square, 5 * u


def _residual(x, bias):
    square = x * x
    return square * x + bias, lambda u: (7 * u * square, 5 * u)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("changed", [0, 1])
def test_an_argument_changed_beside_a_residual_raises(changed, create_graph):
    """It is saved for another run of f."""
    x = leaf(2.0, 3.0)
    inputs = [x * 1, leaf(1.0, 1.0) * 1]
    y = op_custom_gradient(_residual)(*inputs)
    inputs[changed].mul_(100)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), x, create_graph=create_graph)


def test_an_argument_may_change_beside_a_copy_in_the_rule():
    x = leaf(2.0, 3.0)
    hidden = x * 1
    y = op_custom_gradient(lambda x: (2 * x, lambda u: 7 * u))(hidden)
    hidden.mul_(100)
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [7, 7]


@pytest.mark.parametrize("keep", ["x", "kept", "y"])
def test_a_residual_must_not_change(keep):
    tensors = {}

    def f(x):
        kept = x * x
        y = kept * x
        tensors.update(x=x, kept=kept, y=y)
        held = {"x": (x, kept), "kept": (kept, kept), "y": (y, kept)}[keep]
        return y, functools.partial(lambda held, u: 7 * u * held[0] * held[1], held)

    x = leaf(2.0, 3.0)
    y = op_custom_gradient(f)(x * 1)
    with torch.no_grad():
        tensors[keep].mul_(100)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# --- What a rule cannot do when its gradient is differentiated ------------------------------------


def _times_sine(x):
    return x * x.sin()


def _passed(x):
    return 2 * x, lambda u: 5 * u * checkpoint(_times_sine, x, use_reentrant=False)


def _read(x):
    kept = x.sin()
    return 2 * x, lambda u: checkpoint(lambda u: 5 * u * kept * x, u, use_reentrant=False)


def _exported(x):
    kept = x.sin()
    return 2 * x, lambda u: 5 * u * torch.from_dlpack(kept) * x


@pytest.mark.parametrize(
    ("f", "error"), [(_passed, None), (_read, CheckpointError), (_exported, BufferError)]
)
def test_a_checkpoint_and_dlpack_in_a_rule(f, error):
    """Each first order is right; a second one is right, or an error of torch."""
    op, x = op_custom_gradient(f), leaf(1.0, 2.0)
    at = x.detach()
    torch.testing.assert_close(torch.autograd.grad(op(x).sum(), x)[0], 5 * at * at.sin())

    def second():
        (first,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    if error is None:
        torch.testing.assert_close(second(), 5 * (at.sin() + at * at.cos()))
    else:
        with contextlib.suppress(error):
            torch.testing.assert_close(second(), 5 * (at.sin() + at * at.cos()))


# --- A rule that saves nothing --------------------------------------------------------------------


class Rounded(torch.autograd.Function):
    """By hand: a straight-through estimator with the gradient 5."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, u):
        return 5 * u


@op_custom_gradient
def rounded(x):
    return x.round(), lambda u: 5 * u


@op_custom_gradient
def rounded_in_general(x):
    def grad(u, needs_input_grad):
        return 5 * u

    return x.round(), grad


@pytest.mark.parametrize("f", [Rounded.apply, rounded, rounded_in_general])
def test_two_losses_share_what_saves_nothing(f):
    w = leaf(1.3)
    shared = f(w)
    (2 * shared).sum().backward()
    (7 * shared).sum().backward()
    assert w.grad.item() == 45


class _Context:
    """An object of a class of the author's own, for what forward keeps."""


@pytest.mark.parametrize("kept", [torch.float32, _Context(), np.ones(1), SimpleNamespace()])
def test_two_losses_share_what_keeps_an_object(kept):
    """By hand each is an attribute of ctx."""

    @op_custom_gradient
    def op(x):
        def grad(u):
            assert kept is not None
            return 5 * u

        return x.round(), grad

    w = leaf(1.3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        hooked = op(w)
    for shared in (op(w), hooked):
        w.grad = None
        (2 * shared).sum().backward()
        (7 * shared).sum().backward()
        assert w.grad.item() == 45
