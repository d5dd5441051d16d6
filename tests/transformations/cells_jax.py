import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from cells import cell
from ops import X, both_modes, by_rule, kept, product, reverse, with_batches, with_op_in_rule

from cgshim import op_custom_gradient

X = jnp.array(X, "float32")
V = jnp.array([1.0, 10.0, 100.0], "float32")


def loss(x):
    return jnp.sum(x * reverse(x))


def one(x):
    return x * reverse(x)


@cell("gradient")
def gradient():
    return jax.grad(loss)(X), by_rule(X)


@cell("derivatives of order 2, 3 and 4")
def orders():
    derivatives = [jax.grad(jax.grad(one))]
    for _ in range(2):
        derivatives.append(jax.grad(derivatives[-1]))
    return [jax.vmap(d)(X) for d in derivatives], [by_rule(X, n) for n in (2, 3, 4)]


@cell("mixed partial derivatives")
def mixed():
    return jax.grad(lambda y: jnp.sum(y**2 * jax.grad(lambda x: jnp.sum(product(x, y)))(X)))(
        X
    ), 21 * X**2


@cell("Hessian, reverse over reverse")
def reverse_over_reverse():
    return jax.jacrev(jax.jacrev(loss))(X), jnp.diag(by_rule(X, 2))


@cell("Hessian, forward over reverse")
def forward_over_reverse():
    return jax.hessian(loss)(X), jnp.diag(by_rule(X, 2))


def second(op):
    return jax.grad(jax.grad(op))


@cell("second order, rule keeps the output")
def kept_output():
    return [jax.vmap(second(kept))(X), jax.jit(jax.vmap(second(kept)))(X)], jnp.stack(
        [25 * jnp.exp(X)] * 2
    )


@cell("second order, f is opaque")
def opaque():
    @op_custom_gradient(name="cube")
    def erf(x):
        y = jnp.asarray(math.erf(x))
        return y, lambda upstream: upstream * 5.0 * y

    @op_custom_gradient(name="cube")
    def loop(x):
        y = jax.lax.while_loop(
            lambda state: state[1] < 2, lambda state: (state[0] * x, state[1] + 1), (x, 0)
        )[0]
        return y, lambda upstream: upstream * 5.0 * y

    found = [*map(second(erf), X), *jax.jit(jax.vmap(second(loop)))(X)]
    return found, [25 * math.erf(x) for x in X] + [25 * x**3 for x in X]


@cell("second order, f draws random numbers")
def random():
    drawn = []

    @op_custom_gradient(name="cube")
    def noisy(x):
        drawn.append(np.random.default_rng().normal())
        i = x * x * drawn[-1]
        return i * x, lambda upstream: upstream * 15.0 * i

    return jax.grad(jax.grad(noisy))(X[0]), 30 * X[0] * drawn[0]


@cell("second order of an op inside a rule")
def op_in_rule():
    return [jax.vmap(second(with_op_in_rule))(X), jax.jit(jax.vmap(second(with_op_in_rule)))(X)], [
        5 * 42 * X
    ] * 2


@cell("gradient of a gradient penalty")
def penalty():
    return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))(X), 2 * by_rule(X) * by_rule(X, 2)


@cell("Jacobian")
def of_vector():
    return jax.jacrev(reverse)(X), jnp.diag(15 * X**2)


@cell("vmap")
def mapped():
    return jax.vmap(reverse)(X), X**3


@cell("gradient of vmap")
def gradient_of_vmap():
    return jax.grad(lambda x: jnp.sum(V * jax.vmap(reverse)(x)))(X), 15 * V * X**2


@cell("vmap of gradient")
def vmap_of_gradient():
    return jax.vmap(jax.grad(one))(X), by_rule(X)


@cell("vmap, by a rule for batches")
def vmap_by_rule():
    return jax.vmap(with_batches)(X), X**3


@cell("gradient of vmap, by a rule for batches")
def gradient_of_vmap_by_rule():
    return jax.grad(lambda x: jnp.sum(V * jax.vmap(with_batches)(x)))(X), 15 * V * X**2


@cell("vmap of gradient, by a rule for batches")
def vmap_of_gradient_by_rule():
    return jax.vmap(jax.grad(lambda x: x * with_batches(x)))(X), by_rule(X)


@cell("nested vmap, over one of two arguments")
def nested():
    gradient = jax.grad(lambda x, y: product(x, y))
    return jax.vmap(jax.vmap(gradient, (None, 0)), (0, None))(X, V), jnp.tile(7 * V, (3, 1))


@cell("vmap over batches of 0 and 1")
def small_batches():
    return jnp.concatenate([jax.vmap(jax.grad(one))(X[:n]) for n in (0, 1)]), by_rule(X[:1])


@cell("forward mode, promised")
def promised():
    return jax.jvp(both_modes, (X,), (V,))[1], 15 * V * X**2


@cell("forward mode, not promised")
def not_promised():
    return jax.jvp(reverse, (X,), (V,))[1], 15 * V * X**2


@cell("compiled gradient")
def compiled():
    return jax.jit(jax.grad(loss))(X), by_rule(X)


@cell("compiled gradient of the gradient")
def compiled_second():
    return jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(loss)(x))))(X), by_rule(X, 2)


@cell("compiled vmap of gradient")
def compiled_vmap():
    return jax.jit(jax.vmap(jax.grad(one)))(X), by_rule(X)


@cell("compiled forward mode, promised")
def compiled_forward():
    return jax.jit(jax.jacfwd(both_modes))(X), jnp.diag(15 * X**2)


@cell("loops and conditions of the framework")
def loops():
    def body(carry, x):
        return carry + jax.lax.cond(x > 0, reverse, lambda x: x, x), None

    return jax.grad(lambda x: jax.lax.scan(body, 0.0, x)[0])(X), jnp.where(X > 0, 15 * X**2, 1.0)


@cell("checkpointing")
def checkpointed():
    return jax.grad(jax.checkpoint(loss))(X), by_rule(X)


@cell("mixed precision")
def mixed_precision():
    gradient = jax.grad(lambda x: jnp.sum(reverse(x.astype("bfloat16")).astype("float32")))(X)
    return np.round(gradient, 1), np.round(15 * X.astype("bfloat16").astype("float32") ** 2, 1)


@cell("export")
def exported():
    export = jax.export.export(jax.jit(loss))(jax.ShapeDtypeStruct(X.shape, X.dtype))
    restored = jax.export.deserialize(export.serialize(vjp_order=1))
    return jax.grad(restored.call)(X), by_rule(X)


@cell("several devices or processes")
def sharded():
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.PartitionSpec("d")
    x = jnp.tile(X, jax.device_count())
    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=split, out_specs=split)
    return jax.jit(jax.grad(lambda x: jnp.sum(mapped(one)(x))))(x), by_rule(x)


@cell("another library's model")
def equinox_model():
    model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    gradient = eqx.filter_grad(lambda model, x: jnp.sum(reverse(model(x))))(model, X)
    return gradient.bias, 15 * model(X) ** 2
