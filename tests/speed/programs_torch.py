"""Ops and the same ops by hand, as torch.compile cuts them into graphs, and inductor into kernels."""

import warnings

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from cgshim import op_custom_gradient


@op_custom_gradient
def cube(x):
    return x * x * x, lambda upstream: 7 * upstream * x * x


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, upstream):
        (x,) = ctx.saved_tensors
        return 7 * upstream * x * x


@op_custom_gradient
def scaled(pair, word):
    a, b = pair["a"], pair["b"]
    return (a * b, 5 * a), lambda first, second: (
        {"a": 7 * first * b + 5 * second, "b": 3 * first * a},
        None,
    )


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b, 5 * a

    @staticmethod
    def backward(ctx, first, second):
        a, b = ctx.saved_tensors
        return 7 * first * b + 5 * second, 3 * first * a


X = torch.arange(6.0)
# another name for a tensor: inductor makes nothing of them
ALIASES = ("aten.detach.default", "aten.view.default")


def compiled(fn):
    """What the graphs of the forward and the backward pass take and do, and how many kernels
    inductor makes of them.
    """
    graphs = []

    def keep(module, _):
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        calls = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
        graphs.append((len(inputs), [name for name in calls if name not in ALIASES]))
        return make_boxed_func(module.forward)

    _run(fn, aot_autograd(fw_compiler=keep, bw_compiler=keep))
    torch._inductor.metrics.reset()
    _run(fn, "inductor")
    return graphs, torch._inductor.metrics.generated_kernel_count


def _run(fn, compiler):
    torch._dynamo.reset()
    x = X.clone().requires_grad_()
    with warnings.catch_warnings():
        # Dynamo and inductor warn of code of torch's own (torch 2.13, November 2026)
        warnings.simplefilter("ignore")
        torch.autograd.grad(torch.compile(fn, backend=compiler, fullgraph=True)(x), x)


def total(op):
    return lambda x: (op(x.sin()) * 2).sum()


def of_pair(op):
    return lambda x: sum(y.sum() for y in op({"a": x, "b": 2 * x}, "static"))


CASES = {
    "gradient": (total, cube, Cube.apply, lambda x: x * x * x),
    "trees and static leaves": (
        of_pair, scaled, lambda pair, _: Scaled.apply(pair["a"], pair["b"]), lambda p, _: (p["a"] * p["b"], 5 * p["a"])
    ),
}  # fmt: skip
