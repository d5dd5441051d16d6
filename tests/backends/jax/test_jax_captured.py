"""Tensors that reach f by another way than its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cgshim import CustomGradientTypeError, op_custom_gradient

W = jnp.array(2.0)
X = jnp.array([1.0, 2.0, 3.0])


def line(w, x, staging=lambda f: f):
    """w * x by an op that captures w, with the rules 3 w for x and 5 x for w."""

    def f(x):
        def rule(upstream, variables=None):
            of_x = 3 * upstream * w
            return of_x if variables is None else (of_x, [5 * (upstream * x).sum()])

        return w * x, rule

    return staging(op_custom_gradient(f, name="line"))(x)


def line_without_variables(w, x, staging=lambda f: f):
    return staging(
        op_custom_gradient(lambda x: (w * x, lambda upstream: 3 * upstream * w), name="line")
    )(x)


GRADIENTS = {
    "grad": lambda f, *a: jax.grad(f, a)(W, X),
    "jit of grad": lambda f, *a: jax.jit(jax.grad(f, a))(W, X),
    "grad of jit": lambda f, *a: jax.grad(jax.jit(f), a)(W, X),
    "grad of scan": lambda f, *a: jax.grad(
        lambda w, x: jax.lax.scan(lambda carry, x: (carry + f(w, x), None), 0.0, x[None])[0], a
    )(W, X),
    "grad of vmap": lambda f, *a: jax.grad(
        lambda w, x: jax.vmap(lambda x: f(w, x))(x[None]).sum(), a
    )(W, X),
    "vmap of grad": lambda f, *a: [g[0] for g in jax.vmap(jax.grad(f, a), (None, 0))(W, X[None])],
}


@pytest.fixture(params=GRADIENTS)
def gradient(request):
    return GRADIENTS[request.param]


def test_what_is_differentiated_arrives_as_variables(gradient, staging):
    of_w, of_x = gradient(lambda w, x: (10 * line(w, x, staging)).sum(), 0, 1)
    np.testing.assert_allclose(of_w, 300)
    np.testing.assert_allclose(of_x, [60, 60, 60])


def test_without_variables_in_grad_fn_it_is_an_error(gradient, staging):
    for argnums in (0,), (0, 1):
        with pytest.raises(CustomGradientTypeError) as error:
            gradient(lambda w, x: line_without_variables(w, x, staging).sum(), *argnums)
        assert str(error.value) == (
            "line: grad_fn must take variables when f reads trainable state, got <lambda>(upstream) and f64[]; "
            "write grad_fn(..., variables=None) and return (gradients, [one per variable]), "
            "or pass the state as an argument"
        )


def test_what_is_not_differentiated_is_a_constant(gradient, staging):
    (of_x,) = gradient(lambda w, x: (10 * line_without_variables(w, x, staging)).sum(), 1)
    np.testing.assert_allclose(of_x, [60, 60, 60])


@pytest.mark.parametrize("f", [line, line_without_variables])
def test_a_tracer_of_vmap_or_jit_is_a_constant(f):
    weights = jnp.array([1.0, 10.0])
    mapped = jax.vmap(lambda w: jax.grad(lambda x: f(w, x).sum())(X))(weights)
    np.testing.assert_allclose(mapped, [[3, 3, 3], [30, 30, 30]])
    np.testing.assert_allclose(
        jax.jit(lambda w: jax.grad(lambda x: f(w, x).sum())(X))(W), [6, 6, 6]
    )
    np.testing.assert_allclose(jax.jit(jax.vmap(f, (0, None)))(weights, X), [X, 10 * X])


def test_a_second_order_goes_through_variables(staging):
    of_w = jax.grad(lambda w, x: line(w, x, staging).sum())
    np.testing.assert_allclose(jax.grad(lambda x: of_w(W, x))(X), [5, 5, 5])
    of_x = jax.grad(lambda w, x: line(w, x, staging).sum(), 1)
    np.testing.assert_allclose(jax.grad(lambda w: of_x(w, X).sum())(W), 9)


def test_an_integer_is_no_variable(gradient, staging):
    def loss(w, x):
        at = jnp.argmax(x)
        return staging(
            op_custom_gradient(lambda w: (w * x[at], lambda upstream: 3 * upstream * x[at]))
        )(w)

    (of_w,) = gradient(lambda w, x: loss(w, jax.lax.stop_gradient(x)), 0)
    assert of_w == 9


def test_state_of_an_object_is_captured():
    class Scale:
        def __init__(self, w):
            self.w = w

        @op_custom_gradient
        def __call__(self, x):
            return self.w * x, lambda upstream, variables: (
                3 * upstream * self.w,
                [5 * upstream * x],
            )

    for compiler in (lambda f: f, jax.jit):
        assert compiler(jax.grad(lambda w: Scale(w)(10.0 + 0 * w)))(W) == 50
