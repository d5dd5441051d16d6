"""Forward mode takes the transpose of a linear rule; one that is seen not to be linear is refused,
promised or not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cgshim import TransformationError, op_custom_gradient
from cgshim_jax._linearity import NotLinearError, require_linear

X, V = jnp.array([0.5, -2.0, 3.0]), jnp.array([1.0, 10.0, 100.0])
M = jnp.arange(9.0).reshape(3, 3) + jnp.eye(3)


def on_host(u):
    return jax.pure_callback(
        np.asarray, jax.ShapeDtypeStruct(u.shape, u.dtype), u, vmap_method="sequential"
    )


CONSTANT_PART = "one with a constant part"
BENT = {
    "affine": (lambda u, x: u + 1, CONSTANT_PART),
    "constant": (lambda u, x: x, "a constant one"),
    "ones": (lambda u, x: jnp.ones(3), "a constant one"),
    "sign": (lambda u, x: jnp.sign(u), "sign of upstream"),
    "round": (lambda u, x: jnp.round(u), "round of upstream"),
    "floor": (lambda u, x: jnp.floor(u) * x, "floor of upstream"),
    "product": (lambda u, x: u * u, "mul of upstream"),
    "square": (lambda u, x: u**2, "integer_pow of upstream"),
    "stopped": (lambda u, x: jax.lax.stop_gradient(u), "stop_gradient of upstream"),
    "cast": (lambda u, x: u.astype(int).astype(u.dtype), "a cast to integers"),
    "maximum": (lambda u, x: jax.nn.relu(u), "max of upstream"),
    "norm": (lambda u, x: u / jnp.linalg.norm(u), "mul of upstream"),
    "sort": (lambda u, x: jnp.sort(u), "sort of upstream"),
    "host": (lambda u, x: on_host(u), "pure_callback of upstream"),
    "choice by upstream": (lambda u, x: jnp.where(u > 0, u, 0.0), "gt of upstream"),
    "choice of a constant": (lambda u, x: jnp.where(x > 0, u, 1.0), CONSTANT_PART),
    "concatenated": (lambda u, x: jnp.concatenate([u[:2], x[:1]]), CONSTANT_PART),
    "padded": (lambda u, x: jnp.pad(u[:2], (0, 1), constant_values=3.0), CONSTANT_PART),
    "written": (lambda u, x: u.at[0].set(5.0), CONSTANT_PART),
    "added": (lambda u, x: u.at[0].add(5.0), CONSTANT_PART),
    "jit": (lambda u, x: jax.jit(lambda u: u + x)(u), CONSTANT_PART),
    "checkpoint": (lambda u, x: jax.checkpoint(lambda u: u + x)(u), CONSTANT_PART),
    "scan": (lambda u, x: jax.lax.scan(lambda c, _: (c + 1.0, None), u, None, 3)[0], CONSTANT_PART),
    "loop": (lambda u, x: jax.lax.fori_loop(0, x.size, lambda i, c: c + x, u), CONSTANT_PART),
    "cond": (lambda u, x: jax.lax.cond(x[0] > 0, lambda u: u, lambda u: u + 1, u), CONSTANT_PART),
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
def test_what_is_seen_not_to_be_linear_is_refused(name, compiler):
    rule, what = BENT[name]
    op = op_of(rule, promised=True)
    # compiled, it is right: nobody asks for the tangents of op(x) itself
    hessian = jax.hessian(lambda x: op(x).sum())
    for derivative in compiler(lambda x: jax.jvp(op, (x,), (V,))[1]), hessian:
        with pytest.raises(TransformationError) as refusal:
            derivative(X)
        assert str(refusal.value) == (
            f"op: forward mode needs a rule that is linear in upstream, got {what}; "
            "write it in linear operations, or use reverse mode"
        )
    assert compiler(jax.grad(lambda x: op(x).sum()))(X).shape == (3,)


@pytest.mark.parametrize("name", BENT)
def test_without_a_promise_so_is_its_hessian(name):
    op = op_of(BENT[name][0], promised=False)
    with pytest.raises(TransformationError, match=r"op_custom_gradient\(forward_mode=True\)"):
        jax.hessian(lambda x: op(x).sum())(X)


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_seen_to_be_linear_needs_no_promise_in_a_hessian(name, compiler):
    rule = LINEAR[name]
    transposed = jax.vjp(lambda u: rule(u, X), V)[1](V)[0]
    np.testing.assert_allclose(
        compiler(lambda x: jax.jvp(op_of(rule, True), (x,), (V,))[1])(X), transposed, rtol=1e-6
    )
    loss, promised_loss = (loss_of(op_of(rule, promised)) for promised in (False, True))
    expected = jax.jit(jax.jacrev(jax.jacrev(loss)))(X)
    for each in loss, promised_loss:
        hessian = compiler(jax.hessian(each))(X)
        np.testing.assert_allclose(hessian, expected, rtol=1e-6, atol=1e-9)


def loss_of(op):
    return lambda x: (op(x) * x).sum()


# --- Single operations of rules -------------------------------------------------------------------

LINEAR_OPERATIONS = {
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
NOT_LINEAR_OPERATIONS = {
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


@pytest.mark.parametrize("name", LINEAR_OPERATIONS)
def test_what_is_linear(name):
    require_linear(jax.make_jaxpr(LINEAR_OPERATIONS[name])(X))
    transposed = jax.linear_transpose(LINEAR_OPERATIONS[name], X)(LINEAR_OPERATIONS[name](V))[0]
    assert jnp.allclose(
        transposed, jax.vjp(LINEAR_OPERATIONS[name], X)[1](LINEAR_OPERATIONS[name](V))[0]
    )


@pytest.mark.parametrize("name", NOT_LINEAR_OPERATIONS)
def test_what_is_not_linear(name):
    rule, what = NOT_LINEAR_OPERATIONS[name]
    with pytest.raises(NotLinearError) as refusal:
        require_linear(jax.make_jaxpr(rule)(X))
    assert str(refusal.value) == what
