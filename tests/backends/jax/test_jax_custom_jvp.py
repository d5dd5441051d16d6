"""op_custom_jvp beside jax.custom_jvp: every transformation, what is traced, and what is refused.

Slopes are wrong on purpose: a number that autodiff found by itself does not pass.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cgshim import TransformationError, op_custom_gradient, op_custom_jvp

X, Y, V = 0.7, 1.3, 0.4
XS, YS = jnp.linspace(0.1, 0.9, 4), jnp.linspace(1.0, 2.0, 4)


@op_custom_jvp
def op(x, y):
    """Its rule reads the output, a residual, the arguments, and an argument alone."""
    residual = jnp.sin(x) * y
    z = jnp.exp(x) + residual

    def jvp(dx, dy):
        return 3.0 * z * dx + residual * x * dy + jnp.cos(y) * jnp.sum(dx)

    return z, jvp


@jax.custom_jvp
def by_hand(x, y):
    return jnp.exp(x) + jnp.sin(x) * y


@by_hand.defjvp
def _(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    z = by_hand(x, y)
    return z, 3.0 * z * dx + jnp.sin(x) * y * x * dy + jnp.cos(y) * jnp.sum(dx)


def loss(f):
    return lambda x, y: 3.0 * f(x, y) ** 2


def looped(f):
    """Unrolled by hand: in a scan JAX forgets a custom_jvp whose gradient is differentiated."""

    def body(carry, y):
        return f(0.3 * carry, y), carry

    def unrolled(x):
        for y in YS:
            x, _ = body(x, y)
        return x

    return unrolled if f is by_hand else lambda x: jax.lax.scan(body, x, YS)[0]


def along(f, x, y):
    return jax.jvp(f, (x, y), (V, 2 * V))


WAYS = {
    "jvp": lambda f, x, y: along(loss(f), x, y),
    "jit of jvp": lambda f, x, y: jax.jit(lambda *at: along(loss(f), *at))(x, y),
    "jvp of jit": lambda f, x, y: along(jax.jit(loss(f)), x, y),
    "grad": lambda f, x, y: jax.grad(loss(f), (0, 1))(x, y),
    "jit of grad": lambda f, x, y: jax.jit(jax.grad(loss(f), (0, 1)))(x, y),
    "grad of jit": lambda f, x, y: jax.grad(jax.jit(loss(f)), (0, 1))(x, y),
    "checkpoint": lambda f, x, y: jax.hessian(jax.checkpoint(loss(f)), (0, 1))(x, y),
    "linearize": lambda f, x, y: jax.linearize(loss(f), x, y)[1](V, 3 * V),
    "transpose of linearize": lambda f, x, y: jax.linear_transpose(
        jax.linearize(loss(f), x, y)[1], x, y
    )(V),
    "forward over reverse": lambda f, x, y: jax.hessian(loss(f), (0, 1))(x, y),
    "jit of hessian": lambda f, x, y: jax.jit(jax.hessian(loss(f), (0, 1)))(x, y),
    "reverse over reverse": lambda f, x, y: jax.jacrev(jax.grad(loss(f), (0, 1)), (0, 1))(x, y),
    "forward over forward": lambda f, x, y: jax.jacfwd(jax.jacfwd(loss(f), (0, 1)), (0, 1))(x, y),
    "reverse over forward": lambda f, x, y: jax.jacrev(jax.jacfwd(loss(f), (0, 1)), (0, 1))(x, y),
    "third order": lambda f, x, y: jax.jit(jax.grad(jax.grad(jax.grad(loss(f)))))(x, y),
    "vmap of grad": lambda f, x, y: jax.vmap(jax.grad(loss(f), (0, 1)), (0, None))(XS, y),
    "grad of vmap": lambda f, x, y: jax.grad(
        lambda x, y: jax.vmap(loss(f), (None, 0))(x, y).sum(), (0, 1)
    )(x, YS),
    "vmap of jvp": lambda f, x, y: jax.vmap(lambda v: jax.jvp(loss(f), (x, y), (v, v)))(XS),
    "jvp of vmap": lambda f, x, y: jax.jvp(jax.vmap(loss(f)), (XS, YS), (YS, XS)),
    "hessian of vmap": lambda f, x, y: jax.hessian(lambda x: jax.vmap(loss(f))(x, YS).sum())(XS),
    "pullback called twice": lambda f, x, y: [*map(jax.vjp(f, XS, y)[1], (XS, YS))],
    "gradient by tangents": lambda f, x, y: jax.grad(lambda v: jax.jvp(f, (x, y), (v, v))[1])(V),
    "second order of a scan": lambda f, x, y: jax.jit(jax.hessian(looped(f)))(x),
    "reverse twice over a scan": lambda f, x, y: jax.grad(jax.grad(looped(f)))(x),
}


@pytest.mark.parametrize("way", WAYS)
def test_as_by_hand(way):
    x, y = jnp.asarray(X), jnp.asarray(Y)
    found = jax.tree.leaves(WAYS[way](op, x, y))
    expected = jax.tree.leaves(jax.jit(lambda x, y: WAYS[way](by_hand, x, y))(x, y))
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5)


def test_a_jvp_calls_jvp_fn_on_values():
    """As jax.custom_jvp does: nothing is traced."""
    seen = []

    @op_custom_jvp
    def halved(x):
        def jvp(dx):
            seen.append(dx)
            return 7.0 * dx if x > 0 else 5.0 * dx  # x has a value

        return x / 2, jvp

    x, v = jnp.asarray(2.0), jnp.asarray(3.0)
    assert jax.jvp(halved, (x,), (v,))[1] == 21.0
    assert [*map(float, seen)] == [3.0]
    assert jax.jacfwd(halved)(-x) == 5.0


CROOKED = {
    "grad": lambda f, x: jax.grad(f)(x),
    "jit of grad": lambda f, x: jax.jit(jax.grad(f))(x),
    "hessian": lambda f, x: jax.hessian(f)(x),
    "scan": lambda f, x: jax.grad(lambda x: jax.lax.scan(lambda c, _: (f(c), c), x, XS)[0])(x),
    "grad of vmap": lambda f, x: jax.grad(lambda x: jax.vmap(f)(x).sum())(XS),
    "checkpoint": lambda f, x: jax.grad(jax.checkpoint(f))(x),
}


@pytest.mark.parametrize("way", CROOKED)
def test_what_is_not_linear_is_refused(way):
    op = op_custom_jvp(lambda x: (x * x, lambda dx: jnp.abs(dx) * x), name="crooked")
    with pytest.raises(
        TransformationError,
        match=r"^crooked: jvp_fn must be linear in the tangents, got one that JAX cannot transpose",
    ):
        CROOKED[way](op, jnp.asarray(X))


@op_custom_jvp
def powers(x, y):
    """Its jvp_fn has a scan that carries a value beside its tangent, as its own f would be derived."""

    def step(carry, _):
        value, tangent, dx, dy = carry
        return (value * x + y, tangent * x + 3.0 * value * dx + 2.0 * dy, dx, dy), None

    def jvp(dx, dy):
        return jax.lax.scan(step, (x, dx, dx, dy), None, length=3)[0][1]

    return ((x * x + y) * x + y) * x + y, jvp


def tangent_by_hand(x, y, dx, dy):
    value, tangent = x, dx
    for _ in range(3):
        value, tangent = value * x + y, tangent * x + 3.0 * value * dx + 2.0 * dy
    return tangent


@pytest.mark.parametrize("transformed", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_loop_of_values_and_tangents_is_transposed(transformed):
    x, y = jnp.asarray(X), jnp.asarray(Y)
    gradients = [tangent_by_hand(X, Y, 1.0, 0.0), tangent_by_hand(X, Y, 0.0, 1.0)]
    found = transformed(jax.grad(lambda x, y: 5.0 * powers(x, y), (0, 1)))(x, y)
    np.testing.assert_allclose(found, [5.0 * each for each in gradients], rtol=1e-6)
    slopes = jax.jacfwd(lambda x, y: tangent_by_hand(x, y, 1.0, 0.0), (0, 1))(x, y)
    second = transformed(jax.jacrev(jax.grad(powers), (0, 1)))(x, y)
    np.testing.assert_allclose(second, slopes, rtol=1e-6)
    mapped = jax.vmap(jax.grad(powers), (0, None))(XS, y)
    np.testing.assert_allclose(mapped, tangent_by_hand(XS, Y, 1.0, 0.0), rtol=1e-6)


def test_a_rule_traced_for_each_choice_of_arguments_is_right():
    def f(x, y):
        product = functools.cache(lambda: x * y)

        def grad(upstream, needs_input_grad):
            return 3.0 * product() * upstream * y, 5.0 * product() * upstream * x

        return x * y, grad

    op = op_custom_gradient(f)
    assert jax.jit(jax.grad(op))(2.0, 3.0) == 3 * 6 * 3
    assert jax.jit(jax.grad(op, 1))(2.0, 3.0) == 5 * 6 * 2
    assert jax.jit(jax.grad(jax.grad(op, 1)))(2.0, 3.0) == 2 * 5 * 2 * 3


@jax.custom_jvp
def triple(x):
    return 3.0 * x


triple.defjvp(lambda primals, tangents: (triple(*primals), 5.0 * tangents[0]))


@pytest.mark.parametrize("inner", [triple, jax.jit(triple)], ids=["itself", "jit"])
def test_a_custom_jvp_on_a_tangent_is_transposed_as_by_hand(inner):
    op = op_custom_jvp(lambda x: (x * x, lambda dx: x * inner(dx)))
    by_hand = jax.custom_jvp(lambda x: x * x)
    by_hand.defjvp(lambda primals, tangents: (primals[0] ** 2, primals[0] * inner(tangents[0])))
    x = jnp.asarray(X)
    second = lambda f: jax.grad(jax.grad(f))
    along = lambda f: lambda x: jax.jvp(lambda v: jax.jvp(f, (x,), (v,))[1], (x,), (x,))
    for derivative in jax.grad, jax.hessian, second, along, jax.jacfwd:
        for compiled in lambda f: f, jax.jit:
            found, wanted = (compiled(derivative(f))(x) for f in (op, by_hand))
            np.testing.assert_allclose(found, wanted, rtol=1e-6)
