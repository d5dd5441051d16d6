"""Captured tracers of which one is a variable, where nobody knows yet which: under jit, checkpoint, scan."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cgshim import CustomGradientTypeError, CustomGradientValueError, op_custom_gradient

W, C, X = jnp.array(2.0), jnp.array(3.0), jnp.array(5.0)


RUNS = collections.Counter()


class OnlyOneError(Exception):
    pass


def one_gradient(upstream, x, variables):
    return [11 * upstream * x]


def counted(upstream, x, variables):
    if len(variables) != 1:
        raise OnlyOneError("one variable")
    return [11 * upstream * x]


@pytest.fixture(params=[one_gradient, counted])
def of_variables(request):
    return request.param


def scale(of_variables=one_gradient, runs=RUNS, forward_mode=False):
    """w * c * x by an op that captures w and c, with 7 w c for the rule of x, and 11 x for that of w, which it takes
    for its only variable."""  # fmt: skip

    def loss(w, c, x):
        def f(x):
            runs.update("f")

            def rule(upstream, variables=None):
                of_x = 7 * upstream * w * c
                return (of_x, of_variables(upstream, x, variables)) if variables else of_x

            return w * c * x, rule

        return op_custom_gradient(f, name="scale", forward_mode=forward_mode)(x)

    return loss


@jax.custom_vjp
def _by_hand(w, c, x):
    return w * c * x


_by_hand.defvjp(lambda w, c, x: (w * c * x, (w, c, x)), lambda k, u: (11 * u * k[2], 0 * k[1], 7 * u * k[0] * k[1]))

STAGED = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda w, c, x: jax.lax.scan(lambda carry, x: (carry + f(w, c, x), None), 0.0, x[None])[0],
    "cond": lambda f: lambda w, c, x: jax.lax.cond(w > 0, f, lambda w, c, x: x, w, c, x),
    "vmap of jit": lambda f: lambda w, c, x: jax.vmap(jax.jit(f))(w[None], c[None], x[None])[0],
    "jit of jit": lambda f: jax.jit(jax.jit(f)),
}


@pytest.fixture(params=STAGED)
def staged(request):
    return STAGED[request.param]


def test_nothing_is_asked_of_the_rule_where_no_gradient_is_taken(staged, of_variables):
    loss = staged(scale(of_variables))
    assert loss(W, C, X) == 30
    assert jax.eval_shape(loss, W, C, X).shape == ()
    assert jax.grad(lambda w: w * jax.lax.stop_gradient(loss(w, C, X)))(W) == 30


@pytest.mark.parametrize("argnums", [0, 2, (0, 2)])
@pytest.mark.parametrize("derivative", [jax.grad, lambda f, a: jax.jit(jax.grad(f, a))], ids=["grad", "jit of grad"])
def test_the_one_that_is_differentiated_is_the_variable(staged, of_variables, argnums, derivative):
    found = derivative(staged(scale(of_variables)), argnums)(W, C, X)
    assert found == derivative(staged(_by_hand), argnums)(W, C, X)
    assert np.all(np.asarray(found) > 40)


def test_where_two_are_differentiated_the_rule_says_so(staged):
    with pytest.raises(CustomGradientValueError, match="one gradient for each of 2 variables, got a list of 1"):
        jax.grad(staged(scale()), (0, 1))(W, C, X)
    with pytest.raises(OnlyOneError):
        jax.grad(staged(scale(counted)), (0, 1))(W, C, X)


def test_a_second_order_goes_through_the_choice(staged, of_variables):
    loss = staged(scale(of_variables))
    assert jax.grad(lambda x: jax.grad(loss)(W, C, x))(X) == 11
    assert jax.grad(lambda w: jax.grad(loss)(w, C, X))(W) == 0


def test_what_is_differentiated_only_further_out_is_not_taken_for_a_constant(staged):
    """The choice of the inner derivative speaks for w only where that is known to be differentiated then."""
    loss = staged(scale())
    try:
        found = jax.grad(lambda w: jax.grad(loss, 2)(w, C, X))(W)
    except CustomGradientTypeError as error:
        assert "f must be given every tensor that is differentiated" in str(error)  # noqa: PT017
    else:
        assert found == 21


def test_forward_mode_chooses_too(staged):
    loss = staged(scale(forward_mode=True))
    assert jax.jvp(lambda w: loss(w, C, X), (W,), (10.0,))[1] == 550
    assert jax.jvp(lambda x: loss(W, C, x), (X,), (10.0,))[1] == 420


def test_f_runs_once_whatever_is_chosen(of_variables):
    runs = collections.Counter()
    loss = jax.jit(scale(of_variables, runs))
    assert [jax.grad(loss, a)(W, C, X) for a in (0, 2)] == [55, 42]
    assert loss(W, C, X) == 30
    assert runs["f"] == 1


def test_a_rule_that_fits_no_choice_is_refused_at_once():
    def loss(w, x):
        return op_custom_gradient(lambda x: (w * x, lambda upstream, variables: (upstream, upstream)), name="f")(x)

    with pytest.raises(CustomGradientValueError, match=r"^f: grad_fn must return one gradient for each of 1 variable"):
        jax.jit(loss)(W, X)


def test_no_tracer_leaves_a_choice():
    with jax.checking_leaks():
        assert jax.jit(scale())(W, C, X) == 30
        assert jax.grad(jax.jit(scale(counted)))(W, C, X) == 55
        assert jax.jit(lambda w, x: op_custom_gradient(lambda x: (w * x, lambda u, variables: 1 / 0))(x))(W, X) == 10
