"""Details that only JAX has, each of which a small mistake would change unseen."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from cgshim import ops
from cgshim_jax._linearity import NotLinearError, require_linear
from cgshim_jax._tracing import Jaxpr


def test_a_tensor_that_is_given_by_name_alone():
    assert isinstance(ops.sum(a=jnp.array([1.0, 2.0])), jax.Array)


# --- Whether a rule is seen to be linear ---------------------------------------------------------------------------

U, V = jnp.array([0.5, -2.0, 3.0]), jnp.array([1.0, 10.0, 100.0])
M = jnp.arange(9.0).reshape(3, 3) + jnp.eye(3)
LINEAR = {
    "added to zeros": lambda u: jnp.zeros(3).at[1].add(u[0]),
    "added to upstream": lambda u: u.at[1].add(u[0]),
    "subtracted from zeros": lambda u: jnp.zeros(3).at[1].subtract(u[0]),
    "subtracted from upstream": lambda u: u.at[1].subtract(u[0]),
    "put in zeros": lambda u: jnp.zeros(3).at[1].set(u[0]),
    "a slice put in zeros": lambda u: lax.dynamic_update_slice(jnp.zeros(3), u[:2], (1,)),
    "by a triangular matrix": lambda u: lax.linalg.triangular_solve(M, u[:, None], left_side=True),
    "in a loop": lambda u: lax.fori_loop(0, 3, lambda i, c: c * 2.0, u),
    "in a scan beside what is scanned": lambda u: lax.scan(lambda c, m: (c @ M, c * m), u, M)[1],
    "a complex number": lambda u: lax.complex(u, 2 * u),
}
NOT_LINEAR = {
    "ones added": (lambda u: u.at[1].add(1.0), "one with a constant part"),
    "added to ones": (lambda u: jnp.ones(3).at[1].add(u[0]), "one with a constant part"),
    "ones subtracted": (lambda u: u.at[1].subtract(1.0), "one with a constant part"),
    "subtracted from ones": (lambda u: jnp.ones(3).at[1].subtract(u[0]), "one with a constant part"),
    "put in ones": (lambda u: jnp.ones(3).at[1].set(u[0]), "one with a constant part"),
    "a slice put in ones": (lambda u: lax.dynamic_update_slice(jnp.ones(3), u[:2], (1,)), "one with a constant part"),
    "ones beside it": (lambda u: lax.complex(u, jnp.ones(3)), "one with a constant part"),
    "to the second power": (lambda u: u**2, "integer_pow of upstream"),
    "a triangular matrix": (
        lambda u: lax.linalg.triangular_solve(jnp.outer(u, u), M, left_side=True), "mul of upstream"
    ),
    "a matrix of upstream": (
        lambda u: lax.linalg.triangular_solve(jnp.diag(u), M, left_side=True), "triangular_solve of upstream"
    ),
    "as often as it says": (lambda u: lax.while_loop(lambda c: c[0] < 9.0, lambda c: c * 2.0, u), "while of upstream"),
    "as it says": (lambda u: lax.cond(u[0] > 0, lambda u: u, lambda u: 2 * u, u), "gt of upstream"),
    "a place that it says": (lambda u: M[jnp.argmax(u)] * u, "argmax of upstream"),
    "a divisor": (lambda u: jnp.ones(3) / u, "div of upstream"),
    "an integral": (lambda u: u * lax.igamma(u, jnp.ones(3)), "igamma of upstream"),
    "a loop of zeros and ones": (lambda u: u + lax.while_loop(lambda c: c[0] < 9.0, lambda c: c + 1.0, jnp.zeros(3)),
                                 "one with a constant part"),
}  # fmt: skip


def jaxpr_of(rule):
    traced = jax.make_jaxpr(rule)(U)
    return Jaxpr(traced.jaxpr, traced.consts, [])


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear(name):
    require_linear(jaxpr_of(LINEAR[name]))
    transposed = jax.linear_transpose(LINEAR[name], U)(LINEAR[name](V))[0]
    assert jnp.allclose(transposed, jax.vjp(LINEAR[name], U)[1](LINEAR[name](V))[0])


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_what_is_not_linear(name):
    rule, what = NOT_LINEAR[name]
    with pytest.raises(NotLinearError) as refusal:
        require_linear(jaxpr_of(rule))
    assert str(refusal.value) == what
