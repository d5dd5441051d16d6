"""Forward mode where it is promised: the transpose of a rule that is seen to be linear in upstream."""

import autograd.numpy as anp
import numpy as np
import pytest
from autograd.differential_operators import make_jvp
from autograd.extend import defvjp, primitive
from autograd.tracer import getval

from cgshim import TransformationError, op_convert_to_tensor, op_custom_gradient, op_stop_gradient

X, V = np.array([0.5, -2.0, 3.0]), np.array([1.0, 10.0, 100.0])
A = np.array([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 0.0, 4.0]])


def tangent(rule):
    op = op_custom_gradient(lambda x: (x * x, lambda u: rule(x, u)), forward_mode=True, name="op")
    return make_jvp(op)(X)(V)[1]


MATRICES = {
    "solve": (lambda x, u: anp.linalg.solve(A, u), np.linalg.inv(A)),
    "matmul": (lambda x, u: A @ u, A),
    "from the right": (lambda x, u: u @ A, A.T),
    "einsum": (lambda x, u: anp.einsum("ij,j->i", A, u), A),
    "where": (lambda x, u: anp.where(x > 0, u, 0.0), np.diag(X > 0)),
    "mean": (lambda x, u: u - anp.mean(u), np.eye(3) - 1 / 3),
    "loop": (lambda x, u: sum(u[i] * A[i] for i in range(3)), A.T),
    "array": (
        lambda x, u: anp.array([u[2], u[0], 2 * u[1]]),
        np.array([[0, 0, 1], [1, 0, 0], [0, 2, 0]]),
    ),
    "flip": (lambda x, u: u[::-1] * x, np.diag(X)[:, ::-1]),
    "fft": (lambda x, u: anp.real(anp.fft.fft(u)), np.fft.fft(np.eye(3)).real),
    "zeros": (lambda x, u: np.zeros(3) + u + anp.zeros_like(u), np.eye(3)),
    "roll": (lambda x, u: anp.roll(u, 1), np.roll(np.eye(3), 1, axis=0)),
    "pad": (lambda x, u: anp.pad(u, 1, "constant")[:3], np.eye(3, k=-1)),
    "NaN": (lambda x, u: u * np.array([1.0, np.nan, 2.0]), np.diag([1.0, np.nan, 2.0])),
    "an op": (lambda x, u: op_custom_gradient(lambda u: (u * x, lambda v: v * x))(u), np.diag(X)),
}


@pytest.mark.parametrize(("rule", "matrix"), MATRICES.values(), ids=MATRICES)
def test_linear(rule, matrix):
    expected = np.array([1.0, np.nan, 200.0]) if np.isnan(matrix).any() else matrix.T @ V
    np.testing.assert_allclose(tangent(rule), expected, atol=1e-12)


tripled = primitive(lambda u: 3.0 * u + 1e-5)  # a solver that stops early
defvjp(tripled, lambda ans, u: lambda g: 3.0 * g)


def test_a_linear_rule_that_is_computed_roughly():
    np.testing.assert_allclose(tangent(lambda x, u: tripled(u)), 3.0 * V)


def test_through_a_conversion_to_another_precision():
    value, tangent = make_jvp(lambda x: 3.0 * op_convert_to_tensor(x * x, np.float32))(X)(V)
    np.testing.assert_allclose(value, 3.0 * X * X)
    np.testing.assert_allclose(tangent, 6.0 * X * V)


cubed = primitive(lambda u: u**3)
defvjp(cubed, lambda ans, u: lambda g: 3 * g * u**2)

NONLINEAR = {
    "clip": lambda x, u: anp.clip(u, -9.0, 9.0),
    "max": lambda x, u: anp.max(u) * x,
    "a comparison": lambda x, u: u if u[0] > 0 else 2 * u,
    "quotient": lambda x, u: u / u,
    "norm": lambda x, u: u / anp.linalg.norm(u),
    "a constant in an array": lambda x, u: anp.array([u[0], u[1], 1.0]),
    "ones": lambda x, u: anp.ones_like(u),
    "a constant elsewhere": lambda x, u: anp.where(x > 0, u, 1.0),
    "a value": lambda x, u: 3 * getval(u),
    "a stopped factor": lambda x, u: u * op_stop_gradient(u),
    "a value for a factor": lambda x, u: u * getval(u),
    "a primitive of their own": lambda x, u: cubed(u),
}


@pytest.mark.parametrize("rule", NONLINEAR.values(), ids=NONLINEAR)
def test_not_linear(rule):
    with pytest.raises(TransformationError) as error:
        tangent(rule)
    assert str(error.value) == (
        "op: forward mode needs a rule that is linear in upstream, got gradients that are not, "
        "or that autograd cannot differentiate; write it in linear operations, or use reverse mode"
    )


@pytest.mark.parametrize(
    "z", [1.0 + 2.0j, np.array([1.0 + 2.0j, 3.0 - 1.0j])], ids=["a number", "an array"]
)
def test_complex_numbers(z):
    """The rule is that of every backend; J v is that of z * z, 7 times."""
    op = op_custom_gradient(lambda z: (z * z, lambda u: 7 * u * anp.conj(2 * z)), forward_mode=True)
    v = (2.0 - 1.0j) * np.ones_like(z)
    np.testing.assert_allclose(make_jvp(op)(z)(v)[1], 14 * z * v)
