"""Ops that a rule calls: the tensors that they capture are constants."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cgshim import op_custom_gradient, op_vjp

X, Y = jnp.array(2.0), jnp.array(10.0)


def outer_with(rule, needs_y=False):
    """x * x, with a rule that is given its arguments."""
    if needs_y:
        return op_custom_gradient(
            lambda x, y: (x * x, lambda upstream: (rule(upstream, x, y), None))
        )
    return op_custom_gradient(lambda x: (x * x, lambda upstream: rule(upstream, x)))


PRODUCTS = {"x first": lambda x, y: x * y, "x last": lambda x, y: y * x}


def test_what_is_used_twice_again_and_again_is_looked_at_once(staging):
    def rule(upstream, x):
        captured = x
        for _ in range(60):
            captured = 0.5 * captured + 0.5 * captured
        return upstream * op_custom_gradient(
            lambda x: (x * captured, lambda u: u * 3 * captured), name="inner"
        )(x)

    outer = outer_with(rule)
    np.testing.assert_allclose(jax.grad(staging(outer))(X), X * X)
    np.testing.assert_allclose(jax.grad(jax.grad(staging(outer)))(X), 3 * X)


KEPT = {
    "residual": lambda x: (x**3, 3 * x * x),
    "output": lambda x: (x**3,) * 2,
    "given": lambda x: (x**3, x),
}


@pytest.mark.parametrize("kept", KEPT)
def test_a_tensor_made_of_the_inner_argument_is_constant(kept, staging):
    @op_custom_gradient
    def fused(x):
        value, derivative = KEPT[kept](x)
        inner = op_custom_gradient(lambda z: (derivative, lambda v: v * 42 * z), name="inner")
        return value, lambda upstream: upstream * inner(x)

    np.testing.assert_allclose(jax.grad(staging(fused))(X), KEPT[kept](X)[1])
    np.testing.assert_allclose(jax.grad(jax.grad(staging(fused)))(X), 84)
    np.testing.assert_allclose(staging(jax.grad(staging(jax.grad(fused))))(X), 84)
    np.testing.assert_allclose(jax.grad(jax.grad(jax.grad(staging(fused))))(X), 42)


def layer(x, w):
    def inner(x):
        return x * w, lambda u, variables=None: (u * 3 * w, [u * 6 * x]) if variables else u * 3 * w

    return op_custom_gradient(inner)(x)


def test_a_checkpoint_that_is_an_op(staging):
    """By op_vjp: in a jax.vjp of the rule's own, w would be a constant of the layer."""
    checkpointed = op_custom_gradient(
        lambda x, w: (layer(x, w), lambda u: op_vjp(layer, x, w)[1](u))
    )
    np.testing.assert_allclose(jax.grad(staging(lambda w: checkpointed(X, w)))(Y), 12)
    np.testing.assert_allclose(jax.grad(staging(lambda x: checkpointed(x, Y)))(X), 30)
    np.testing.assert_allclose(
        jax.grad(lambda w: jax.grad(staging(lambda x: checkpointed(x, w)))(X))(Y), 3
    )


@pytest.mark.parametrize("depth", [1, 8])
def test_ops_that_capture_and_nest_run_f_once_each(depth, staging):
    runs = collections.Counter()

    def nested(depth, w):
        if not depth:
            return lambda x: x * w
        inner = nested(depth - 1, w)

        def f(x):
            runs[depth] += 1
            return inner(
                x
            ) * 1.0, lambda u, variables=None: (u * w, [u * x]) if variables else u * w

        return op_custom_gradient(f)

    calls = []
    loss = jax.grad(lambda w: staging(lambda x: calls.append(1) or nested(depth, w)(x))(X))
    assert loss(Y) == 2
    assert runs == dict.fromkeys(range(1, depth + 1), len(calls))


@op_custom_gradient
def solve(apply, b, *of):
    """b / apply(1, *of), as an iterative solver has it: the rule solves for what holds `of`."""
    x = b / apply(jnp.ones_like(b), *of)

    def rule(upstream):
        y = solve(lambda v: apply(v, *of), upstream)
        return None, 3 * y, *(-5 * x * y for _ in of)

    return x, rule


def test_an_op_that_its_own_rule_calls_closes_over_arguments(staging):
    loss = lambda b, a: jnp.sum(solve(lambda v, a: a * v, b, a))
    both = b, a = jnp.array([[10.0, 100.0], [2.0, 4.0]])
    first = staging(lambda both: jnp.stack(jax.grad(loss, (0, 1))(*both)))
    np.testing.assert_allclose(first(both), [3 / a, -5 * b / a**2])
    of_b, of_a = jnp.moveaxis(jax.vmap(first)(jnp.stack([both, 7 * both])), 1, 0)
    np.testing.assert_allclose(of_b, [3 / a, 3 / (7 * a)])
    np.testing.assert_allclose(of_a, [-5 * b / a**2, -5 * b / (7 * a**2)])
    of_b = jax.jacrev(staging(lambda b: jax.grad(loss, 1)(b, a)))(b)
    np.testing.assert_allclose(of_b, np.diag(-5 * 3 / a**2))
    # the solve within the rule closes over a, which is a constant there
    of_b = jax.jacrev(staging(lambda a: jax.grad(loss)(b, a)))(a)
    np.testing.assert_allclose(of_b, np.zeros((2, 2)))
