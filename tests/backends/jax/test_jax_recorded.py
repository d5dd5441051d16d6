"""Calls that jit and its like record."""

import functools

import jax
import jax.numpy as jnp
import jax_ops
import numpy as np
import pytest
from jax_ops import by_rule, cube, cube_both_modes

from cgshim import op_custom_gradient
from cgshim._errors import CustomGradientValueError, TransformationError

X = jnp.linspace(-1.0, 2.0, 4)
TWO = jnp.array(2.0)


def _operations(f, *args):
    return [eqn.primitive.name for eqn in jax.make_jaxpr(f)(*args).eqns]


def _counted():
    """An op of cube's rule, and how often f and the rule ran."""
    runs = {"f": 0, "rule": 0}

    def count(what):
        runs[what] += 1

    @op_custom_gradient
    def op(x):
        count("f")
        i = x * x

        def rule(upstream):
            count("rule")
            return upstream * 15.0 * i

        return i * x, rule

    return op, runs


def test_jit_traces_f_once_and_again_for_a_residual():
    op, runs = _counted()
    f = jax.jit(op)
    values = [
        f(TWO),
        jax.grad(lambda x: x * f(x))(TWO),
        jax.grad(jax.grad(lambda x: x * f(x)))(TWO),
    ]
    np.testing.assert_allclose(values, [8.0, by_rule(2.0), by_rule(2.0, 2)], rtol=1e-12)
    assert runs == {"f": 2, "rule": 2}


def test_a_rule_that_raises_is_harmless_without_a_gradient():
    @op_custom_gradient
    def op(x):
        return 2 * x, lambda upstream: upstream[0]  # no scalar has an item

    f = jax.jit(op)
    assert f(TWO) == 4
    with pytest.raises(IndexError):
        jax.grad(f)(TWO)


def test_a_gradient_of_a_wrong_shape_raises_when_it_is_taken():
    @op_custom_gradient
    def op(x):
        return 2 * x, lambda upstream: jnp.ones(3)

    f = jax.jit(op)
    assert f(TWO) == 4
    with pytest.raises(CustomGradientValueError, match="gradient of x"):
        jax.grad(f)(TWO)


def test_a_rule_is_staged_once_for_all_gradients_of_a_program(monkeypatch):
    factors = []
    monkeypatch.setattr(jax_ops, "factor", lambda: factors.append(15.0) or 15.0, raising=False)

    @op_custom_gradient
    def op(x):
        i = x * x
        return i * x, lambda upstream: upstream * jax_ops.factor() * i

    f = jax.jit(op)
    f(TWO)
    for _ in range(3):
        np.testing.assert_allclose(jax.grad(lambda x: x * f(x))(TWO), by_rule(2.0), rtol=1e-12)
    assert len(factors) == 1


_STATE = {}


def _from_state():
    return _STATE["i"]


@pytest.mark.parametrize("op", [cube, cube_both_modes])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_orders_around_a_recorded_call(op, order):
    f = derivative = jax.jit(lambda x: x * op(x))
    for _ in range(order):
        derivative = jax.grad(derivative)
    np.testing.assert_allclose(derivative(TWO), by_rule(2.0, order), rtol=1e-12)
    np.testing.assert_allclose(jax.jit(derivative)(TWO), by_rule(2.0, order), rtol=1e-12)
    np.testing.assert_allclose(jax.vmap(derivative)(X), by_rule(X, order), rtol=1e-12)
    batched = jax.vmap(f)
    for _ in range(order):
        batched = jax.grad(lambda x, batched=batched: batched(x).sum())
    np.testing.assert_allclose(batched(X), by_rule(X, order), rtol=1e-12)


def test_forward_mode_of_a_recorded_call():
    f = jax.jit(lambda x: x * cube_both_modes(x))
    np.testing.assert_allclose(jax.jvp(f, (TWO,), (jnp.array(1.0),))[1], by_rule(2.0), rtol=1e-12)
    np.testing.assert_allclose(jax.jacfwd(jax.jacrev(f))(TWO), by_rule(2.0, 2), rtol=1e-12)
    np.testing.assert_allclose(jax.hessian(f)(TWO), by_rule(2.0, 2), rtol=1e-12)
    np.testing.assert_allclose(jax.linearize(f, TWO)[1](TWO), 2 * by_rule(2.0), rtol=1e-12)
    with pytest.raises(TransformationError, match="forward_mode=True"):
        jax.jvp(jax.jit(cube), (TWO,), (TWO,))


def test_second_order_of_a_scan_by_two_arguments():
    """Where JAX forgets a custom_jvp: the first gradient is by what the op is not given."""

    def loss(w, x):
        def step(carry, x):
            return carry * w + cube(x), None

        return jax.lax.scan(step, w, jnp.stack([x, x]))[0]

    of_w = jax.grad(loss)  # of w**3 + (w + 1) * cube(x)
    np.testing.assert_allclose(of_w(TWO, TWO), 3 * 4.0 + 8.0, rtol=1e-12)
    np.testing.assert_allclose(jax.grad(of_w, 1)(TWO, TWO), 15.0 * 4, rtol=1e-12)
    np.testing.assert_allclose(jax.jit(jax.grad(of_w, 1))(TWO, TWO), 15.0 * 4, rtol=1e-12)


