"""vmap: over one of two arguments, nested, over no and over one example, with named axes, of real
modules.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax_ops import CUBES, PRODUCTS, cube, with_nnx_state

from cgshim import op_custom_gradient

X = jnp.array([[0.5, -2.0, 3.0], [1.0, 2.0, -1.0]])
Y = jnp.array([10.0, 100.0])


@pytest.fixture(params=PRODUCTS)
def product(request):
    return PRODUCTS[request.param]


def test_over_one_of_two_arguments(product, compiler):
    gradients = jax.grad(lambda x, y: product(x, y).sum(), (0, 1))
    of_x, of_y = compiler(jax.vmap(gradients, (0, None)))(X, Y[0])
    np.testing.assert_allclose(of_x, 70 * np.ones((2, 3)))
    np.testing.assert_allclose(of_y, 11 * X.sum(1))
    of_x, of_y = compiler(jax.vmap(gradients, (None, 0)))(X[0], Y)
    np.testing.assert_allclose(of_x, 7 * np.outer(Y, np.ones(3)))
    np.testing.assert_allclose(of_y, 11 * X[0].sum() * np.ones(2))


def test_the_gradient_of_what_the_batch_shares_is_summed(product, compiler):
    mapped = jax.vmap(product, (0, None), out_axes=1)
    of_x, of_y = compiler(jax.grad(lambda x, y: (mapped(x, y).T * X).sum(), (0, 1)))(X, Y[0])
    np.testing.assert_allclose(of_x, 70 * X)
    np.testing.assert_allclose(of_y, 11 * (X * X).sum())
    second = compiler(jax.grad(lambda y: jax.grad(lambda x: mapped(x, y).sum())(X).sum()))(Y[0])
    np.testing.assert_allclose(second, 7 * X.size)


def test_nested_and_over_any_axis(product, compiler):
    nested = jax.vmap(jax.vmap(product, (0, None)), (1, 0), out_axes=1)
    np.testing.assert_allclose(compiler(nested)(X.T, Y), X.T * Y)
    of_x, of_y = compiler(jax.grad(lambda x, y: nested(x, y).sum(), (0, 1)))(X.T, Y)
    np.testing.assert_allclose(of_x, 7 * np.ones((3, 1)) * Y)
    np.testing.assert_allclose(of_y, 11 * X.sum(1))


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("mode", CUBES)
def test_small_batches(size, mode, compiler):
    one = CUBES[mode]
    x = X[0, :size]
    np.testing.assert_allclose(compiler(jax.vmap(jax.grad(one)))(x), 15 * x**2)
    np.testing.assert_allclose(compiler(jax.grad(lambda x: jax.vmap(one)(x).sum()))(x), 15 * x**2)
    np.testing.assert_allclose(compiler(jax.vmap(jax.grad(jax.grad(one))))(x), 30 * x)


MIXES = {
    "vmap of gradient": (lambda f: jax.vmap(jax.grad(f)), lambda x: 15 * x**2),
    "gradient of vmap": (lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()), lambda x: 15 * x**2),
    "vmap of second": (lambda f: jax.vmap(jax.grad(jax.grad(f))), lambda x: 30 * x),
    "gradient of vmap of gradient": (
        lambda f: jax.grad(lambda x: (jax.vmap(jax.grad(f))(x) ** 2).sum()), lambda x: 900 * x**3,
    ),
    "second of vmap": (
        lambda f: jax.grad(lambda x: (jax.grad(lambda x: jax.vmap(f)(x).sum())(x) ** 2).sum()), lambda x: 900 * x**3,
    ),
    "value of a gradient of vmap": (
        lambda f: jax.grad(lambda x: jax.value_and_grad(lambda x: jax.vmap(f)(x).sum())(x)[0]), lambda x: 15 * x**2,
    ),
    "jacobian": (lambda f: jax.jacrev(jax.vmap(f)), lambda x: jnp.diag(15 * x**2)),
    "hessian": (lambda f: jax.hessian(lambda x: jax.vmap(f)(x).sum()), lambda x: jnp.diag(30 * x)),
}  # fmt: skip


class Rule:
    """What cube's grad_fn does, with its residual in an attribute."""

    def __init__(self, square):
        self.square = square

    def __call__(self, upstream):
        return upstream * 15 * self.square


RESIDUALS = {
    "closure": lambda i: lambda upstream: upstream * 15 * i,
    "list": lambda i: _in_a_list([i]),
    "object": Rule,
}


def _in_a_list(kept):
    return lambda upstream: upstream * 15 * kept[0]


@pytest.mark.parametrize("where", RESIDUALS)
@pytest.mark.parametrize("mix", MIXES)
def test_residuals_of_a_batch(mix, where, compiler):
    op = op_custom_gradient(lambda x: (x**3, RESIDUALS[where](x * x)))
    derivative, expected = MIXES[mix]
    np.testing.assert_allclose(compiler(derivative(op))(X[0]), expected(X[0]))


def test_a_rule_may_branch_on_a_value_without_the_batch():
    gain = jnp.array(2.0)
    op = op_custom_gradient(
        lambda x, gain: (x * gain, lambda u: (7 * u * x if gain > 0 else 0 * u, None)), name="op"
    )
    for mix in "vmap of gradient", "gradient of vmap":
        np.testing.assert_allclose(MIXES[mix][0](lambda x: op(x, gain))(X[0]), 7 * X[0])


@pytest.mark.parametrize("forward_mode", [False, True])
def test_a_rule_may_use_the_axis_of_vmap(forward_mode, compiler):
    shared = op_custom_gradient(
        lambda x: (2 * x, lambda u: jax.lax.psum(u * x, "batch")), forward_mode=forward_mode
    )
    mapped = jax.vmap(shared, axis_name="batch")
    np.testing.assert_allclose(
        compiler(jax.grad(lambda x: (mapped(x) * Y).sum()))(Y), np.full(2, 10100.0)
    )
    np.testing.assert_allclose(
        compiler(jax.vmap(jax.grad(shared), axis_name="batch"))(Y), np.full(2, 110.0)
    )


@with_nnx_state
def test_per_example_gradients_of_modules(compiler):
    def gradients(weight, x):
        return 15 * (x @ weight.T)[:, :, None] ** 2 * x[:, None, :]

    linear = eqx.nn.Linear(3, 2, use_bias=False, key=jax.random.key(0))
    of_linear = compiler(jax.vmap(eqx.filter_grad(lambda m, x: cube(m(x)).sum()), (None, 0)))(
        linear, X
    )
    np.testing.assert_allclose(of_linear.weight, gradients(linear.weight, X))

    graph, state = nnx.split(
        nnx.Linear(3, 2, use_bias=False, param_dtype="float64", rngs=nnx.Rngs(0))
    )
    loss = jax.grad(lambda state, x: cube(nnx.merge(graph, state)(x)).sum())
    of_state = compiler(jax.vmap(loss, (None, 0)))(state, X)
    np.testing.assert_allclose(
        of_state["kernel"][...], gradients(state["kernel"][...].T, X).transpose(0, 2, 1)
    )
