"""NumPy: the ops as primitives of HIPS autograd, and the uses of them."""

from __future__ import annotations

import autograd.numpy as np
import optree
from autograd import elementwise_grad, grad
from autograd.builtins import tuple as tuple_of_boxes
from autograd.core import make_vjp
from autograd.differential_operators import checkpoint
from autograd.extend import defvjp, defvjp_argnums, primitive

from benchmarks.ops import cube, innermost, on_host


@primitive
def _cube(x):
    return x * x * x


defvjp(_cube, lambda ans, x: lambda upstream: 3 * upstream * x * x)


@primitive
def _residual(kept, x):
    kept.append(x * x)
    return kept[0] * x


defvjp(_residual, lambda ans, kept, x: lambda upstream: 3 * upstream * kept[0], argnums=(1,))


@primitive
def _static(x, kind, config, scale):
    assert kind == "cube"
    assert config is None
    return scale * x * x * x


defvjp(
    _static,
    lambda ans, x, kind, config, scale: lambda upstream: 3 * scale * upstream * x * x,
    argnums=(0,),
)


@primitive
def _three_outputs(x):
    return 2 * x, x * x, 5 * x


defvjp(
    _three_outputs,
    lambda ans, x: lambda upstream: 2 * upstream[0] + 2 * upstream[1] * x + 5 * upstream[2],
)


@primitive
def _tree(*leaves):
    return sum(leaf * leaf for leaf in leaves)


defvjp_argnums(
    _tree, lambda at, ans, args, _: lambda upstream: [2 * upstream * args[n] for n in at]
)


@primitive
def _leaves(*tensors):
    return sum(tensors)


defvjp_argnums(_leaves, lambda at, ans, args, _: lambda upstream: [7 * upstream for _ in at])


@primitive
def _square(x):
    return x * x


defvjp(_square, lambda ans, x: lambda upstream: 2 * upstream * x)


BY_HAND = {
    "on_host": on_host,
    "cube": _cube,
    "residual": lambda x: _residual([], x),
    "in_a_list": lambda x: _residual([], x),
    "static": _static,
    "three_outputs": lambda x: tuple(_three_outputs(x)),
    "tree": lambda params: _tree(*[leaf for layer in params.values() for leaf in layer.values()]),
    "leaves": lambda tensors: _leaves(*tensors),
    "positional": _leaves,
    "method": _cube,
    "nested": lambda lists: _square(innermost(lists)),
    ("cube", "plain"): cube,
}


def tensor(size):
    return np.linspace(0.5, 1.5, size) if size > 1 else np.array(0.7)


def plain(op, *args):
    return lambda: op(*args)


def forward(op, x):
    return lambda: make_vjp(op, x)[1]


def gradient(op, first, *static):
    """With one tensor for every leaf: autograd's own containers take a quadratic time, by hand and
    otherwise.
    """
    leaves, structure = optree.tree_flatten(first)

    def of_tensor(x):
        outputs = op(optree.tree_unflatten(structure, [x for _ in leaves]), *static)
        return tuple_of_boxes(outputs) if isinstance(outputs, tuple) else outputs

    upstream = optree.tree_map(np.ones_like, of_tensor(leaves[0]))
    return lambda: make_vjp(of_tensor, leaves[0])[0](upstream)


def second_order(op, x):
    return lambda: grad(grad(op))(x)


def func_grad(op, x):
    return lambda: elementwise_grad(op)(x)


def chain(op, x):
    return gradient(lambda x: op(op(op(op(x)))), x)


def checkpointed_chain(op, x):
    twice = checkpoint(lambda x: op(op(x)))
    return gradient(lambda x: twice(twice(x)), x)
