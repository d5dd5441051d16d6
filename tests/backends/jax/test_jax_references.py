"""Mutable arrays (jax.Ref) that f closes over or is given: as by hand in eager mode."""

import jax
import jax.numpy as jnp
import pytest

from cgshim import op_custom_gradient

X = jnp.array(3.0)

if not hasattr(jax, "new_ref"):  # before JAX 0.8
    pytest.skip("this JAX has no mutable arrays", allow_module_level=True)


def read(ref, x):
    factor = ref[...]
    return factor * x, factor


def by_hand(body, ref):
    op = jax.custom_vjp(lambda x: body(ref, x)[0])
    op.defvjp(lambda x: body(ref, x), lambda factor, upstream: (7 * upstream * factor,))
    return op


def by_rule(body, ref):
    def f(x):
        output, factor = body(ref, x)
        return output, lambda upstream: 7 * upstream * factor

    return op_custom_gradient(f, name="f")


PROGRAMS = {
    "value": lambda f, x, ref: f(ref)(x),
    "grad": lambda f, x, ref: jax.grad(f(ref))(x),
    "jit of grad": lambda f, x, ref: jax.jit(jax.grad(f(ref)))(x),
    "jit of grad, given": lambda f, x, ref: jax.jit(lambda x, ref: jax.grad(f(ref))(x))(x, ref),
    "scan of grad": lambda f, x, ref: jax.lax.scan(
        lambda c, _: (jax.grad(f(ref))(c), None), x, None, 3
    )[0],
    "grad of scan": lambda f, x, ref: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (f(ref)(c), None), x, None, 3)[0]
    )(x),
}


@pytest.mark.parametrize("body", [read])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_reference_that_f_closes_over(name, body):
    results = []
    for make in by_rule, by_hand:
        ref = jax.new_ref(jnp.array(2.0))
        found = PROGRAMS[name](lambda ref: make(body, ref), X, ref)  # noqa: B023
        results.append((found.item(), ref[...].item()))
    assert results[0] == results[1]
    assert "grad" not in name or results[0][0] % 7 == 0


def test_a_reference_is_an_argument():
    op = op_custom_gradient(
        lambda x, ref: (ref[...] * x, lambda u, factor=ref[...]: (7 * u * factor, None)), name="f"
    )
    assert jax.grad(op)(X, jax.new_ref(jnp.array(2.0))) == 14


def stash(ref):
    def f(x):
        def rule(upstream):
            ref[...] = upstream
            return 7 * upstream

        return 2 * x, rule

    return op_custom_gradient(f, name="f")


def test_a_rule_may_write_to_a_reference():
    ref = jax.new_ref(jnp.array(0.0))
    assert jax.grad(lambda x: 5 * stash(ref)(x))(X) == 35
    assert ref[...] == 5


def test_what_is_read_outside_is_right():
    ref = jax.new_ref(jnp.array(2.0))
    op = op_custom_gradient(lambda x, factor: (factor * x, lambda u: (7 * u * factor, None)))
    assert jax.jit(lambda x, ref: jax.grad(lambda x: op(x, ref[...]))(x))(X, ref) == 14
