"""JAX: the ops as jax.custom_vjps, and the uses of them."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ops import depth_of, innermost, nest, on_host, solve_by_hand


def _by_hand(function, forward, backward, static=()):
    op = jax.custom_vjp(function, nondiff_argnums=static)
    op.defvjp(forward, backward)
    return op


def _residual(x):
    square = x * x
    return square * x, square


def _sum_of_squares(params):
    return sum(leaf * leaf for layer in params.values() for leaf in layer.values())


def _static(x, kind, config, scale):
    assert kind == "cube"
    assert config is None
    return scale * x * x * x


def _three_outputs(x):
    return 2 * x, x * x, 5 * x


_cube = _by_hand(
    lambda x: x * x * x, lambda x: (x * x * x, x), lambda x, upstream: (3 * upstream * x * x,)
)


_cube_by_jvp = jax.custom_jvp(lambda x: x * x * x)
_cube_by_jvp.defjvp(lambda primals, tangents: _pushed(*primals, *tangents))


def _pushed(x, tangent):
    return _cube_by_jvp(x), 3 * tangent * x * x


def _log1pexp(x):
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def kalman(observations, mean, covariance, transition, seen, noise, error):
    likelihood = 0.0
    for at in range(observations.shape[0]):
        mean = transition @ mean
        covariance = transition @ covariance @ transition.T + noise
        of_seen = seen @ covariance
        expected = of_seen @ seen.T + error
        surprise = observations[at] - seen @ mean
        gain = jnp.linalg.solve(expected, of_seen).T
        weighed = jnp.sum(surprise * jnp.linalg.solve(expected, surprise))
        likelihood = likelihood - 0.5 * (weighed + jnp.linalg.slogdet(expected)[1])
        mean = mean + gain @ surprise
        covariance = covariance - gain @ of_seen
    return likelihood - 0.5 * math.log(2 * math.pi) * observations.shape[0] * 2, mean, covariance


FUNCTIONS = {
    "exp": lambda m, v: jnp.exp(m),
    "add": lambda m, v: jnp.add(m, v),
    "maximum": lambda m, v: jnp.maximum(m, 0.0),
    "where": lambda m, v: jnp.where(m > 1.0, m, v),
    "clip": lambda m, v: jnp.clip(m, 0.7, 1.2),
    "power": lambda m, v: jnp.power(m, 2.0),
    "sum": lambda m, v: jnp.sum(m),
    "sum_of_axis": lambda m, v: jnp.sum(m, axis=0),
    "mean_of_axis": lambda m, v: jnp.mean(m, axis=1),
    "max_of_axis": lambda m, v: jnp.max(m, axis=1, keepdims=True),
    "reshape": lambda m, v: jnp.reshape(m, (16, 64)),
    "transpose": lambda m, v: jnp.transpose(m),
    "expand_dims": lambda m, v: jnp.expand_dims(m, 0),
    "stack": lambda m, v: jnp.stack([m, m]),
    "concatenate": lambda m, v: jnp.concatenate([m, m], axis=1),
    "matmul": lambda m, v: jnp.matmul(m, m),
    "outer": lambda m, v: jnp.outer(v, v),
    "einsum": lambda m, v: jnp.einsum("ij,ij->i", m, m),
    "zeros_like": lambda m, v: jnp.zeros_like(m),
    "softmax": lambda m, v: jax.nn.softmax(m),
}


def _on_host(x):
    return jax.pure_callback(_of_arrays, x, x, vmap_method="sequential")


def _of_arrays(x):
    return on_host(np.asarray(x))


BY_HAND = {
    **{f"ops.{name}": function for name, function in FUNCTIONS.items()},
    "log1pexp": _by_hand(
        _log1pexp, lambda x: (_log1pexp(x), x),
        lambda x, upstream: (upstream / (1.0 + jnp.exp(-x)),),
    ),
    "kalman": kalman,
    "on_host": _on_host,
    "solve": solve_by_hand,
    "cube": _cube,
    "given_forward": _cube_by_jvp,
    "method": _cube,
    "residual": _by_hand(lambda x: x * x * x, _residual, lambda square, upstream: (3 * upstream * square,)),
    "in_a_list": _by_hand(lambda x: x * x * x, _residual, lambda square, upstream: (3 * upstream * square,)),
    "static": _by_hand(
        _static, lambda x, *rest: (_static(x, *rest), x),
        lambda kind, config, scale, x, upstream: (3 * scale * upstream * x * x,), static=(1, 2, 3),
    ),
    "three_outputs": _by_hand(
        _three_outputs, lambda x: (_three_outputs(x), x),
        lambda x, upstream: (2 * upstream[0] + 2 * upstream[1] * x + 5 * upstream[2],),
    ),
    "tree": _by_hand(
        _sum_of_squares, lambda params: (_sum_of_squares(params), params),
        lambda params, upstream: (jax.tree.map(lambda leaf: 2 * upstream * leaf, params),),
    ),
    "leaves": _by_hand(
        lambda tensors: sum(tensors), lambda tensors: (sum(tensors), tensors),
        lambda tensors, upstream: ([7 * upstream for _ in tensors],),
    ),
    "positional": _by_hand(
        lambda *tensors: sum(tensors), lambda *tensors: (sum(tensors), tensors),
        lambda tensors, upstream: tuple(7 * upstream for _ in tensors),
    ),
    "nested": _by_hand(
        lambda lists: innermost(lists) ** 2, lambda lists: (innermost(lists) ** 2, lists),
        lambda lists, upstream: (nest(2 * upstream * innermost(lists), depth_of(lists)),),
    ),
}  # fmt: skip


def tensor(size):
    return jnp.linspace(0.5, 1.5, size) if size > 1 else jnp.float32(0.7)


def plain(op, *args):
    return _done(lambda: op(*args))


def forward(op, x):
    return _done(lambda: jax.vjp(op, x)[0])


def gradient(op, first, *static):
    upstream = jax.tree.map(jnp.ones_like, op(first, *static))
    return _done(lambda: jax.vjp(lambda first: op(first, *static), first)[1](upstream))


def second_order(op, x):
    return _done(partial(jax.grad(jax.grad(op)), x))


def jvp(op, x):
    tangent = jnp.ones_like(x)
    return _done(lambda: jax.jvp(op, (x,), (tangent,)))


def func_grad(op, x):
    return _done(partial(jax.grad(op), x))


def vmap_of_grad(op, xs):
    return _done(partial(jax.vmap(jax.grad(op)), xs))


def compiled(op, x):
    return _done(partial(jax.jit(jax.grad(lambda x: op(x).sum())), x))


def compiled_plain(op, x):
    return _done(partial(jax.jit(lambda x: op(x)), x))


def vmap(op, xs):
    return _done(partial(jax.vmap(op), xs))


def function(op, x):
    m = x.reshape(32, 32)
    v = m[0]
    return _done(lambda: op(m, v))


def filtering(op, *arrays):
    return _done(partial(op, *map(jnp.asarray, arrays)))


def compiled_filtering(op, *arrays):
    return filtering(jax.jit(op), *arrays)


def compiled_training_step(op, x):
    """A step of stochastic gradient descent for a small network, with the op after each of its
    hidden layers.
    """
    x, keys = x.reshape(16, 32), jax.random.split(jax.random.key(0), 3)
    sizes = [(32, 64), (64, 64), (64, 1)]
    params = [0.1 * jax.random.normal(key, size) for key, size in zip(keys, sizes, strict=True)]

    def loss(params):
        return jnp.mean((op(op(x @ params[0]) @ params[1]) @ params[2]) ** 2)

    @jax.jit
    def step(params):
        return jax.tree.map(lambda p, slope: p - 1e-4 * slope, params, jax.grad(loss)(params))

    return _done(partial(step, params))


def compiled_pullback(op, matrix, right, upstream):
    if op is solve_by_hand:
        return partial(op, matrix, right, upstream)
    matrix, right, upstream = map(jnp.asarray, (matrix, right, upstream))

    @jax.jit
    def run(matrix, right, upstream):
        solution, pullback = jax.vjp(op, matrix, right)
        return solution, pullback(upstream)

    return _done(partial(run, matrix, right, upstream))


def tracing(op, x):
    return lambda: jax.jit(lambda x: jax.grad(op)(x)).lower(x)


def tracing_forward(op, x):
    """A new function in each run, or jit would remember the last one's."""

    def ten(x):
        for _ in range(10):
            x = op(x)
        return x

    return lambda: jax.jit(lambda x: ten(x)).lower(x)


def _done(run):
    return lambda: jax.block_until_ready(run())
