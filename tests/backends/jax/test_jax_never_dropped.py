"""The rule is never dropped: sin with a rule that returns zeros has zeros for a derivative, or
none, but never cos.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_ops import STAGINGS

from cgshim import TransformationError, op_custom_gradient

X = jnp.array([0.5, -2.0, 3.0])


def flat(x):
    return jnp.sin(x), lambda upstream: 0.0 * upstream


SINES = {
    "reverse": op_custom_gradient(flat),
    "both modes": op_custom_gradient(flat, forward_mode=True),
}

DERIVATIVES = {
    "plain": lambda f: jax.grad(lambda x: f(x).sum())(X),
    "vmap": lambda f: jax.vmap(lambda x: jax.grad(lambda y: jax.vmap(f)(y).sum())(x[None]))(X),
    "gradient of vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum())(X),
    "vmap of gradient": lambda f: jax.vmap(jax.grad(f))(X),
    "jacrev": lambda f: jax.jacrev(f)(X),
    "backward of vmap": lambda f: jax.vjp(jax.vmap(f), X)[1](jnp.ones(3))[0],
    "vmap of backward": lambda f: jax.vmap(jax.vjp(f, X)[1])(jnp.eye(3))[0],
    "jvp": lambda f: jax.jvp(f, (X,), (X,))[1],
    "jacfwd": lambda f: jax.jacfwd(f)(X),
    "value of an inner gradient": lambda f: jax.grad(
        lambda x: jax.value_and_grad(lambda y: (f(y) + 0 * y).sum())(x)[0]
    )(X),
    "value of an inner jvp": lambda f: (
        jax.grad(lambda x: jax.jvp(lambda y: f(y) + y, (x,), (x,))[0].sum())(X) - 1
    ),
    "constant of an inner gradient": lambda f: jax.grad(
        lambda x: jax.grad(
            lambda w: jax.lax.scan(lambda c, _: (c * w + f(x).sum(), None), w, None, 2)[0]
        )(2.0)
    )(X),
    "hessian": lambda f: jax.hessian(lambda x: (x * f(x)).sum())(X),
    "remat of a loop": lambda f: jax.grad(
        lambda x: jax.lax.scan(jax.checkpoint(lambda c, y: (c + f(y), None)), 0.0, x)[0]
    )(X),
}
FORWARD = ("jvp", "jacfwd", "value of an inner jvp")


@pytest.mark.parametrize("compiler", [lambda f: f(), lambda f: jax.jit(f)()], ids=["eager", "jit"])
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.parametrize("mode", SINES)
def test_zeros_or_a_refusal(mode, name, staging, compiler):
    f = STAGINGS[staging](SINES[mode])
    try:
        derivative = compiler(lambda: DERIVATIVES[name](f))
    except TransformationError:
        assert mode == "reverse"
        assert name in FORWARD
    else:
        np.testing.assert_array_equal(derivative, 0)


@pytest.mark.parametrize("name", DERIVATIVES)
def test_the_check_can_fail(name):
    assert np.abs(DERIVATIVES[name](jnp.sin)).max() > 0.1
