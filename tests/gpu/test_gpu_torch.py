"""On CUDA: cgshim's rules beside torch.autograd.Function, both wrong on purpose by the same
factors.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cgshim import (
    Spec,
    op_convert_to_tensor,
    op_custom_gradient,
    op_custom_jvp,
    op_embed_gradient,
    op_grad,
    op_host,
    op_sum_to_shape,
    op_vjp,
    ops,
)
from cgshim_torch._versions import STAYS_IN_GRAPH

pytestmark = pytest.mark.gpu

UPSTREAM = [[2.0, -3.0], [0.5, 7.0], [1.5, -1.0]]


class ScaleByHand(torch.autograd.Function):
    """x**3 * w, with the rules 15 x**2 w and 7 x**3: five and seven times the true ones."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x**3 * w

    @staticmethod
    def backward(ctx, upstream):
        x, w = ctx.saved_tensors
        return upstream * 15.0 * x**2 * w, (upstream * 7.0 * x**3).sum(0)


@op_custom_gradient
def scale(x, w):
    return x**3 * w, lambda upstream: (
        upstream * 15.0 * x**2 * w,
        op_sum_to_shape(upstream * 7.0 * x**3, w),
    )


@op_custom_jvp
def pushed(x, w):
    """The same, by its tangents."""
    return x**3 * w, lambda of_x, of_w: of_x * 15.0 * x**2 * w + of_w * 7.0 * x**3


@pytest.fixture
def tensors(device):
    """A matrix, and one factor for each column."""
    x = torch.tensor([[0.5, -2.0], [3.0, 1.0], [-1.5, 0.25]], device=device, requires_grad=True)
    return x, torch.tensor([2.0, -5.0], device=device, requires_grad=True)


def gradients(op, tensors, order=1):
    """The gradients of both; of order 2, those of the sum of their squares."""
    y = op(*tensors)
    found = torch.autograd.grad(
        y, tensors, torch.tensor(UPSTREAM, device=y.device), create_graph=order > 1
    )
    return (
        found if order == 1 else torch.autograd.grad(sum(g.square().sum() for g in found), tensors)
    )


@pytest.mark.parametrize("order", [1, 2])
def test_tensors(tensors, device, order):
    found = gradients(scale, tensors, order)
    assert {g.device.type for g in found} == {device}
    torch.testing.assert_close(found, gradients(ScaleByHand.apply, tensors, order))


def test_what_a_rule_makes_is_where_the_tensors_are(tensors, device):
    @op_custom_gradient
    def shifted(x):
        y = x + ops.arange(2.0)

        def grad(upstream):
            return upstream * op_convert_to_tensor(np.array([3.0, 11.0], "float32")) + ops.zeros(2)

        return y, grad

    x, upstream = tensors[0], torch.tensor(UPSTREAM, device=device)
    [found] = torch.autograd.grad(shifted(x), x, upstream)
    assert found.device.type == device
    torch.testing.assert_close(found, upstream * torch.tensor([3.0, 11.0], device=device))


@pytest.mark.parametrize("is_first", [True, False])
def test_arrays_of_numpy_are_constants_where_the_tensors_are(tensors, device, is_first):
    @op_custom_gradient
    def product(a, b):
        return a * b, lambda u: (None, 5.0 * u * a) if is_first else (5.0 * u * b, None)

    x, array = tensors[0], np.array([3.0, 11.0], "float32")
    y = product(*([array, x] if is_first else [x, array]))
    [found] = torch.autograd.grad(y, x, torch.tensor(UPSTREAM, device=device))
    expected = 5.0 * torch.tensor(UPSTREAM, device=device) * torch.tensor(array, device=device)
    torch.testing.assert_close(found, expected)


def test_upstream_gradients_of_another_kind(tensors, device):
    """None, numbers and arrays of NumPy are made where the output is."""
    x = tensors[0].detach()
    _, pullback = op_vjp(lambda x: (x**2, x**3, x.sum()), x)
    [found] = pullback((np.array(UPSTREAM, "float32"), None, 2.0))
    torch.testing.assert_close(found, 2.0 * x * torch.tensor(UPSTREAM, device=device) + 2.0)
    kept = x.clone().requires_grad_()
    embedded = op_embed_gradient(kept.detach().sum(), np.array(UPSTREAM, "float32"), kept)
    [found] = torch.autograd.grad(embedded, kept)
    torch.testing.assert_close(found, torch.tensor(UPSTREAM, device=device))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_transpose(tensors, order):
    def differentiated(op):
        found = gradients(op, tensors, min(order, 2))
        if order < 3:
            return found
        y = op(*tensors)
        for _ in range(order):
            (y,) = torch.autograd.grad(y.square().sum(), tensors[:1], create_graph=True)
        return (y.detach(),)

    torch.testing.assert_close(differentiated(pushed), differentiated(ScaleByHand.apply))


