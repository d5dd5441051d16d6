"""PyTorch: the ops as torch.autograd.Functions, and the uses of them."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.ops import innermost, on_host, solve_by_hand

torch.set_num_threads(1)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, upstream):
        (x,) = ctx.saved_tensors
        return 3 * upstream * x * x


class CubeOfFunc(torch.autograd.Function):
    """For torch.func, which wants setup_context; that costs 15 us a call in eager mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    backward = Cube.backward


class CubeByJvp(CubeOfFunc):
    @staticmethod
    def setup_context(ctx, inputs, output):
        (ctx.x,) = inputs
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx, tangent):
        return 3 * tangent * ctx.x * ctx.x


class Known(torch.autograd.Function):
    """A value with the gradient that is known for it."""

    @staticmethod
    def forward(ctx, value, gradient, x):
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return None, None, upstream * gradient


def _known(x):
    value = x.detach()
    return Known.apply(value * value * value, 3 * value * value, x)


class Residual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        square = x * x
        ctx.save_for_backward(square)
        return square * x

    @staticmethod
    def backward(ctx, upstream):
        (square,) = ctx.saved_tensors
        return 3 * upstream * square


class ResidualOnce(Residual):
    """It keeps no input, and says that its gradient has no derivative."""

    backward = staticmethod(torch.autograd.function.once_differentiable(Residual.backward))


class ResidualOfAnyOrder(Residual):
    """With an input for the second order, in which the residual is a function of it."""

    @staticmethod
    def forward(ctx, x):
        square = x * x
        ctx.save_for_backward(x, square)
        return square * x

    @staticmethod
    def backward(ctx, upstream):
        x, square = ctx.saved_tensors
        if torch.is_grad_enabled():
            square = x * x
        return 3 * upstream * square


class Static(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kind, config, scale):
        assert kind == "cube"
        assert config is None
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x * x * x

    @staticmethod
    def backward(ctx, upstream):
        (x,) = ctx.saved_tensors
        return 3 * ctx.scale * upstream * x * x, None, None, None


class Option(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x * x * x

    @staticmethod
    def backward(ctx, upstream):
        (x,) = ctx.saved_tensors
        return 3 * ctx.scale * upstream * x * x, None


class ThreeOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x, x * x, 5 * x

    @staticmethod
    def backward(ctx, a, b, c):
        (x,) = ctx.saved_tensors
        return 2 * a + 2 * b * x + 5 * c


class Tree(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *leaves):
        ctx.save_for_backward(*leaves)
        return sum(leaf * leaf for leaf in leaves)

    @staticmethod
    def backward(ctx, upstream):
        return tuple(2 * upstream * leaf for leaf in ctx.saved_tensors)


class Leaves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        ctx.count = len(tensors)
        return sum(tensors)

    @staticmethod
    def backward(ctx, upstream):
        return tuple(7 * upstream for _ in range(ctx.count))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, upstream):
        (x,) = ctx.saved_tensors
        return 2 * upstream * x


class Log1pExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.clamp_min(x, 0.0) + torch.log1p(torch.exp(-torch.abs(x)))

    @staticmethod
    def backward(ctx, upstream):
        (x,) = ctx.saved_tensors
        return upstream / (1.0 + torch.exp(-x))


def kalman(observations, mean, covariance, transition, seen, noise, error):
    likelihood = 0.0
    for at in range(observations.shape[0]):
        mean = transition @ mean
        covariance = transition @ covariance @ transition.T + noise
        of_seen = seen @ covariance
        expected = of_seen @ seen.T + error
        surprise = observations[at] - seen @ mean
        gain = torch.linalg.solve(expected, of_seen).T
        weighed = torch.sum(surprise * torch.linalg.solve(expected, surprise))
        likelihood = likelihood - 0.5 * (weighed + torch.linalg.slogdet(expected)[1])
        mean = mean + gain @ surprise
        covariance = covariance - gain @ of_seen
    return likelihood - 0.5 * math.log(2 * math.pi) * observations.shape[0] * 2, mean, covariance


FUNCTIONS = {
    "exp": lambda m, v: torch.exp(m),
    "add": lambda m, v: torch.add(m, v),
    "maximum": lambda m, v: torch.maximum(m, torch.scalar_tensor(0.0, dtype=m.dtype)),
    "where": lambda m, v: torch.where(m > 1.0, m, v),
    "clip": lambda m, v: torch.minimum(
        torch.maximum(m, torch.scalar_tensor(0.7, dtype=m.dtype)),
        torch.scalar_tensor(1.2, dtype=m.dtype),
    ),
    "power": lambda m, v: torch.pow(m, 2.0),
    "sum": lambda m, v: torch.sum(m),
    "sum_of_axis": lambda m, v: torch.sum(m, dim=0),
    "mean_of_axis": lambda m, v: torch.mean(m, dim=1),
    "max_of_axis": lambda m, v: torch.amax(m, dim=1, keepdim=True),
    "reshape": lambda m, v: torch.reshape(m, (16, 64)),
    "transpose": lambda m, v: torch.t(m),
    "expand_dims": lambda m, v: torch.unsqueeze(m, 0),
    "stack": lambda m, v: torch.stack([m, m]),
    "concatenate": lambda m, v: torch.cat([m, m], dim=1),
    "matmul": lambda m, v: torch.matmul(m, m),
    "outer": lambda m, v: torch.outer(v, v),
    "einsum": lambda m, v: torch.einsum("ij,ij->i", m, m),
    "zeros_like": lambda m, v: torch.zeros_like(m),
    "softmax": lambda m, v: torch.softmax(m, -1),
}


