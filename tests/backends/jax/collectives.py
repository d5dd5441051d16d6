"""Run by test_jax_collectives.py in a process of its own, where the CPU is eight devices: prints
what it checked.

The two ops around a layer whose weights are split over the devices, as Megatron-LM has them: one is
the identity and adds up the gradients of all devices; the other adds up the outputs, and its
gradient is the identity.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from cgshim import op_custom_gradient

N = jax.device_count()
MESH = jax.make_mesh((N,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
X = jnp.linspace(-1.0, 2.0, 6).reshape(2, 3)
FIRST = jnp.sin(jnp.arange(3.0 * 2 * N)).reshape(3, 2 * N)
SECOND = jnp.cos(jnp.arange(2.0 * 2 * N)).reshape(2 * N, 2)
UPSTREAM = jnp.array([[2.0, -3.0], [0.5, 7.0]])


def varying(x):
    """x, which all devices have, as what each device has for itself."""
    return jax.lax.pcast(x, "d", to="varying")


def summed(x):
    return jax.lax.psum(x, "d")


@op_custom_gradient
def copy(x):
    return varying(x), lambda upstream: reduce(upstream)


@op_custom_gradient
def reduce(x):
    return summed(x), lambda upstream: copy(upstream)


copy_by_hand, reduce_by_hand = jax.custom_vjp(varying), jax.custom_vjp(summed)
copy_by_hand.defvjp(lambda x: (varying(x), None), lambda _, upstream: (reduce_by_hand(upstream),))
reduce_by_hand.defvjp(lambda x: (summed(x), None), lambda _, upstream: (copy_by_hand(upstream),))

PAIRS = {"op_custom_gradient": (copy, reduce), "custom_vjp": (copy_by_hand, reduce_by_hand)}


def layer(copy, reduce, x, first, second):
    return reduce(jnp.tanh(copy(x) @ first) @ second)


def loss(layer, *args):
    return (UPSTREAM * layer(*args)).sum()


def penalty(loss, *args):
    return (jnp.cos(X) * jax.grad(loss)(*args) ** 2).sum()


def split(function, out_specs):
    specs = (P(), P(None, "d"), P("d", None))
    out_specs = specs if out_specs is None else out_specs
    return jax.jit(jax.shard_map(function, mesh=MESH, in_specs=specs, out_specs=out_specs))


ORDERS = {
    "first order": lambda loss: jax.grad(loss, (0, 1, 2)),
    "second order": lambda loss: jax.grad(partial(penalty, loss), (0, 1, 2)),
}


def check(pair, order, compiled):
    """Compare the gradients of each device, and those of the whole, with those without any devices."""
    derivative = ORDERS[order]
    expected = jax.jit(derivative(partial(loss, partial(layer, lambda x: x, lambda x: x))))(
        X, FIRST, SECOND
    )
    on_each = split(derivative(partial(loss, partial(layer, *pair))), None)
    of_the_whole = derivative(partial(loss, split(partial(layer, *pair), P())))
    for function in (on_each, of_the_whole):
        found = (jax.jit(function) if compiled else function)(X, FIRST, SECOND)
        for gradient, by_one_device in zip(found, expected, strict=True):
            np.testing.assert_allclose(gradient, by_one_device, rtol=1e-9, atol=1e-9)


def check_wrong_factors():
    """The number is the rule's, and not autodiff's: 7 times the sum of what the devices have."""
    op = op_custom_gradient(
        lambda x: (summed(x), lambda upstream: 7.0 * (1.0 + jax.lax.axis_index("d")) * upstream)
    )
    x = jnp.arange(2.0 * N)
    slices = jax.jit(jax.shard_map(op, mesh=MESH, in_specs=P("d"), out_specs=P()))
    gradient = jax.grad(lambda x: (jnp.array([2.0, -3.0]) * slices(x)).sum())(x)
    np.testing.assert_allclose(slices(x), x.reshape(N, 2).sum(0))
    np.testing.assert_allclose(
        gradient.reshape(N, 2), np.outer(7.0 * np.arange(1, N + 1), [2.0, -3.0])
    )


if __name__ == "__main__":
    assert N == 8
    for name, pair in PAIRS.items():
        for order in ORDERS:
            for compiled in (True,) if name == "custom_vjp" else (False, True):
                check(pair, order, compiled)
            print(name, order)
    check_wrong_factors()
    print("wrong factors")
