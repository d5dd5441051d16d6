"""Forward mode is the transpose of the rule where the author promises that it is linear; else one
sentence.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_ops import cube, cube_both_modes, product_both_modes

from cgshim import TransformationError, op_custom_gradient, op_vjp

X = jnp.array([0.5, -2.0, 3.0])
V = jnp.array([1.0, 10.0, 100.0])

FORWARD = {
    "jvp": lambda f: jax.jvp(f, (X,), (V,))[1],
    "jacfwd": lambda f: jax.jacfwd(f)(X) @ V,
    "linearize": lambda f: jax.linearize(f, X)[1](V),
    "jit of jvp": lambda f: jax.jit(lambda x, v: jax.jvp(f, (x,), (v,))[1])(X, V),
    "jit of jacfwd": lambda f: jax.jit(jax.jacfwd(f))(X) @ V,
    "jit of linearize": lambda f: jax.jit(lambda x, v: jax.linearize(f, x)[1](v))(X, V),
    "vmap of jvp": lambda f: jax.vmap(lambda x, v: jax.jvp(f, (x,), (v,))[1])(X, V),
    "jvp of vmap": lambda f: jax.jvp(jax.vmap(f), (X,), (V,))[1],
    "jvp of a while loop": lambda f: jax.jvp(
        lambda x: jax.lax.while_loop(lambda c: c[1], lambda c: (f(c[0]), False), (x, True))[0],
        (X,),
        (V,),
    )[1],
}


@pytest.fixture(params=FORWARD)
def forward(request):
    return FORWARD[request.param]


def test_the_transpose_of_a_promised_rule(forward, staging):
    np.testing.assert_allclose(forward(staging(cube_both_modes)), 15 * V * X**2)


def test_what_is_not_promised_is_refused(forward, staging):
    """An eager jax.linearize runs the op as jax.vjp does, and raises JAX's own error later."""
    with pytest.raises((TransformationError, TypeError)) as refusal:
        forward(staging(cube))
    if forward is FORWARD["linearize"] and "custom_vjp" in str(refusal.value):
        return
    assert str(refusal.value) == (
        "cube: forward mode needs a rule that is linear in upstream, got jvp, jacfwd or linearize; "
        "if it is, say so with op_custom_gradient(forward_mode=True)"
    )


@op_custom_gradient(forward_mode=True)
def mixed(tree, k, scale, *, factor=3):
    """Trees, several outputs, an integer argument and output, static leaves and options."""
    a, b = tree["a"], tree["b"][0]

    def rule(upstream):
        of_a = 2.0 * upstream["product"] * b * factor + 5.0 * upstream["sum"][0]
        of_b = 7.0 * (upstream["product"] * a).sum() + upstream["sum"][0].sum()
        return {"a": of_a, "b": (of_b, None)}, None, None

    return {"product": a * b, "sum": (a + b, k + 1), "word": scale}, rule


