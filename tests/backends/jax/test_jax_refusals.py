"""once_differentiable, and rules that raise: an error where a derivative is taken, not before."""

import collections

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest

from cgshim import TransformationError, op_custom_gradient

X = jnp.array(2.0)


@pytest.fixture(params=[False, True], ids=["reverse", "both modes"])
def forward_mode(request):
    return request.param


def once(forward_mode=False):
    def f(x):
        y, i = jnp.exp(x), x * x
        return y, lambda upstream: upstream * 5 * y * i

    return op_custom_gradient(f, once_differentiable=True, forward_mode=forward_mode, name="f")


FIRST = np.exp(2.0) * 20

SECOND = {
    "reverse over reverse": lambda f: jax.grad(jax.grad(f)),
    "compiled": lambda f: jax.jit(jax.grad(jax.grad(f))),
    "forward over reverse": jax.hessian,
    "vmap": lambda f: lambda x: jax.vmap(jax.grad(jax.grad(f)))(x[None])[0],
    "by the upstream": lambda f: jax.grad(lambda u: jax.vjp(f, X)[1](u)[0]),
}


@pytest.mark.parametrize("name", SECOND)
def test_a_second_order_of_once_differentiable_is_refused(name, staging, forward_mode):
    f = once(forward_mode)
    for derivative in (jax.grad(staging(f)), staging(jax.grad(f)), jax.jit(jax.grad(f))):
        np.testing.assert_allclose(derivative(X), FIRST, rtol=1e-6)
    with pytest.raises(TransformationError, match=r"^f: a rule that is once_differentiable"):
        SECOND[name](staging(f))(X)


@pytest.mark.parametrize("by", [0, 1], ids=["the argument", "a variable"])
@pytest.mark.parametrize("of", [0, 1], ids=["of the argument", "of a variable"])
def test_a_second_order_of_a_rule_that_reads_nothing_is_refused(of, by):
    def f_of(x, w):
        rule = lambda upstream, variables: (7 * upstream, [11 * upstream for _ in variables])
        return op_custom_gradient(lambda x: (x * w, rule), once_differentiable=True, name="f")(x)

    gradient = jax.grad(f_of, argnums=of)
    assert gradient(X, 3 * X) == (7, 11)[of]
    for derivative in jax.grad, jax.jacfwd:
        with pytest.raises(TransformationError, match=r"^f: a rule that is once_differentiable"):
            jax.jit(derivative(gradient, argnums=by))(X, 3 * X)


def test_once_differentiable_raises_only_when_it_is_taken(staging):
    f = staging(once())
    aside = jax.grad(
        lambda x: x * jax.lax.stop_gradient(jax.grad(f)(x)) + jax.value_and_grad(f)(x)[0]
    )
    np.testing.assert_allclose(aside(X), 2 * FIRST, rtol=1e-6)


def test_once_differentiable_in_forward_mode(staging):
    f = staging(once(forward_mode=True))
    tangent = lambda x: jax.jvp(f, (x,), (X,))[1]
    np.testing.assert_allclose(tangent(X), 2 * FIRST, rtol=1e-6)
    for derivative in jax.grad, jax.jacfwd:
        with pytest.raises(TransformationError, match=r"^f: a rule that is once_differentiable"):
            derivative(tangent)(X)


def test_once_differentiable_has_residuals_as_by_hand():
    runs = collections.Counter()

    @op_custom_gradient(once_differentiable=True)
    def f(x):
        runs["f"] += 1
        i = jnp.sin(x)
        return i * x, lambda upstream: upstream * 7 * i

    by_hand = jax.custom_vjp(lambda x: jnp.sin(x) * x)
    by_hand.defvjp(lambda x: (jnp.sin(x) * x, jnp.sin(x)), lambda i, upstream: (upstream * 7 * i,))
    x = jnp.linspace(0.5, 1.5, 1001)
    np.testing.assert_allclose(
        jax.value_and_grad(lambda x: x * jax.lax.stop_gradient(jax.grad(f)(x)))(X)[1],
        7 * jnp.sin(X),
    )
    assert runs["f"] == 1

    def memory(op):
        compiled = jax.jit(jax.grad(lambda x: op(op(x)).sum())).lower(x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert memory(f) == memory(by_hand)


class ForbiddenError(Exception):
    pass


@op_custom_gradient
def forbidden(x):
    def rule(upstream):
        raise ForbiddenError("not differentiable")

    return x * x, rule


def test_a_rule_that_raises_does_so_when_a_gradient_is_taken(staging):
    f = staging(forbidden)
    assert jax.jit(f)(X) == f(X) == 4
    assert jax.eval_shape(f, X).shape == ()
    assert jax.grad(lambda x: x * jax.lax.stop_gradient(f(x)))(X) == 4
    for gradient in (jax.grad(f), staging(jax.grad(forbidden)), jax.jit(jax.grad(f))):
        with pytest.raises(ForbiddenError, match="not differentiable"):
            gradient(X)
    with pytest.raises(ForbiddenError, match="not differentiable"):
        jax.jit(jax.vmap(jax.grad(f)))(X[None])


def test_forward_mode_raises_it_too(staging):
    promised = op_custom_gradient(forbidden._f, forward_mode=True)
    with pytest.raises(ForbiddenError, match="not differentiable"):
        jax.jvp(staging(promised), (X,), (X,))


def test_a_kept_error_keeps_no_tracer_alive():
    with jax.check_tracer_leaks():
        assert jax.jit(forbidden)(X) == 4
        with pytest.raises(ForbiddenError):
            jax.jit(jax.grad(forbidden))(X)


class Held:
    """Anything that weak references know."""
