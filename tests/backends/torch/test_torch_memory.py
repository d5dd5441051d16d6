"""What a call saves, and the peak of memory, beside functions written by hand; checkpoints."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cgshim import op_custom_gradient

MEGABYTE = 2**20


class _Peak(TorchDispatchMode):
    """The most bytes that the storages made within it took at once."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._seen = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self._seen:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage):
        self._seen.add(storage)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, size):
        self.now -= size


def _residuals(x):
    return [x * factor for factor in (2.0, 3.0, 5.0, 7.0)]


@op_custom_gradient
def ours(x):
    a, b, c, d = _residuals(x)
    return a + b, lambda upstream: upstream * a * b * c * d


ours_once = op_custom_gradient(once_differentiable=True)(ours.__wrapped__)


class _ByHand(torch.autograd.Function):
    """With a residual that is a function of the input, of which it saves the input for the second
    order.
    """

    @staticmethod
    def forward(ctx, x):
        a, b, c, d = _residuals(x)
        ctx.save_for_backward(x, a, b, c, d)
        return a + b

    @staticmethod
    def backward(ctx, upstream):
        _, a, b, c, d = ctx.saved_tensors
        return upstream * a * b * c * d


class _OnceByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        residuals = _residuals(x)
        ctx.save_for_backward(*residuals)
        return residuals[0] + residuals[1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        a, b, c, d = ctx.saved_tensors
        return upstream * a * b * c * d


def _plain(op, x):
    return op(op(x * 1))


def _checkpointed(use_reentrant):
    return lambda op, x: checkpoint(
        op, checkpoint(op, x, use_reentrant=use_reentrant), use_reentrant=use_reentrant
    )


WAYS = {
    "plain": _plain,
    "checkpoint": _checkpointed(False),
    "reentrant checkpoint": _checkpointed(True),
}


PAIRS = {"any order": (ours, _ByHand.apply), "once differentiable": (ours_once, _OnceByHand.apply)}


@pytest.mark.parametrize(("op", "by_hand"), PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("way", WAYS)
def test_peak_memory_is_that_of_a_function_by_hand(way, op, by_hand):
    """64 megabytes of residuals in the closure."""

    def peak_and_gradient(op):
        with _Peak() as memory:
            x = torch.full((4 * MEGABYTE,), 0.5).requires_grad_()
            WAYS[way](op, x).sum().backward()
        return memory.peak, x.grad

    peak, gradient = peak_and_gradient(op)
    peak_by_hand, gradient_by_hand = peak_and_gradient(by_hand)
    assert torch.equal(gradient, gradient_by_hand)
    assert peak_by_hand > 64 * MEGABYTE
    assert peak / peak_by_hand <= 1.01


# --- What is saved --------------------------------------------------------------------------------


class _Saving(torch.autograd.Function):
    """By hand: `forward(x)` returns an output and what is saved, and `backward(upstream, *saved)`
    the gradient.
    """

    @staticmethod
    def forward(ctx, x, forward, backward):
        y, *saved = forward(x)
        ctx.save_for_backward(*saved)
        ctx.rule = backward
        return y

    @staticmethod
    def backward(ctx, upstream):
        return ctx.rule(upstream, *ctx.saved_tensors), None, None


def _relu(x):
    return x.relu(), lambda u: 7 * u


def _masked(x):
    mask = x > 0
    return x * mask, lambda u: 7 * u * mask


def _exponential(x):
    y = x.exp()
    return y, lambda u: 7 * u * y


def _scaled(x):
    residual = x * x
    return x * residual, lambda u: 7 * u * residual


SAVED = {
    "nothing": (op_custom_gradient(_relu), lambda x: (x.relu(),), lambda u: 7 * u),
    "a mask": (
        op_custom_gradient(_masked), lambda x: (lambda mask: (x * mask, mask))(x > 0), lambda u, mask: 7 * u * mask
    ),
    "an output": (op_custom_gradient(_exponential), lambda x: (lambda y: (y, y))(x.exp()), lambda u, y: 7 * u * y),
    "the argument": (
        op_custom_gradient(lambda x: (x * x, lambda u: 7 * u * x)), lambda x: (x * x, x), lambda u, x: 7 * u * x
    ),
    "a residual, once differentiable": (
        op_custom_gradient(once_differentiable=True)(_scaled),
        lambda x: (lambda residual: (x * residual, residual))(x * x), lambda u, residual: 7 * u * residual,
    ),
    "a residual, and the argument for its derivative": (
        op_custom_gradient(_scaled), lambda x: (lambda residual: (x * residual, x, residual))(x * x),
        lambda u, x, residual: 7 * u * residual,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("op", "forward", "backward"), SAVED.values(), ids=SAVED)
def test_as_many_bytes_are_saved_as_by_hand(op, forward, backward):
    """Of a residual the derivative is another run of f, on the argument: that is saved too, unless
    there is none.
    """

    def saved_by(function):
        saved, x = [], torch.full((1000,), 0.5, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = function(x)
        (3 * y).sum().backward()
        return [(t.dtype, t.nbytes) for t in saved if t.nbytes], x.grad

    ours, by_hand = saved_by(op), saved_by(lambda x: _Saving.apply(x, forward, backward))
    assert ours[0] == by_hand[0]
    assert torch.equal(ours[1], by_hand[1])


@pytest.mark.parametrize("kept", ["nothing", "a mask", "an output", "the argument"])
def test_peak_memory_of_a_chain_is_that_of_functions_by_hand(kept):
    op, forward, backward = SAVED[kept]

    def peak(function):
        with _Peak() as memory:
            y = torch.full((MEGABYTE // 4,), 0.5).requires_grad_()
            for _ in range(20):
                y = function(y)
            y.sum().backward()
        return memory.peak / MEGABYTE

    by_hand = peak(lambda x: _Saving.apply(x, forward, backward))
    assert peak(op) == by_hand
    assert (by_hand < 5) == (kept == "nothing")


def test_a_checkpoint_saves_memory_at_all():
    """That the measure measures: without checkpoints the peak is higher."""
    peaks = {}
    for way in ("plain", "checkpoint"):
        with _Peak() as memory:
            x = torch.full((MEGABYTE,), 0.5).requires_grad_()
            WAYS[way](ours, x).sum().backward()
        peaks[way] = memory.peak
    assert peaks["checkpoint"] < 0.9 * peaks["plain"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_with_variables_and_a_second_order(use_reentrant):
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))

    @op_custom_gradient
    def op(x):
        square = x * x
        return square * weight, lambda u, variables: (7 * u * x * weight, [5 * u * square])

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = checkpoint(op, x, use_reentrant=use_reentrant)
    y.sum().backward()
    assert (x.grad.tolist(), weight.grad.tolist()) == ([14, 42], [5, 20])
    if not use_reentrant:
        (first,) = torch.autograd.grad(
            checkpoint(op, x, use_reentrant=False).sum(), x, create_graph=True
        )
        assert torch.autograd.grad(first.sum(), x)[0].tolist() == [14, 21]


def test_an_input_that_is_not_needed_may_change():
    op = op_custom_gradient(lambda x: (x * 2, lambda u: 7 * u))
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    hidden = x * 1
    y = op(hidden)
    hidden.add_(1)
    y.sum().backward()
    assert x.grad.tolist() == [7, 7]