def test_what_a_rule_reads_of_an_object(tensors):
    """A backward pass on a GPU is in a thread of torch's own."""
    weight = torch.nn.Parameter(torch.full_like(tensors[1], 2.0))
    for _ in range(100):
        weight * 1

    class Kept:
        def __init__(self, x):
            self.x = x

    @op_custom_gradient
    def hiding(x, w):
        kept = Kept(x * weight)
        return kept.x**3 * w / 8.0, lambda u, variables: (
            (u * 15.0 * kept.x**2 * w / 4.0, (u * 7.0 * kept.x**3 / 8.0).sum(0)),
            [None],
        )

    torch.testing.assert_close(
        gradients(hiding, tensors, 2), gradients(ScaleByHand.apply, tensors, 2)
    )


def test_transforms_of_torch_func(tensors, device):
    def loss(op):
        return lambda x, w: (op(x, w) * torch.tensor(UPSTREAM, device=device)).sum()

    x, w = (t.detach() for t in tensors)
    batch = torch.stack([x, 2.0 * x])
    found = torch.func.vmap(torch.func.grad(loss(scale), (0, 1)), (0, None))(batch, w)
    for at, matrix in enumerate(batch):
        leaves = [matrix.clone().requires_grad_(), w.clone().requires_grad_()]
        by_hand = torch.autograd.grad(loss(ScaleByHand.apply)(*leaves), leaves)
        torch.testing.assert_close([g[at] for g in found], list(by_hand))


# --- Streams --------------------------------------------------------------------------------------


@pytest.mark.only_on_gpu
def test_a_stream_of_its_own(tensors):
    """Forward and backward are on the stream of the call, behind work that takes longer than
    either.
    """

    def on_stream(op, seen):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            y = op(*tensors, seen)
        torch.cuda.current_stream().wait_stream(stream)
        found = torch.autograd.grad(y, tensors, torch.tensor(UPSTREAM, device="cuda"))
        assert seen == [stream, stream]
        return found

    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, seen):
            seen.append(torch.cuda.current_stream())
            ctx.save_for_backward(x, w)
            ctx.seen = seen
            return x**3 * w

        @staticmethod
        def backward(ctx, upstream):
            ctx.seen.append(torch.cuda.current_stream())
            x, w = ctx.saved_tensors
            return upstream * 15.0 * x**2 * w, (upstream * 7.0 * x**3).sum(0), None

    @op_custom_gradient
    def noting(x, w, seen):
        seen.append(torch.cuda.current_stream())

        def grad(upstream):
            seen.append(torch.cuda.current_stream())
            return upstream * 15.0 * x**2 * w, (upstream * 7.0 * x**3).sum(0), None

        return x**3 * w, grad

    torch.testing.assert_close(on_stream(noting, []), on_stream(ByHand.apply, []))


# --- Autocast -------------------------------------------------------------------------------------


def test_autocast(tensors, device):
    """f computes in the dtype of autocast, and gradients have the dtypes of the arguments, as by
    hand.
    """

    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, upstream):
            x, w = ctx.saved_tensors
            return 3.0 * upstream.to(w.dtype) @ w.T, 5.0 * x.T @ upstream.to(x.dtype)

    @op_custom_gradient
    def project(x, w):
        def grad(upstream):
            return 3.0 * upstream.to(w.dtype) @ w.T, 5.0 * x.T @ upstream.to(x.dtype)

        return x @ w, grad

    x, w = tensors
    square = torch.stack([w, 2.0 * w]).detach().requires_grad_()

    def under_autocast(op):
        with torch.autocast(device, torch.bfloat16):
            y = op(x, square)
        assert y.dtype is torch.bfloat16
        found = torch.autograd.grad(
            y, (x, square), torch.tensor(UPSTREAM, device=device, dtype=y.dtype)
        )
        assert {g.dtype for g in found} == {torch.float32}
        return found

    torch.testing.assert_close(
        under_autocast(project), under_autocast(ByHand.apply), rtol=0.0, atol=0.0
    )


