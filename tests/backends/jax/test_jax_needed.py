"""needs_input_grad on JAX: a rule is told what is asked for; f is too where values are known.

Where a call is staged, f is told True, and XLA takes out what is unused.

The rule is wrong on purpose, and by another number for each way in which it is asked.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cgshim import op_custom_gradient

X, W = jnp.array([1.0, 2.0]), jnp.array([3.0, 5.0])


def _product(x, w, *, needs_input_grad):
    """x * w, with 100 more if f may need the gradient of x, and 200 if that of w; and a factor that
    says the same.
    """
    by_f = 100 * needs_input_grad[0] + 200 * needs_input_grad[1]

    def rule(upstream, needs_input_grad):
        of_x, of_w = needs_input_grad
        factor = 7 + 10 * of_x + 20 * of_w
        return factor * upstream * w if of_x else None, factor * upstream * x if of_w else None

    return x * w + by_f, rule


product = op_custom_gradient(_product)
linear = op_custom_gradient(_product, forward_mode=True)


def loss(x, w):
    return product(x, w).sum()


def told_f(output):
    """What f was told, as its output says it."""
    said = round(float((output - X * W).max()) / 100)
    return bool(said & 1), bool(said & 2)


def test_an_undifferentiated_call_needs_nothing():
    assert told_f(product(X, W)) == (False, False)
    assert told_f(jax.vmap(product)(X, W)) == (False, False)


EAGER = {
    "grad by x": (lambda: jax.grad(loss)(X, W), 17 * W),
    "grad by w": (lambda: jax.grad(loss, 1)(X, W), 27 * X),
    "grad by both": (lambda: jnp.stack(jax.grad(loss, (0, 1))(X, W)), 37 * jnp.stack([W, X])),
    "one pullback for all": (lambda: jnp.stack(jax.vjp(loss, X, W)[1](1.0)), 37 * jnp.stack([W, X])),
    "vmap of grad": (lambda: jax.vmap(jax.grad(loss, 1))(X, W), 27 * X),
    "grad of vmap": (lambda: jax.grad(lambda w: jax.vmap(product)(X, w).sum())(W), 27 * X),
    "vmap of grad of vmap": (
        lambda: jax.vmap(lambda x: jax.grad(lambda w: jax.vmap(product, (None, 0))(x, w).sum())(W))(X),
        27 * jnp.stack([X, X], 1),
    ),
    "a constant of what is differentiated": (
        lambda: jax.grad(lambda x: loss(x, jax.lax.stop_gradient(x)))(X), 17 * X,
    ),
    "w further in than x": (lambda: jax.grad(lambda x: jax.grad(loss, 1)(x, W).sum())(X), jnp.full(2, 27.0)),
    "x further in than w": (lambda: jax.grad(lambda w: jax.grad(loss)(X, w).sum())(W), jnp.full(2, 17.0)),
    "one in another of its own": (lambda: jax.grad(lambda x: jax.grad(loss)(x, W) @ x)(X), 17 * W),
    "jvp by x": (lambda: jax.jvp(lambda x: linear(x, W), (X,), (2 * X,))[1], 34 * W * X),
    "linearize by both": (lambda: jax.linearize(linear, X, W)[1](X, 2 * W), 3 * 37 * W * X),
}  # fmt: skip


@pytest.mark.parametrize(("take", "expected"), EAGER.values(), ids=EAGER)
def test_each_level_asks_for_its_own(take, expected):
    np.testing.assert_allclose(take(), expected)


STAGED = {
    "jit of grad": lambda: jax.jit(jax.grad(loss))(X, W),
    "grad of jit": lambda: jax.grad(jax.jit(loss))(X, W),
    "checkpoint": lambda: jax.grad(jax.checkpoint(loss))(X, W),
    "scan": lambda: jax.grad(
        lambda x: jax.lax.scan(lambda s, w: (s + loss(x, w), None), 0.0, W[None])[0]
    )(X),
}


@pytest.mark.parametrize("take", STAGED.values(), ids=STAGED)
def test_staged_code_asks_for_its_own(take):
    np.testing.assert_allclose(take(), 17 * W)


def test_staged_code_asks_for_each_choice_of_three():
    @op_custom_gradient
    def op(x, y, z):
        def rule(upstream, needs_input_grad):
            factor = 7 + sum(10**at * needed for at, needed in enumerate(needs_input_grad, 1))
            return [factor * upstream if needed else None for needed in needs_input_grad]

        return x + y + z, rule

    for argnums, factor in {
        (0,): 17,
        (1,): 107,
        (0, 2): 1017,
        (1, 2): 1107,
        (0, 1, 2): 1117,
    }.items():
        for take in (jax.jit(jax.grad(op, argnums)), jax.grad(jax.jit(op), argnums)):
            assert take(1.0, 2.0, 3.0) == (factor,) * len(argnums)


def test_a_rule_that_cannot_run_again_runs_for_all():
    """Staged, it runs for each choice: what it has popped is gone."""

    @op_custom_gradient
    def op(x, w):
        kept = [(x, w)]

        def rule(upstream, needs_input_grad):
            x, w = kept.pop()
            return 7 * upstream * w, 11 * upstream * x

        return x * w, rule

    assert float(jax.jit(jax.grad(op))(2.0, 3.0)) == 21.0
    assert float(jax.jit(jax.grad(op, 1))(2.0, 3.0)) == 22.0


def test_a_rule_on_the_host_computes_what_is_asked_for():
    told = []

    @op_custom_gradient(host_outputs=lambda x, w: x)
    def op(x, w):
        def rule(upstream, needs_input_grad):
            told.append(needs_input_grad)
            return upstream * 7 * w, upstream * 11 * x

        return x * w, rule

    assert float(jax.jit(jax.grad(op))(2.0, 3.0)) == 21.0
    assert told == [(True, False)]


def test_staged_code_asks_for_no_constant():
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: loss(x, W)))(X), 17 * W)


def test_variables_beside_arguments():
    """A tracer that f captures makes a call staged; what its arguments need is known all the same."""

    def both(w, y):
        return op_custom_gradient(_reading(w))(X, y).sum()

    of_w, of_y = jax.grad(both, (0, 1))(W, 2 * W)
    np.testing.assert_allclose(of_w, 11 * 2 * W)
    np.testing.assert_allclose(of_y, 7 * X)


def _reading(w):
    def f(x, y, *, needs_input_grad):
        assert needs_input_grad == (False, True)

        def rule(upstream, needs_input_grad, variables):
            assert needs_input_grad == (False, True)
            return (None, 7 * upstream * x), [11 * upstream * y]

        return x * y * w, rule

    return f


def test_f_is_told_the_same_in_all_orders():
    told = []

    @op_custom_gradient
    def op(x, w, *, needs_input_grad):
        told.append(needs_input_grad)
        slope = 2 * x * w
        return x * x * w, lambda upstream: (upstream * slope, None)

    np.testing.assert_allclose(
        jax.grad(lambda x: jax.grad(lambda x: op(x, W).sum())(x).sum())(X), 2 * W
    )
    assert told == [(True, False)] * 2  # f runs again for the derivative of slope


# --- XLA leaves out unused gradients --------------------------------------------------------------

A, B = jnp.arange(12.0).reshape(4, 3) / 10, jnp.arange(6.0).reshape(3, 2) / 7


@op_custom_gradient
def in_the_rule(x, w):
    def rule(upstream, needs_input_grad):
        assert any(needs_input_grad)
        return upstream @ w.T, x.T @ upstream

    return x @ w, rule


@op_custom_gradient
def in_f(x, w):
    """A loss whose gradients are made in the forward pass, as fused kernels do."""
    y = jnp.tanh(x @ w)
    of_x, of_w = (1 - y * y) @ w.T, x.T @ (1 - y * y)
    return y.sum(), lambda upstream: (upstream * of_x, upstream * of_w)


USES = {
    "none": (lambda op: lambda x, w: op(x, w).sum(), 1),
    "x's": (lambda op: jax.value_and_grad(lambda x, w: (op(x, w) ** 2).sum()), 2),
    "w's": (lambda op: jax.value_and_grad(lambda x, w: (op(x, w) ** 2).sum(), 1), 2),
    "both": (lambda op: jax.value_and_grad(lambda x, w: (op(x, w) ** 2).sum(), (0, 1)), 3),
}


@pytest.mark.parametrize(("use", "products"), USES.values(), ids=USES)
@pytest.mark.parametrize("op", [in_the_rule, in_f], ids=["rule", "f"])
def test_xla_computes_no_unused_gradient(op, use, products):
    program = jax.jit(use(op)).lower(A, B).compile().as_text()
    assert program.count(" dot(") == products, program
