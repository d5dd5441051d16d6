"""Forward mode takes the transpose of a linear rule; one that is seen not to be linear is refused,
promised or not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cgshim import TransformationError, op_custom_gradient

X, V = jnp.array([0.5, -2.0, 3.0]), jnp.array([1.0, 10.0, 100.0])
M = jnp.arange(9.0).reshape(3, 3) + jnp.eye(3)


def on_host(u):
    return jax.pure_callback(
        np.asarray, jax.ShapeDtypeStruct(u.shape, u.dtype), u, vmap_method="sequential"
    )


CONSTANT_PART, NOT_LINEAR = True, False
BENT = {
    "affine": (lambda u, x: u + 1, CONSTANT_PART),
    "constant": (lambda u, x: x, CONSTANT_PART),
    "ones": (lambda u, x: jnp.ones(3), CONSTANT_PART),
    "sign": (lambda u, x: jnp.sign(u), NOT_LINEAR),
    "round": (lambda u, x: jnp.round(u), NOT_LINEAR),
    "floor": (lambda u, x: jnp.floor(u) * x, NOT_LINEAR),
    "product": (lambda u, x: u * u, NOT_LINEAR),
    "square": (lambda u, x: u**2, NOT_LINEAR),
    "stopped": (lambda u, x: jax.lax.stop_gradient(u), NOT_LINEAR),
    "cast": (lambda u, x: u.astype(int).astype(u.dtype), NOT_LINEAR),
    "maximum": (lambda u, x: jax.nn.relu(u), NOT_LINEAR),
    "norm": (lambda u, x: u / jnp.linalg.norm(u), NOT_LINEAR),
    "sort": (lambda u, x: jnp.sort(u), NOT_LINEAR),
    "host": (lambda u, x: on_host(u), NOT_LINEAR),
    "choice by upstream": (lambda u, x: jnp.where(u > 0, u, 0.0), NOT_LINEAR),
    "choice of a constant": (lambda u, x: jnp.where(x > 0, u, 1.0), CONSTANT_PART),
    "concatenated": (lambda u, x: jnp.concatenate([u[:2], x[:1]]), CONSTANT_PART),
    "padded": (lambda u, x: jnp.pad(u[:2], (0, 1), constant_values=3.0), CONSTANT_PART),
    "written": (lambda u, x: u.at[0].set(5.0), CONSTANT_PART),
    "added": (lambda u, x: u.at[0].add(5.0), CONSTANT_PART),
    "jit": (lambda u, x: jax.jit(lambda u: u + x)(u), CONSTANT_PART),
    "checkpoint": (lambda u, x: jax.checkpoint(lambda u: u + x)(u), CONSTANT_PART),
    "scan": (lambda u, x: jax.lax.scan(lambda c, _: (c + 1.0, None), u, None, 3)[0], CONSTANT_PART),
    "loop": (lambda u, x: jax.lax.fori_loop(0, x.size, lambda i, c: c + x, u), CONSTANT_PART),
}

LINEAR = {
    "product": lambda u, x: 2 * u * x,
    "choice": lambda u, x: jnp.where(x > 0, u, 0.0),
    "choice of zeros": lambda u, x: jnp.where(x > 0, u, jnp.zeros_like(u)),
    "choice of NumPy's zeros": lambda u, x: jnp.where(x > 0, u, np.zeros(3)),
    "concatenated": lambda u, x: jnp.concatenate([u[:2], u[2:] * x[2]]),
    "written": lambda u, x: u.at[0].set(0.0),
    "matrix": lambda u, x: M @ u,
    "scan": lambda u, x: jax.lax.scan(lambda c, _: (c * x, None), u, None, 3)[0],
    "cond": lambda u, x: jax.lax.cond(x[0] > 0, lambda u: u * 2, lambda u: -u, u),
    "jit": lambda u, x: jax.jit(lambda u: u * x)(u),
    "zeros": lambda u, x: jnp.zeros_like(x),
    "sum": lambda u, x: (u - jnp.mean(u)).sum() * x + jnp.cumsum(u),
    "rolled": lambda u, x: jnp.roll(u, 1)[::-1] / x,
    "solved": lambda u, x: jnp.linalg.solve(M, u),
    "scattered": lambda u, x: jnp.zeros(3).at[jnp.array([2, 0, 1])].add(u)[jnp.array([1, 0, 2])],
    "gathered from zeros": lambda u, x: jnp.zeros(5)[jnp.array([4, 0, 2])] + u * x,
    "Fourier of zeros": lambda u, x: jnp.fft.fft(jnp.zeros(3)).real + u * x,
    "stacked": lambda u, x: jnp.stack([u[0], u[1], u[2] * 0]),
    "Fourier": lambda u, x: jnp.fft.ifft(jnp.fft.fft(u)).real,
    "vmap": lambda u, x: jax.vmap(lambda u, x: u * x)(u, x),
    "convolved": lambda u, x: jnp.convolve(u, x, mode="same"),
}


def op_of(rule, promised):
    return op_custom_gradient(
        lambda x: (jnp.sin(x), lambda u: rule(u, x)), forward_mode=promised, name="op"
    )


@pytest.mark.parametrize("name", BENT)
def test_rule_that_is_not_linear(name):
    op = op_of(BENT[name][0], promised=True)
    hessian = jax.hessian(lambda x: op(x).sum())
    for derivative in lambda x: jax.jvp(op, (x,), (V,))[1], hessian:
        with pytest.raises(TransformationError, match=r"^op: .* linear in upstream, got "):
            derivative(X)
    assert jax.grad(lambda x: op(x).sum())(X).shape == (3,)


@pytest.mark.parametrize("name", [name for name in BENT if name != "cast"])
def test_compiled_rule_that_is_not_linear(name):
    """Compiled code cannot raise an error for a number: a rule with a constant part gives NaN."""
    rule, has_constant_part = BENT[name]
    tangent = jax.jit(lambda x: jax.jvp(op_of(rule, promised=True), (x,), (V,))[1])
    if has_constant_part:
        assert jnp.isnan(tangent(X)).all()
    else:
        with pytest.raises(TransformationError, match=r"^op: .* linear in upstream, got "):
            tangent(X)


@pytest.mark.parametrize("name", BENT)
def test_hessian_without_a_promise(name):
    op = op_of(BENT[name][0], promised=False)
    with pytest.raises(TransformationError, match=r"linear in upstream"):
        jax.hessian(lambda x: op(x).sum())(X)


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_rule_needs_no_promise_in_a_hessian(name, compiler):
    rule = LINEAR[name]
    loss, promised_loss = (loss_of(op_of(rule, promised)) for promised in (False, True))

    @jax.jit
    def by_transposition(x):
        return jax.vjp(lambda u: rule(u, x), V)[1](V)[0], jax.jacrev(jax.jacrev(loss))(x)

    @compiler
    def found(x):
        tangent = jax.jvp(op_of(rule, True), (x,), (V,))[1]
        return tangent, jax.hessian(loss)(x), jax.hessian(promised_loss)(x)

    transposed, expected = by_transposition(X)
    tangent, *hessians = found(X)
    np.testing.assert_allclose(tangent, transposed, rtol=1e-6)
    for hessian in hessians:
        np.testing.assert_allclose(hessian, expected, rtol=1e-6, atol=1e-9)


def loss_of(op):
    return lambda x: (op(x) * x).sum()
