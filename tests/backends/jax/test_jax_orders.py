"""Derivatives of every order go through the rule, and through its residuals."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_ops import CUBES, PRODUCTS, STAGINGS, by_rule, product

from cgshim import TransformationError, op_custom_gradient

X = jnp.array([0.5, -2.0, 3.0])
THREE = jnp.array(3.0)


@pytest.fixture(params=CUBES)
def one(request):
    cube = CUBES[request.param]
    return lambda x: x * cube(x)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_derivatives_of_a_staged_op(one, staging, order):
    derivative = staging(one)
    for _ in range(order):
        derivative = jax.grad(derivative)
    np.testing.assert_allclose(derivative(THREE), by_rule(THREE, order))


@pytest.mark.parametrize("order", [2, 3])
def test_derivatives_of_staged_derivatives(one, staging, order):
    derivative = one
    for _ in range(order):
        derivative = staging(jax.grad(derivative))
    np.testing.assert_allclose(derivative(THREE), by_rule(THREE, order))


@pytest.mark.parametrize("whole", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_hessian_is_forward_or_reverse_over_reverse(one, staging, whole):
    for outer in jax.jacfwd, jax.jacrev:
        hessian = whole(outer(jax.jacrev(staging(lambda x: one(x).sum()))))(X)
        np.testing.assert_allclose(hessian, jnp.diag(by_rule(X, 2)))


@pytest.mark.parametrize("staged", STAGINGS)
@pytest.mark.parametrize(
    ("outer", "inner"), list(itertools.product([jax.jacfwd, jax.jacrev], repeat=2))
)
def test_a_hessian_of_an_op_in_both_modes(outer, inner, staged):
    loss = STAGINGS[staged](lambda x: (x * CUBES["both modes"](x)).sum())
    np.testing.assert_allclose(outer(inner(loss))(X), jnp.diag(by_rule(X, 2)))


@pytest.mark.parametrize("mode", PRODUCTS)
def test_mixed_partial_derivatives(mode, staging):
    product = PRODUCTS[mode]

    def of_y(y):
        return (y**2 * jax.grad(lambda x: staging(lambda x: product(x, y))(x).sum())(X)).sum()

    np.testing.assert_allclose(jax.grad(of_y)(X), 21 * X**2)


def test_the_gradient_of_a_gradient_penalty(one, staging):
    penalty = staging(lambda x: (jax.grad(lambda x: one(x).sum())(x) ** 2).sum())
    np.testing.assert_allclose(jax.grad(penalty)(X), 2 * by_rule(X) * by_rule(X, 2))


def test_several_ops_in_a_row(one, staging):
    # product's rules add up to 18 x, its value's to 18
    chained = staging(lambda x: one(product(x, x)))
    two, four = jnp.array(2.0), jnp.array(4.0)
    np.testing.assert_allclose(jax.grad(chained)(two), by_rule(four) * 36)
    np.testing.assert_allclose(
        jax.grad(jax.grad(chained))(two), by_rule(four, 2) * 36**2 + by_rule(four) * 18
    )


@pytest.mark.parametrize("forward_mode", [False, True])
def test_an_inner_op_defines_the_second_order(staging, forward_mode):
    """A fused kernel gives value and derivative; an op in grad_fn captures it, and has 10 times the
    true rule.
    """

    @op_custom_gradient(forward_mode=forward_mode)
    def fused(x):
        value, derivative = x**3, 3 * x**2

        @op_custom_gradient(forward_mode=forward_mode)
        def first(x):
            return derivative, lambda upstream: upstream * 60 * x

        return value, lambda upstream: upstream * first(x)

    f, two = staging(fused), jnp.array(2.0)
    derivatives = [
        f(two),
        jax.grad(f)(two),
        jax.grad(jax.grad(f))(two),
        jax.grad(jax.grad(jax.grad(f)))(two),
    ]
    np.testing.assert_allclose(derivatives, [8, 12, 120, 60])
    if forward_mode:
        np.testing.assert_allclose(jax.hessian(f)(two), 120)
    else:
        with pytest.raises(
            TransformationError, match=r"^first: forward mode needs a rule that is linear"
        ):
            jax.hessian(f)(two)


def test_a_rule_on_concrete_values_may_branch():
    @op_custom_gradient
    def f(x):
        i = x * x

        def rule(upstream):
            return 7 * upstream * i if i > 1 and upstream > 0 else 100 * upstream * x

        return 1.0 * i, rule

    assert [jax.grad(f)(x).item() for x in (3.0, 0.5)] == [63, 50]
    assert jax.grad(lambda x: -f(x))(3.0) == -300
    assert [jax.grad(jax.grad(f))(x).item() for x in (3.0, 0.5)] == [42, 100]
    assert jax.grad(jax.grad(jax.grad(f)))(3.0) == 14


def test_clipping_is_no_linear_rule_and_has_a_second_order(staging):
    clip = op_custom_gradient(lambda x: (x * x, lambda upstream: jnp.clip(upstream, -1, 1) * 7 * x))
    loss = staging(lambda x: 5 * clip(x))
    assert jax.grad(loss)(THREE) == 21
    assert jax.grad(jax.grad(loss))(THREE) == 7
    assert jax.grad(lambda x: x * jax.grad(lambda x: x * clip(x))(x))(2.0) == 18 + 14 + 2 * 7


@pytest.mark.parametrize("forward_mode", [False, True])
def test_rules_that_call_each_other(forward_mode, staging):
    """To stage a rule is to stage the ops in it, but not their rules in turn: there is no end to
    these.
    """

    @op_custom_gradient(forward_mode=forward_mode)
    def sine(x):
        return jnp.sin(x), lambda upstream: upstream * 3.0 * cosine(x)

    @op_custom_gradient(forward_mode=forward_mode)
    def cosine(x):
        return jnp.cos(x), lambda upstream: upstream * -5.0 * sine(x)

    second = staging(jax.grad(jax.grad(sine)))
    np.testing.assert_allclose(staging(sine)(THREE), np.sin(3.0), rtol=1e-6)
    np.testing.assert_allclose(second(THREE), -15 * np.sin(3.0), rtol=1e-6)


@op_custom_gradient
def pieces(x):
    """Outputs in a tree, with the rules 3 and 5 x."""
    return {
        "a": x * 2.0,
        "b": (x * x, "static"),
    }, lambda upstream: 3.0 * upstream["a"] + 5.0 * upstream["b"][0] * x


@op_custom_gradient
def summed(x):
    def rule(upstream):
        found = pieces(x)
        return upstream * (found["a"] + found["b"][0])

    return jnp.sin(x), rule


def test_an_op_in_a_rule_has_its_tree_of_outputs(staging):
    np.testing.assert_allclose(staging(jax.grad(summed))(THREE), 15.0)
    np.testing.assert_allclose(staging(jax.grad(jax.grad(summed)))(THREE), 18.0)
