"""Run by test_jax_devices.py in a process of its own, where the CPU is several devices: prints what
it checked.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_ops import CUBES, PRODUCTS, by_rule, cube_both_modes, product_both_modes

from cgshim import op_custom_gradient, op_custom_jvp

N = jax.device_count()
MESH = jax.make_mesh((N,), ("d",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((N,), ("d",), axis_types=(AxisType.Explicit,))
GRID = jax.make_mesh((2, N // 2), ("rows", "d"), axis_types=(AxisType.Auto,) * 2)
X = jnp.linspace(-2.0, 3.0, 2 * N)
Y = jnp.array(10.0)


def shard(f, mesh=MESH):
    """f over slices of its first argument."""
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d")))


def pmap(one, product):
    x = X.reshape(N, 2)
    yield jax.pmap(jax.grad(lambda x: (x * one(x)).sum()))(x), by_rule(x)
    yield jax.grad(lambda x: jax.pmap(lambda x: x * one(x))(x).sum())(x), by_rule(x)


def shard_map(one, product):
    yield shard(lambda x, y: jax.grad(lambda x: (x * one(x)).sum())(x))(X, Y), by_rule(X)
    loss = jax.grad(lambda x, y: (shard(product)(x, y) * x).sum(), (0, 1))
    for gradient in loss, jax.jit(loss):
        of_x, of_y = gradient(X, Y)
        yield of_x, 7 * Y * X + Y * X
        yield of_y, 11 * (X * X).sum()  # the devices share y: its gradient is their sum
    second = jax.grad(lambda y: jax.grad(lambda x: (shard(product)(x, y) * x).sum())(X).sum())
    yield second(Y), (7 + 11) * X.sum()
    yield jax.grad(lambda x: shard(jax.vmap(product, (0, None)))(x, Y).sum())(X), 7 * Y + 0 * X
    yield (
        shard(lambda x, y: jax.grad(lambda x: jax.vmap(product, (0, None))(x, y).sum())(x))(X, Y),
        7 * Y + 0 * X,
    )
    hessian = jax.jvp(
        jax.grad(lambda x: shard(lambda x, y: x * one(x))(x, Y).sum()), (X,), (jnp.ones_like(X),)
    )[1]
    yield hessian, by_rule(X, 2)


def forward_shard_map(one, product):
    yield jax.jvp(lambda x: shard(product_both_modes)(x, Y), (X,), (X,))[1], 7 * Y * X
    yield shard(lambda x, y: jax.jvp(cube_both_modes, (x,), (x,))[1])(X, Y), 15 * X**3
    of_shared = jax.jvp(lambda y: shard(product_both_modes)(X, y), (Y,), (Y,))[1]
    yield of_shared, 11 * X * Y  # every device has y, and a part of its gradient
    yield jax.jit(jax.jacfwd(lambda y: shard(product_both_modes)(X, y)))(Y), 11 * X
    yield (
        shard(lambda x, y: jax.jvp(lambda y: product_both_modes(x, y), (y,), (y,))[1])(X, Y),
        11 * X * Y,
    )


def hessian_of_shared(one, product):
    loss = lambda x, y: (shard(product)(x, y) ** 2).sum()
    yield jax.hessian(loss, 1)(X, Y), jax.jit(jax.grad(jax.grad(loss, 1), 1))(X, Y)
    yield jax.jit(jax.hessian(loss, 1))(X, Y), (2 * 11 * 11 * X * X).sum()
    yield jax.jacfwd(jax.grad(loss), 1)(X, Y), jax.jit(jax.jacrev(jax.grad(loss), 1))(X, Y)


def sharded_jit(one, product):
    x = jax.device_put(X, NamedSharding(MESH, P("d")))
    gradient = jax.jit(jax.grad(lambda x: (x * one(x)).sum()))(x)
    assert gradient.sharding.spec == P("d")
    yield gradient, by_rule(X)
    yield jax.jit(jax.grad(lambda y: (product(x, y) * x).sum()))(Y), 11 * (X * X).sum()


def explicit_shardings(one, product):
    with jax.set_mesh(EXPLICIT):
        x = jax.device_put(X, NamedSharding(EXPLICIT, P("d")))
        of_x, of_y = jax.jit(jax.grad(lambda x, y: (product(x, y) * x).sum(), (0, 1)))(x, Y)
        assert jax.typeof(of_x).sharding.spec == P("d")
        yield of_x, 7 * Y * X + Y * X
        yield of_y, 11 * (X * X).sum()
        yield jax.jit(jax.vmap(jax.grad(product), (0, None)))(x, Y), 7 * Y + 0 * X
        yield (
            jax.jit(jax.grad(lambda x: jax.vmap(product, (0, None))(x, Y).sum()))(x),
            7 * Y + 0 * X,
        )
        yield jax.jit(jax.grad(lambda y: jax.vmap(product, (0, None))(x, y).sum()))(Y), 11 * X.sum()
        yield jax.grad(lambda x: jax.grad(lambda x: (x * one(x)).sum())(x).sum())(x), by_rule(X, 2)


def batches_of_what_is_sharded(one, product):
    of_row = lambda x: jax.grad(lambda x: (x * one(x)).sum())(x)
    x = jnp.stack([X, 2 * X])
    of_slice = jax.jit(
        jax.shard_map(lambda x: x * one(x), mesh=GRID, in_specs=P("d"), out_specs=P("d"))
    )
    loss = lambda x: jax.vmap(of_slice, spmd_axis_name="rows")(x).sum()
    for compiler in (lambda f: f), jax.jit:
        yield compiler(jax.grad(loss))(x), by_rule(x)
        yield compiler(jax.grad(lambda x: jax.grad(loss)(x).sum()))(x), by_rule(x, 2)
    with jax.set_mesh(EXPLICIT):
        x = jnp.stack([X, 2 * X, 3 * X])  # a batch that no devices share
        x = jax.device_put(x, NamedSharding(EXPLICIT, P(None, "d")))
        for gradient in (
            jax.grad(lambda x: jax.vmap(lambda x: x * one(x))(x).sum()),
            jax.vmap(of_row),
        ):
            for found in gradient(x), jax.jit(gradient)(x):
                assert jax.typeof(found).sharding.spec == P(None, "d")
                yield found, by_rule(x)


def kept_outputs(one, product):
    def f(x):
        y = jax.lax.stop_gradient(jnp.exp(x))
        return y, lambda upstream: upstream * 5 * y

    op = op_custom_gradient(f, forward_mode=one is cube_both_modes)
    inside = shard(lambda x, y: jax.grad(lambda x: jax.grad(lambda x: op(x).sum())(x).sum())(x))
    yield inside(X, Y), 25 * jnp.exp(X)
    for outside in (
        (lambda x: shard(lambda x, y: op(x))(x, Y).sum()),
        (lambda x: jax.jit(shard(op_times))(x, Y).sum()),
    ):
        second = jax.grad(lambda x: jax.grad(outside)(x).sum())  # noqa: B023
        yield second(X), 25 * jnp.exp(X)


def op_times(x, y):
    def f(x):
        z = jax.lax.stop_gradient(jnp.exp(x))
        return z, lambda upstream: upstream * 5 * z

    return op_custom_gradient(f)(x)


def constants_in_a_shard_map(one, product):
    """Tangents, gradients and zeros that are the same on all devices, where the argument differs."""

    def steps(x, dx, dy):
        return jax.lax.scan(lambda c, _: ((c[0] + c[1], c[1] * x), None), (dx, dy), length=2)[0][0]

    op = op_custom_jvp(lambda x, y: (x * y, lambda dx, dy: steps(x, dx, dy)))
    flat = op_custom_gradient(lambda x: (x * x, lambda upstream: jnp.full(x.shape, 3.0)))
    of_one = lambda x, y: op(x, jax.lax.stop_gradient(x))
    yield shard(lambda x, y: jax.grad(lambda x: of_one(x, y).sum())(x))(X, Y), 1 + 0 * X
    yield shard(lambda x, y: jax.grad(lambda x: op(x, x).sum())(x))(X, Y), 2 + X
    yield shard(lambda x, y: jax.jvp(lambda x: op(x, x), (x,), (jnp.ones(2),))[1])(X, Y), 2 + X
    yield shard(lambda x, y: jax.grad(lambda x: (flat(x) * x).sum())(x))(X, Y), 3 + X * X


CHECKS = (
    pmap, shard_map, forward_shard_map, hessian_of_shared, sharded_jit, explicit_shardings, batches_of_what_is_sharded,
    kept_outputs, constants_in_a_shard_map,
)  # fmt: skip

if __name__ == "__main__":
    assert int(sys.argv[1]) == N
    for mode in CUBES:
        for check in CHECKS:
            for found, expected in check(CUBES[mode], PRODUCTS[mode]):
                np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=check.__name__)
            print(N, mode, check.__name__)
