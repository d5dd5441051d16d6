"""JAX's own settings change nothing: the second custom_vjp, leak checks, strict promotion, 32 bits,
more checks.
"""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_ops import STAGINGS, by_rule, cube, cube_both_modes, product

from cgshim import CustomGradientTypeError, TransformationError, op_custom_gradient

SETTINGS = {
    "jax_custom_vjp3": True,
    "jax_check_tracer_leaks": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_enable_x64": False,
    "jax_enable_checks": True,
    "jax_use_direct_linearize": False,
}
if not hasattr(jax.config, "jax_custom_vjp3"):  # before JAX 0.9
    del SETTINGS["jax_custom_vjp3"]


@pytest.fixture(params=SETTINGS, autouse=True)
def _setting(request):
    before = getattr(jax.config, request.param)
    jax.config.update(request.param, SETTINGS[request.param])
    gc.freeze()  # at the end of each trace the check for leaks would collect what tests have left
    yield
    gc.unfreeze()
    jax.config.update(request.param, before)


@pytest.mark.parametrize("staging", ["eager", "scan"])
def test_orders_and_modes(staging):
    x = jnp.array([0.5, -2.0, 3.0])
    for op in cube, cube_both_modes:
        loss = STAGINGS[staging](lambda x: (x * op(x)).sum())  # noqa: B023
        np.testing.assert_allclose(jax.grad(loss)(x), by_rule(x), rtol=1e-6)
        # JAX forgets a custom_jvp in a scan whose gradient is differentiated forward
        hessian = jax.hessian(loss) if staging == "eager" else jax.jacrev(jax.jacrev(loss))
        np.testing.assert_allclose(jax.jit(hessian)(x), jnp.diag(by_rule(x, 2)), rtol=1e-6)
        second = jax.grad(lambda x: (jax.grad(loss)(x) * x).sum())(x)  # noqa: B023
        np.testing.assert_allclose(second, by_rule(x) + by_rule(x, 2) * x, rtol=1e-6)
    forward = STAGINGS[staging](cube_both_modes)
    np.testing.assert_allclose(jax.jvp(forward, (x,), (x,))[1], 15 * x**3, rtol=1e-6)


def test_batches():
    x, y = jnp.array([[0.5, -2.0, 3.0]]), jnp.array([10.0])
    of_y = jax.jit(jax.grad(lambda y: jax.vmap(product, (0, None))(x, y[0]).sum()))(y)
    np.testing.assert_allclose(of_y, [16.5])
    of_x = jax.grad(lambda x: jax.vmap(cube)(x).sum())(x)
    np.testing.assert_allclose(of_x, 15 * x**2, rtol=1e-6)


@pytest.mark.parametrize("compiler", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_rule_for_batches(compiler):
    f = lambda x: (x**3, lambda u: 15 * u * x**2)
    op = op_custom_gradient(f, vmap=lambda size, in_batched, x: (*f(x), True))
    x = jnp.array([[0.5, -2.0, 3.0]])
    for loss in (lambda x: op(x).sum(), lambda x: jax.vmap(op)(x).sum()):
        np.testing.assert_allclose(jax.grad(compiler(loss))(x), 15 * x**2, rtol=1e-6)
        found = jax.vmap(compiler(jax.grad(lambda x: op(x).sum())))(x)
        np.testing.assert_allclose(found, 15 * x**2, rtol=1e-6)


def test_captured_tracers():
    def loss(w, x, rule):
        return op_custom_gradient(
            lambda x: (w * x, lambda upstream, **kw: rule(upstream, w, x, kw))
        )(x)

    def takes(upstream, w, x, given):
        return (3 * upstream * w, [5 * upstream * x]) if given else 3 * upstream * w

    args = jnp.array(2.0), jnp.array(10.0)
    for gradient in (jax.grad(loss, (0, 1)), jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)):
        assert [g.item() for g in gradient(*args, takes)] == [50, 6]
    refused = op_custom_gradient(lambda x: (x, lambda upstream: upstream))
    assert jax.grad(refused)(args[0]) == 1
    with pytest.raises(CustomGradientTypeError, match="grad_fn must take variables"):
        jax.grad(
            lambda w: op_custom_gradient(lambda x: (w * x, lambda upstream: upstream))(args[1])
        )(args[0])


def test_a_kept_output_and_an_op_in_a_rule():
    x = jnp.array(2.0)

    def kept(x):
        y = jax.lax.stop_gradient(jnp.exp(x))
        return y, lambda upstream: upstream * 5 * y

    def fused(x):
        derivative = 3 * x * x
        inner = op_custom_gradient(lambda z: (derivative, lambda v: v * 42 * z))
        return x**3, lambda upstream: upstream * inner(x)

    for compiler in (lambda f: f), jax.jit, jax.checkpoint:
        np.testing.assert_allclose(
            jax.grad(jax.grad(compiler(op_custom_gradient(kept))))(x), 25 * jnp.exp(2), rtol=1e-5
        )
        np.testing.assert_allclose(
            jax.grad(jax.grad(compiler(op_custom_gradient(fused))))(x), 84, rtol=1e-5
        )


def test_a_second_order_may_be_refused():
    def f(x):
        i = x * x
        return i * x, lambda upstream: upstream * 15 * i

    op = op_custom_gradient(f, once_differentiable=True)
    for compiler in (lambda f: f), jax.jit:
        np.testing.assert_allclose(compiler(jax.grad(op))(2.0), 60)
        with pytest.raises(TransformationError, match=r"^f: a rule that is once_differentiable"):
            compiler(jax.grad(jax.grad(op)))(2.0)
