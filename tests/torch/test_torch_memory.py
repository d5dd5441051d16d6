"""What is kept alive, and for how long: leaks with the garbage collector off, checkpoints, and peak memory."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cgshim import op_custom_gradient

MEGABYTE = 2**20


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


HELD = {
    "its output": lambda y, intermediate: y,
    "a view of it": lambda y, intermediate: y[:1],
    "an intermediate": lambda y, intermediate: intermediate,
    "both in containers": lambda y, intermediate: {"list": [y, (intermediate,)]},
}


@pytest.mark.parametrize("ending", ["dropped", "backward", "twice differentiated", "loss held"])
@pytest.mark.parametrize("held", HELD)
@pytest.mark.usefixtures("no_collector")
def test_nothing_is_kept_alive(held, ending):
    alive = []

    @op_custom_gradient
    def op(x):
        intermediate = x.exp()
        y = intermediate * 2
        alive.extend([weakref.ref(y.untyped_storage()), weakref.ref(intermediate.untyped_storage())])
        kept = HELD[held](y, intermediate)
        return y, lambda upstream: (kept, upstream * 7 * x)[1]

    x = torch.ones(3, requires_grad=True)
    y = op(x)
    loss = y.sum()
    if ending == "backward" or ending == "loss held":
        loss.backward()
    elif ending == "twice differentiated":
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradient.sum().backward()
        del gradient
    del y
    if ending != "loss held":
        del loss
    assert [ref() for ref in alive] == [None] * len(alive)


@pytest.mark.usefixtures("no_collector")
def test_the_arguments_of_a_rule_that_does_not_need_them_are_freed_with_the_graph():
    op = op_custom_gradient(lambda x: (x * 2, lambda upstream: upstream * 7))
    x = torch.ones(3, requires_grad=True)
    hidden = x * 1
    alive = weakref.ref(hidden)
    y = op(hidden)
    del hidden
    y.sum().backward()
    assert alive() is None


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
    """What has a second order by another run of the forward pass saves the input too."""

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
    return lambda op, x: checkpoint(op, checkpoint(op, x, use_reentrant=use_reentrant), use_reentrant=use_reentrant)


WAYS = {"plain": _plain, "checkpoint": _checkpointed(False), "reentrant checkpoint": _checkpointed(True)}


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
        (first,) = torch.autograd.grad(checkpoint(op, x, use_reentrant=False).sum(), x, create_graph=True)
        assert torch.autograd.grad(first.sum(), x)[0].tolist() == [14, 21]