@pytest.mark.parametrize("compiler", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_trees_several_arguments_and_static_leaves(compiler):
    b, k = jnp.array(2.0), jnp.arange(3)

    def f(a, b):
        out = mixed({"a": a, "b": (b, "static")}, k, "word", factor=4)
        assert out["word"] == "word"
        return out["product"], out["sum"][0], out["sum"][1] * 1.0

    values, tangents = compiler(lambda *v: jax.jvp(f, (X, b), v))(V, jnp.array(10.0))
    np.testing.assert_allclose(values[2], [1, 2, 3])
    of_product, of_sum, of_integers = tangents
    np.testing.assert_allclose(of_product, 16 * V + 70 * X)
    np.testing.assert_allclose(of_sum, 5 * V + 10)
    np.testing.assert_allclose(of_integers, 0)
    np.testing.assert_allclose(
        compiler(lambda v: jax.jvp(lambda b: f(X, b), (b,), (v,))[1][0])(10.0), 70 * X
    )


def test_forward_mode_by_one_of_two_arguments():
    def tangent_of_x(y):
        return jax.jvp(lambda x: product_both_modes(x, jnp.asarray(y)), (X,), (V,))[1]

    for y in (2.0, jnp.array(2.0)):
        assert tangent_of_x(y).tolist() == (14 * V).tolist()
    tangent_of_y = jax.jvp(lambda y: product_both_modes(X, y), (2.0,), (1.0,))[1]
    assert tangent_of_y.tolist() == (11 * X).tolist()


def test_complex_numbers():
    z = jnp.array([1 + 2j, 3 - 1j])
    square = op_custom_gradient(
        lambda z: (z * z, lambda upstream: upstream * 6 * jnp.conj(z)), forward_mode=True
    )
    for f in square, jax.jit(square), jax.vmap(square):
        np.testing.assert_allclose(jax.jvp(f, (z,), (1j * z,))[1], 6j * z * z, rtol=1e-6)
        for derivative in jax.grad, lambda f: jax.jit(jax.grad(f)):
            np.testing.assert_allclose(derivative(lambda z: f(z).real.sum())(z), 6 * z, rtol=1e-6)  # noqa: B023
            np.testing.assert_allclose(derivative(lambda z: f(z).imag.sum())(z), -6j * z, rtol=1e-6)  # noqa: B023


@pytest.mark.parametrize("forward_mode", [False, True])
def test_complex_numbers_of_the_second_order(forward_mode, staging):
    """A rule is written in the convention of TensorFlow and PyTorch; what comes out is JAX's, as of
    3 z**2.
    """
    z = jnp.array(3 - 1j)
    square = op_custom_gradient(
        lambda z: (z * z, lambda u: u * 6 * jnp.conj(z)), forward_mode=forward_mode
    )

    def penalty(f):
        gradient = jax.grad(lambda z: (f(z) * (2 + 1j)).real)
        return jax.grad(lambda z: jnp.abs(gradient(z) ** 2 * (1 + 3j)))

    np.testing.assert_allclose(
        penalty(staging(square))(z), penalty(lambda z: 3 * z * z)(z), rtol=1e-5
    )


def test_op_vjp_hands_out_the_numbers_of_jax():
    z, u = jnp.array([1 + 2j, 3 - 1j]), jnp.array([2 - 1j, 1 + 1j])

    def square(z):
        return z * z

    op = op_custom_gradient(
        lambda z: (z * z, lambda u: jnp.conj(op_vjp(square, z)[1](jnp.conj(u))[0]))
    )
    np.testing.assert_allclose(op_vjp(square, z)[1](u)[0], jax.vjp(square, z)[1](u)[0])
    np.testing.assert_allclose(jax.vjp(op, z)[1](u)[0], 2 * z * u)


def test_a_promise_of_forward_mode_stages_no_eager_gradient():
    runs = []

    @op_custom_gradient(forward_mode=True)
    def f(x):
        runs.append(1)
        y = x * x if x > 0 else -x
        return y, lambda upstream: upstream * (7 if x > 0 else 5) * y

    derivative = f
    # y is kept: its derivative is the rule's
    for expected in 7 * 9.0, 7 * 7 * 9.0, 7 * 7 * 7 * 9.0:
        derivative = jax.grad(derivative)
        assert derivative(3.0) == expected
    assert len(runs) == 3
    assert jax.grad(f)(-3.0) == 15


def test_what_an_op_in_the_rule_refuses_is_said_in_its_name(compiler):
    @op_custom_gradient(forward_mode=True)
    def inner(x):
        return x * x, lambda upstream: jnp.sign(upstream) * x

    @op_custom_gradient(forward_mode=True)
    def outer(x):
        return x * x, lambda upstream: 7 * upstream * jax.jvp(inner, (x,), (x,))[1]

    for derivative in (
        compiler(lambda x: jax.jvp(outer, (x,), (x,))),
        compiler(jax.hessian(lambda x: outer(x).sum())),
    ):
        with pytest.raises(
            TransformationError,
            match=r"^inner: forward mode needs a rule that is linear in upstream",
        ):
            derivative(X)