# --- Saved tensors on the host --------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, 2])
def test_saved_tensors_are_offloaded(tensors, device, order):
    """What the rule keeps goes to memory of the host, pinned on a GPU, and comes back for the
    backward pass.
    """
    offloaded = []

    def pack(x):
        offloaded.append(x.detach().to("cpu", copy=True))
        if device == "cuda":
            offloaded[-1] = offloaded[-1].pin_memory()
            assert offloaded[-1].is_pinned()
        return x.device, offloaded[-1]

    def unpack(packed):
        return packed[1].to(packed[0], non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        found = gradients(scale, tensors, order)
    kept = [x.tolist() for x in offloaded]
    assert all(x.tolist() in kept for x in tensors)
    torch.testing.assert_close(found, gradients(ScaleByHand.apply, tensors, order))


def test_save_on_cpu(tensors, device):
    with torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda"):
        found = gradients(scale, tensors)
    torch.testing.assert_close(found, gradients(ScaleByHand.apply, tensors))


# --- Functions on the host ------------------------------------------------------------------------


def test_functions_on_the_host(tensors, device):
    """NumPy code in f and in its rule, given and returning tensors of the device."""

    @op_custom_gradient(host_outputs=lambda x, w: Spec(x.shape, x.dtype))
    def on_host(x, w):
        assert type(x) is type(w) is np.ndarray
        return x**3 * w, lambda upstream: (
            upstream * 15.0 * x**2 * w,
            (upstream * 7.0 * x**3).sum(0),
        )

    assert on_host(*tensors).device.type == device
    found = gradients(on_host, tensors)
    assert {g.device.type for g in found} == {device}
    torch.testing.assert_close(found, gradients(ScaleByHand.apply, tensors))
    root = op_host(lambda x: np.cbrt(x), outputs=lambda x: Spec(x.shape, x.dtype))(
        tensors[0].detach()
    )
    assert root.device.type == device
    torch.testing.assert_close(root.cpu(), torch.tensor(np.cbrt(tensors[0].detach().cpu().numpy())))


# --- Compiled -------------------------------------------------------------------------------------


@pytest.mark.only_on_gpu
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script",
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:The .grad attribute:UserWarning",
)  # of inductor and Dynamo
def test_graphs_of_cuda(tensors):
    """mode="reduce-overhead" replays CUDA graphs: each call reads its own arguments, in both
    directions.
    """

    def compiled(op):
        layer = torch.compile(
            lambda x, w: op(torch.sin(x), w), mode="reduce-overhead", fullgraph=STAYS_IN_GRAPH
        )
        found = []
        for step in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            leaves = [(x * (1.0 + 0.5 * step)).detach().requires_grad_() for x in tensors]
            y = layer(*leaves)
            found += [y.clone(), *(g.clone() for g in gradients(lambda *_, y=y: y, leaves))]
        return found

    torch._dynamo.reset()
    by_hand = compiled(ScaleByHand.apply)
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(scale), by_hand)


@pytest.mark.only_on_gpu
@pytest.mark.parametrize("op", [scale, pushed], ids=["grad_fn", "jvp_fn"])
def test_a_captured_graph(tensors, op):
    """A whole step, captured by torch.cuda.graph and replayed with other numbers."""

    def replayed(op):
        x, w = (t.detach().clone().requires_grad_() for t in tensors)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                gradients(op, (x, w))
        torch.cuda.current_stream().wait_stream(side)
        graph, upstream = torch.cuda.CUDAGraph(), torch.tensor(UPSTREAM, device="cuda")
        with torch.cuda.graph(graph):
            found = torch.autograd.grad(op(x, w), (x, w), upstream)
        with torch.no_grad():
            x.mul_(-1.5)
            w.add_(0.25)
        graph.replay()
        return [g.clone() for g in found]

    torch.testing.assert_close(replayed(op), replayed(ScaleByHand.apply))


@pytest.mark.only_on_gpu
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_gpu(tensors, order):
    x, upstream = tensors[0].detach(), torch.tensor(UPSTREAM, device="cuda")
    total = op_grad(lambda x: (scale(x, tensors[1].detach()) * upstream).sum())
    for mode in ("default", "error"):  # first what is done once
        torch.cuda.set_sync_debug_mode(mode)
        try:
            found = torch.autograd.grad(scale(*tensors), tensors, upstream, create_graph=order > 1)
            if order > 1:
                torch.autograd.grad(found[0], tensors, upstream)
            total(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
