"""Declared variables where nothing tells yet if they are differentiated: under jit, checkpoint, cond."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cgshim import CustomGradientValueError, op_custom_gradient

W, C, X = jnp.array(2.0), jnp.array(3.0), jnp.array(5.0)


def scale(of_variables, runs=None, forward_mode=False):
    """w * c * x by an op that closes over w and c, with 7 w c for the rule of x."""

    def loss(w, c, x):
        def f(x):
            (collections.Counter() if runs is None else runs).update("f")

            def rule(upstream, variables=None):
                of_x = 7 * upstream * w * c
                return (of_x, of_variables(upstream, w, c, x)) if variables else of_x

            return w * c * x, rule

        op = op_custom_gradient(f, name="scale", forward_mode=forward_mode, variables=[w, c])
        return op(x)

    return loss


def of_both(upstream, w, c, x):
    return [11 * upstream * x, 13 * upstream * x * w]


def of_one(upstream, w, c, x):
    return [11 * upstream * x]


@jax.custom_vjp
def by_hand(w, c, x):
    return w * c * x


def _gradients(kept, u):
    return (*of_both(u, *kept), 7 * u * kept[0] * kept[1])


by_hand.defvjp(lambda w, c, x: (w * c * x, (w, c, x)), _gradients)

STAGED = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda w, c, x: jax.lax.cond(w > 0, f, lambda w, c, x: x, w, c, x),
    "vmap of jit": lambda f: lambda w, c, x: jax.vmap(jax.jit(f))(w[None], c[None], x[None])[0],
    "jit of jit": lambda f: jax.jit(jax.jit(f)),
}


@pytest.fixture(params=STAGED)
def staged(request):
    return STAGED[request.param]


@pytest.mark.parametrize("of_variables", [of_one, of_both])
def test_a_rule_is_not_checked_where_no_gradient_is_taken(staged, of_variables):
    loss = staged(scale(of_variables))
    assert loss(W, C, X) == 30
    assert jax.eval_shape(loss, W, C, X).shape == ()
    assert jax.grad(lambda w: w * jax.lax.stop_gradient(loss(w, C, X)))(W) == 30


@pytest.mark.parametrize("argnums", [0, 1, 2, (0, 2), (0, 1, 2)])
@pytest.mark.parametrize(
    "derivative", [jax.grad, lambda f, a: jax.jit(jax.grad(f, a))], ids=["grad", "jit of grad"]
)
def test_a_rule_with_a_gradient_for_each(staged, argnums, derivative):
    found = derivative(staged(scale(of_both)), argnums)(W, C, X)
    assert np.all(np.asarray(found) == np.asarray(derivative(staged(by_hand), argnums)(W, C, X)))


def test_in_every_order(staged):
    for first, second in (2, 0), (0, 2), (1, 0), (0, 0):
        orders = [
            jax.grad(jax.grad(staged(f), first), second)(W, C, X) for f in (scale(of_both), by_hand)
        ]
        assert orders[0] == orders[1], (first, second)


def test_a_rule_with_one_gradient_too_few_says_so(staged):
    for argnums in 0, 2, (0, 1):
        with pytest.raises(
            CustomGradientValueError, match="gradients of variables structured as declared, got"
        ):
            jax.grad(staged(scale(of_one)), argnums)(W, C, X)


def test_forward_mode(staged):
    loss = staged(scale(of_both, forward_mode=True))
    assert jax.jvp(lambda w: loss(w, C, X), (W,), (10.0,))[1] == 550
    assert jax.jvp(lambda x: loss(W, C, x), (X,), (10.0,))[1] == 420


def test_f_runs_once():
    runs = collections.Counter()
    loss = jax.jit(scale(of_both, runs))
    assert [jax.grad(loss, a)(W, C, X) for a in (0, 2)] == [55, 42]
    assert loss(W, C, X) == 30
    assert runs["f"] == 1


def test_no_tracer_leaves_a_call():
    with jax.checking_leaks():
        assert jax.jit(scale(of_both))(W, C, X) == 30
        assert jax.grad(jax.jit(scale(of_both)))(W, C, X) == 55
        assert (
            jax.jit(
                lambda w, x: op_custom_gradient(lambda x: (w * x, lambda u, variables: 1 / 0))(x)
            )(W, X)
            == 10
        )
