"""NumPy: the ops as primitives of HIPS autograd, and the uses of them."""

from __future__ import annotations

import math

import autograd.numpy as np
import numpy
import optree
import scipy.special
from autograd import elementwise_grad, grad
from autograd.builtins import tuple as tuple_of_boxes
from autograd.core import make_jvp, make_vjp
from autograd.differential_operators import checkpoint
from autograd.extend import defjvp, defvjp, defvjp_argnums, primitive

from benchmarks.ops import cube, innermost, on_host


@primitive
def _cube(x):
    return x * x * x


defvjp(_cube, lambda ans, x: lambda upstream: 3 * upstream * x * x)


defjvp(_cube, lambda tangent, ans, x: 3 * tangent * x * x)


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


def kalman(observations, mean, covariance, transition, seen, noise, error):
    likelihood = 0.0
    for at in range(observations.shape[0]):
        mean = transition @ mean
        covariance = transition @ covariance @ transition.T + noise
        of_seen = seen @ covariance
        expected = of_seen @ seen.T + error
        surprise = observations[at] - seen @ mean
        gain = numpy.linalg.solve(expected, of_seen).T
        weighed = numpy.sum(surprise * numpy.linalg.solve(expected, surprise))
        likelihood = likelihood - 0.5 * (weighed + numpy.linalg.slogdet(expected)[1])
        mean = mean + gain @ surprise
        covariance = covariance - gain @ of_seen
    return likelihood - 0.5 * math.log(2 * math.pi) * observations.shape[0] * 2, mean, covariance


FUNCTIONS = {
    "exp": lambda m, v: numpy.exp(m),
    "add": lambda m, v: numpy.add(m, v),
    "maximum": lambda m, v: numpy.maximum(m, 0.0),
    "where": lambda m, v: numpy.where(m > 1.0, m, v),
    "clip": lambda m, v: numpy.clip(m, 0.7, 1.2),
    "power": lambda m, v: numpy.power(m, 2.0),
    "sum": lambda m, v: numpy.sum(m),
    "sum_of_axis": lambda m, v: numpy.sum(m, axis=0),
    "mean_of_axis": lambda m, v: numpy.mean(m, axis=1),
    "max_of_axis": lambda m, v: numpy.max(m, axis=1, keepdims=True),
    "reshape": lambda m, v: numpy.reshape(m, (16, 64)),
    "transpose": lambda m, v: numpy.transpose(m),
    "expand_dims": lambda m, v: numpy.expand_dims(m, 0),
    "stack": lambda m, v: numpy.stack([m, m]),
    "concatenate": lambda m, v: numpy.concatenate([m, m], axis=1),
    "matmul": lambda m, v: numpy.matmul(m, m),
    "outer": lambda m, v: numpy.outer(v, v),
    "einsum": lambda m, v: numpy.einsum("ij,ij->i", m, m),
    "zeros_like": lambda m, v: numpy.zeros_like(m),
    "softmax": lambda m, v: scipy.special.softmax(m, axis=-1),
}

BY_HAND = {
    **{f"ops.{name}": function for name, function in FUNCTIONS.items()},
    "kalman": kalman,
    "on_host": on_host,
    "cube": _cube,
    "given_forward": _cube,
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
    ("given_forward", "plain"): cube,
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


def jvp(op, x):
    tangent = np.ones_like(x)
    return lambda: make_jvp(op, x)(tangent)


def func_grad(op, x):
    return lambda: elementwise_grad(op)(x)


def function(op, x):
    m = numpy.linspace(0.5, 1.5, x.size, dtype="float32").reshape(32, 32)
    v = m[0]
    return lambda: op(m, v)


def filtering(op, *arrays):
    return lambda: op(*arrays)


def chain(op, x):
    return gradient(lambda x: op(op(op(op(x)))), x)


def checkpointed_chain(op, x):
    twice = checkpoint(lambda x: op(op(x)))
    return gradient(lambda x: twice(twice(x)), x)
