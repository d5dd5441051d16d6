import functools

import jax
import jax.numpy as jnp
import numpy as np
from cells import host_cell
from ops import X, by_rule

X = jnp.array(X, "float32")
V = jnp.array([1.0, 10.0, 100.0], "float32")


def one(op):
    return lambda x: x * op(x)


def loss(op):
    return lambda x: jnp.sum(x * op(x))


@host_cell("gradient")
def gradient(op):
    return jax.grad(loss(op))(X), by_rule(X)


@host_cell("Jacobian")
def of_vector(op):
    return jax.jacrev(op)(X), jnp.diag(15 * X**2)


@host_cell("second order")
def second(op):
    return jax.jacrev(jax.grad(loss(op)))(X), jnp.diag(by_rule(X, 2))


@host_cell("second order, compiled")
def compiled_second(op):
    return jax.jit(jax.jacrev(jax.grad(loss(op))))(X), jnp.diag(by_rule(X, 2))


@host_cell("vmap")
def mapped(op):
    return jax.vmap(op)(X), X**3


@host_cell("gradient of vmap")
def gradient_of_vmap(op):
    return jax.grad(lambda x: jnp.sum(V * jax.vmap(op)(x)))(X), 15 * V * X**2


@host_cell("vmap of gradient")
def vmap_of_gradient(op):
    return jax.vmap(jax.grad(one(op)))(X), by_rule(X)


@host_cell("forward mode, promised")
def promised(op):
    return jax.jvp(op, (X,), (V,))[1], 15 * V * X**2


@host_cell("Hessian, forward over reverse, promised")
def forward_over_reverse(op):
    return jax.hessian(loss(op))(X), jnp.diag(by_rule(X, 2))


@host_cell("compiled")
@host_cell("compiled by XLA")
def compiled(op):
    return jax.jit(op)(X), X**3


@host_cell("compiled gradient")
def compiled_gradient(op):
    return jax.jit(jax.grad(loss(op)))(X), by_rule(X)


@host_cell("compiled vmap")
def compiled_vmap(op):
    return jax.jit(jax.vmap(op))(X), X**3


@host_cell("compiled vmap of gradient")
def compiled_vmap_of_gradient(op):
    return jax.jit(jax.vmap(jax.grad(one(op))))(X), by_rule(X)


@host_cell("compiled forward mode, promised")
def compiled_forward(op):
    return jax.jit(jax.jacfwd(op))(X), jnp.diag(15 * X**2)


@host_cell("loops and conditions of the framework")
def loops(op):
    def scanned(x):
        body = lambda carry, x: (carry + jax.lax.cond(x > 0, op, lambda x: x, x), None)
        return jax.lax.scan(body, jnp.float32(0.0), x)[0]

    gradients = [jax.grad(scanned)(X), jax.jit(jax.grad(scanned))(X)]
    twice = jax.lax.while_loop(
        lambda state: state[1] < 1, lambda state: (op(state[0]), state[1] + 1), (X, 0)
    )[0]
    return [*gradients, twice], [*[jnp.where(X > 0, 15 * X**2, 1.0)] * 2, X**3]


@host_cell("checkpointing")
def checkpointed(op):
    gradient = jax.grad(jax.checkpoint(loss(op)))
    return [gradient(X), jax.jit(gradient)(X)], [by_rule(X)] * 2


@host_cell("mixed precision")
def mixed_precision(op):
    gradient = jax.grad(lambda x: jnp.sum(op(x.astype("bfloat16")).astype("float32")))(X)
    return np.round(gradient, 0), np.round(15 * X.astype("bfloat16").astype("float32") ** 2, 0)


@host_cell("several devices or processes")
def sharded(op):
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.PartitionSpec("d")
    x = jnp.tile(X, jax.device_count())
    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=split, out_specs=split)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(mapped(one(op))(x))))
    each = jax.pmap(jax.grad(loss(op)))(x.reshape(jax.device_count(), -1))
    return [gradient(x), each.reshape(-1)], [by_rule(x)] * 2