@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable", "dots_saveable"])
def test_a_recorded_call_under_a_policy_of_checkpoint(policy):
    f = jax.checkpoint(
        lambda x: x * jax.jit(cube)(jnp.sin(x)), policy=getattr(jax.checkpoint_policies, policy)
    )
    s, c = jnp.sin(TWO), jnp.cos(TWO)
    np.testing.assert_allclose(jax.grad(f)(TWO), s**3 + TWO * 15 * s**2 * c, rtol=1e-12)
    np.testing.assert_allclose(jax.jit(jax.grad(f))(TWO), s**3 + TWO * 15 * s**2 * c, rtol=1e-12)


def test_batches_with_a_name_and_leaves_without_one():
    @op_custom_gradient
    def op(x, scale):
        mean = jax.lax.pmean(x, "batch")
        return scale * (x - mean), lambda upstream: (
            7 * upstream + 0 * jax.lax.psum(upstream, "batch"),
            None,
        )

    f = jax.vmap(jax.jit(op), in_axes=(0, None), axis_name="batch")
    np.testing.assert_allclose(f(X, TWO), 2 * (X - X.mean()), rtol=1e-12)
    np.testing.assert_allclose(jax.grad(lambda x: f(x, TWO).sum())(X), jnp.full(4, 7.0), rtol=1e-12)
    one = jax.vmap(jax.jit(lambda x, y: (cube(x), cube(y))), in_axes=(0, None), out_axes=(0, 0))
    np.testing.assert_allclose(one(X, TWO)[1], jnp.full(4, 8.0), rtol=1e-12)


def test_outputs_and_arguments_of_any_dtype():
    @op_custom_gradient
    def op(x, n):
        return (x * n, n + 1, jnp.sign(x).astype(bool)), lambda a, b, c: (7 * a * n, None)

    f = jax.jit(lambda x, n: op(x, n)[0])
    assert jax.make_jaxpr(f)(TWO, 3).eqns
    np.testing.assert_allclose(jax.grad(f)(TWO, 3), 21.0)
    np.testing.assert_allclose(jax.vmap(jax.grad(f), (0, None))(X, 3), jnp.full(4, 21.0))
    _, of_x = jax.jvp(
        jax.jit(op_custom_gradient(lambda x: ((x, 3), lambda u, *_: u), forward_mode=True)),
        (X,),
        (X,),
    )
    np.testing.assert_allclose(of_x[0], X)


def test_arrays_and_options_that_f_holds():
    table = jnp.arange(4.0)

    @op_custom_gradient
    def op(x, *, power):
        weights = table**power
        return (weights * x).sum(), lambda upstream: 7 * upstream * weights

    f = jax.jit(functools.partial(op, power=2))
    np.testing.assert_allclose(f(X), (table**2 * X).sum(), rtol=1e-12)
    np.testing.assert_allclose(jax.grad(f)(X), 7 * table**2, rtol=1e-12)


def test_a_recorded_program_that_is_evaluated_elsewhere():
    """With a weak type, where it was recorded with a strong one, and on a batch."""
    recorded = jax.make_jaxpr(cube)(TWO)
    f = jax.extend.core.jaxpr_as_fun(recorded)
    for x in 2.0, TWO:
        assert jax.jit(f)(x)[0] == f(x)[0] == 8
        np.testing.assert_allclose(jax.grad(lambda x: f(x)[0])(x), 15.0 * 4)
    np.testing.assert_allclose(jax.vmap(f)(X)[0], X**3, rtol=1e-12)
    exported = jax.export.export(jax.jit(cube))(TWO)
    np.testing.assert_allclose(jax.export.deserialize(exported.serialize()).call(TWO), 8.0)


def test_a_recorded_call_leaks_no_tracer():
    with jax.checking_leaks():
        f = jax.jit(lambda x: cube(cube_both_modes(x)))
        f(TWO)
        jax.grad(f)(TWO)
        jax.vmap(f)(X)


def test_rules_that_call_each_other_leak_no_tracer():
    sine = op_custom_gradient(lambda x: (jnp.sin(x), lambda upstream: 5 * upstream * cosine(x)))
    cosine = op_custom_gradient(lambda x: (jnp.cos(x), lambda upstream: -upstream * sine(x)))
    with jax.checking_leaks():
        second = jax.jit(jax.grad(jax.grad(sine)))(TWO)
    np.testing.assert_allclose(second, -5 * jnp.sin(TWO), rtol=1e-6)


def test_a_derivative_of_a_gradient_that_is_once_differentiable():
    op = op_custom_gradient(
        lambda x: (x**3, lambda upstream: upstream * 15 * x**2), once_differentiable=True, name="op"
    )
    f = jax.jit(op)
    np.testing.assert_allclose(jax.grad(f)(TWO), 60.0)
    with pytest.raises(TransformationError, match="once_differentiable"):
        jax.grad(jax.grad(f))(TWO)


def test_printing_in_f_stays_what_it_is(capfd):
    @op_custom_gradient
    def op(x):
        jax.debug.print("f of {}", x)
        return 2 * x, lambda upstream: 7 * upstream

    assert jax.jit(op)(TWO) == 4
    assert jax.grad(jax.jit(op))(TWO) == 7
    jax.effects_barrier()
    assert capfd.readouterr().out.count("f of 2") == 2