@torch.library.custom_op("benchmarks::on_host", mutates_args=())
def _on_host(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.asarray(on_host(x.numpy())))


_on_host.register_fake(torch.empty_like)


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, upstream):
        x, w = ctx.saved_tensors
        needs_x, needs_w = ctx.needs_input_grad
        return upstream @ w.T if needs_x else None, x.T @ upstream if needs_w else None


BY_HAND = {
    **{f"ops.{name}": function for name, function in FUNCTIONS.items()},
    "log1pexp": Log1pExp.apply,
    "kalman": kalman,
    "on_host": _on_host,
    "solve": solve_by_hand,
    "cube": Cube.apply,
    "given_forward": Cube.apply,
    "embedded": _known,
    "embedded_by_name": _known,
    "residual": Residual.apply,
    "residual_once": ResidualOnce.apply,
    "in_a_list": Residual.apply,
    "static": Static.apply,
    "three_outputs": ThreeOutputs.apply,
    "tree": lambda params: Tree.apply(
        *[leaf for layer in params.values() for leaf in layer.values()]
    ),
    "leaves": lambda tensors: Leaves.apply(*tensors),
    "positional": Leaves.apply,
    "method": Cube.apply,
    "option": lambda x: Option.apply(x, 2.0),
    "square": Square.apply,
    "matmul": Matmul.apply,
    "nested": lambda lists: Square.apply(innermost(lists)),
    ("residual", "second_order"): ResidualOfAnyOrder.apply,
    ("residual", "chain"): ResidualOfAnyOrder.apply,
    ("residual", "checkpointed_chain"): ResidualOfAnyOrder.apply,
    ("given_forward", "jvp"): CubeByJvp.apply,
    ("cube", "func_grad"): CubeOfFunc.apply,
    ("cube", "vmap_of_grad"): CubeOfFunc.apply,
}


def tensor(size):
    return torch.linspace(0.5, 1.5, size) if size > 1 else torch.tensor(0.7)


def plain(op, *args):
    return lambda: op(*args)


def forward(op, *args):
    _differentiated(args)
    return lambda: op(*args)


def gradient(op, *args):
    inputs = _differentiated(args)
    outputs = op(*args)
    upstream = [torch.ones_like(y) for y in (outputs if isinstance(outputs, tuple) else [outputs])]
    return lambda: torch.autograd.grad(op(*args), inputs, upstream)


def frozen_weight(op, *tensors):
    x, w = (tensor.reshape(1024, 1024) for tensor in tensors)
    upstream = torch.ones_like(x.requires_grad_())
    return lambda: torch.autograd.grad(op(x, w), x, upstream)


def second_order(op, x):
    one = torch.ones_like(x.requires_grad_())

    def run():
        (first,) = torch.autograd.grad(op(x), x, one, create_graph=True)
        return torch.autograd.grad(first, x, one)

    return run


def training_step(op, x, compiled=False):
    """A step of stochastic gradient descent for a small network, with the op after each of its
    hidden layers.
    """
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], 1e-4)
    x = x.reshape(16, 32)

    def loss_of(x):
        hidden = op(layers[1](op(layers[0](x))))
        return layers[2](hidden).square().mean()

    loss_of = torch.compile(loss_of, fullgraph=True) if compiled else loss_of

    def run():
        loss = loss_of(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return run


compiled_training_step = partial(training_step, compiled=True)


def filtering(op, *arrays):
    tensors = [*map(torch.from_numpy, arrays)]
    return lambda: op(*tensors)


def function(op, x):
    m = x.reshape(32, 32)
    v = m[0]
    return lambda: op(m, v)


def jvp(op, x):
    tangent = torch.ones_like(x)
    return lambda: torch.func.jvp(op, (x,), (tangent,))


def func_grad(op, x):
    gradient = torch.func.grad(op)
    return lambda: gradient(x)


def vmap_of_grad(op, xs):
    gradients = torch.vmap(torch.func.grad(op))
    return lambda: gradients(xs)


def compiled(op, x):
    run = torch.compile(lambda x: op(x), fullgraph=True)
    return gradient(run, x)


def compiled_plain(op, x):
    run = torch.compile(lambda x: op(x), fullgraph=True)
    return lambda: run(x)


def vmap(op, xs):
    over = torch.vmap(op)
    return lambda: over(xs)


def compiled_pullback(op, matrix, right, upstream):
    if op is solve_by_hand:
        return partial(op, matrix, right, upstream)
    *inputs, upstream = map(torch.from_numpy, (matrix, right, upstream))
    compiled = torch.compile(lambda matrix, right: op(matrix, right), fullgraph=True)
    for x in inputs:
        x.requires_grad_()

    def run():
        solution = compiled(*inputs)
        return solution, torch.autograd.grad(solution, inputs, upstream)

    return run


def tracing(op, x):
    one = torch.ones_like(x.requires_grad_())

    def run():
        torch.compiler.reset()
        return torch.autograd.grad(
            torch.compile(lambda x: op(x), backend="aot_eager", fullgraph=True)(x), x, one
        )

    return run


def chain(op, x):
    return gradient(lambda x: op(op(op(op(x)))), x)


def checkpointed_chain(op, x):
    twice = lambda x: checkpoint(lambda x: op(op(x)), x, use_reentrant=False)
    return gradient(lambda x: twice(twice(x)), x)


def _differentiated(args):
    leaves = torch.utils._pytree.tree_leaves(args)
    return [x.requires_grad_() for x in leaves if isinstance(x, torch.Tensor)]
