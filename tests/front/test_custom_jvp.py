"""Derivatives given forward: published ones against differences, rules for two modes, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from cgshim import (
    CustomGradientTypeError,
    op_convert_to_tensor,
    op_custom_gradient,
    op_custom_jvp,
    op_grad,
    ops,
)
from cgshim.testing import check_gradients
from cgshim.testing.conformance import Framework
from cgshim.testing.conformance._framework import tangent

# --- As published ---------------------------------------------------------------------------------


@op_custom_jvp
def sin_times(x, y):
    """JAX's documentation, "Custom derivative rules": the first example."""
    return ops.sin(x) * y, lambda dx, dy: ops.cos(x) * dx * y + ops.sin(x) * dy


@op_custom_jvp
def log1pexp(x):
    """JAX's documentation: stable where exp(x) is infinite."""
    return ops.log1p(ops.exp(x)), lambda dx: (1 - 1 / (1 + ops.exp(x))) * dx


@op_custom_jvp
def relu(x):
    """jax.nn.relu: its derivative at 0 is 0."""
    zeros = ops.zeros_like(x)
    return ops.maximum(x, zeros), lambda dx: ops.where(x > 0, dx, zeros)


@op_custom_jvp
def xlogy(x, y):
    """jax.scipy.special.xlogy: x log y, and 0 where x is 0."""
    log_y = ops.log(y)
    return ops.where(
        x == 0, ops.zeros_like(x * y), x * log_y
    ), lambda dx, dy: log_y * dx + x / y * dy


@op_custom_jvp
def softmax(x):
    """jax.nn.softmax: the derivative reads the output."""
    e = ops.exp(x - ops.max(x))
    y = e / ops.sum(e)
    return y, lambda dx: y * (dx - ops.sum(y * dx))


@op_custom_jvp
def logsumexp(x):
    """jax.scipy.special.logsumexp, of its derivative the softmax."""
    largest = ops.stop_gradient(ops.max(x))
    y = largest + ops.log(ops.sum(ops.exp(x - largest)))
    return y, lambda dx: ops.sum(ops.exp(x - y) * dx)


@op_custom_jvp
def det(a):
    """jax.numpy.linalg.det, by its adjugate: right where a is singular. Two by two."""
    y = a[0, 0] * a[1, 1] - a[0, 1] * a[1, 0]

    def jvp(da):
        adjugate = ops.stack([ops.stack([a[1, 1], -a[0, 1]]), ops.stack([-a[1, 0], a[0, 0]])])
        return ops.trace(ops.matmul(adjugate, da))

    return y, jvp


@op_custom_jvp
def cube(x):
    """PyTorch's documentation, "Extending torch.func": MyCube, with its own jvp."""
    square = 3 * x**2
    return x**3, lambda dx: square * dx


def root(by, x):
    """Newton's method for y with by y + sin y = x."""
    y = ops.stop_gradient(x / by)
    for _ in range(30):
        y = y - (by * y + ops.sin(y) - x) / (by + ops.cos(y))
    return y


@op_custom_jvp
def implicit(by, x):
    """jax.lax.custom_root's rule: the implicit function theorem at the root, forward."""
    y = root(ops.stop_gradient(by), ops.stop_gradient(x))
    return y, lambda d_by, dx: (dx - y * d_by) / (by + ops.cos(y))


@op_custom_jvp
def bessel_ive_half(x):
    """tfp.math.bessel_ive's rule, for v = 1/2, whose neighbours are known in closed form."""
    scale = ops.sqrt(2 / (math.pi * x))
    y, other = scale * (1 - ops.exp(-2 * x)) / 2, scale * (1 + ops.exp(-2 * x)) / 2
    return y, lambda dx: (other - y / (2 * x) - y) * dx


@op_custom_jvp
def sinc(x):
    """jax.numpy.sinc, whose derivative at 0 is 0. In halves, so that 0 is never divided by."""
    is_zero = x == 0
    t = math.pi * ops.where(is_zero, ops.ones_like(x), x)
    y = ops.where(is_zero, ops.ones_like(x), ops.sin(t) / t)
    return (
        y,
        lambda dx: (
            ops.where(
                is_zero, -(math.pi**2) / 3 * x, math.pi * (t * ops.cos(t) - ops.sin(t)) / t**2
            )
            * dx
        ),
    )


def log_gamma(x):
    """Stirling's series, for autograd has no forward mode of gammaln."""
    s = x + 8
    series = 1 / (12 * s) - 1 / (360 * s**3) + 1 / (1260 * s**5)
    below = ops.log(math.prod(x + k for k in range(8)))
    return (s - 0.5) * ops.log(s) - s + math.log(2 * math.pi) / 2 + series - below


def digamma(x):
    s = x + 8
    series = 1 / (12 * s**2) - 1 / (120 * s**4) + 1 / (252 * s**6)
    return ops.log(s) - 1 / (2 * s) - series - sum(1 / (x + k) for k in range(8))


def gamma_distribution(a):
    """Functions of z: the terms of the cumulative distribution, their slopes by a, the density."""
    n = a[:, None] + op_convert_to_tensor(np.arange(24.0), a.dtype)
    log_gamma_of_n, log_gamma_of_a = log_gamma(n + 1), log_gamma(a)

    def terms(z):
        return ops.exp(n * ops.log(z)[:, None] - z[:, None] - log_gamma_of_n)

    def slopes(z):
        return terms(z) * (ops.log(z)[:, None] - digamma(n + 1))

    return terms, slopes, lambda z: ops.exp((a - 1) * ops.log(z) - z - log_gamma_of_a)


@op_custom_jvp
def random_gamma(a, rate):
    """tfp.random.gamma's rule, implicit reparametrisation, for the sample that is the quantile 0.4."""
    z = shape = ops.stop_gradient(a)
    terms, _, density = gamma_distribution(shape)
    for _ in range(6):  # two more than Newton's method needs for it
        z = z - (ops.sum(terms(z), axis=1) - 0.4) / density(z)
    y = z / ops.stop_gradient(rate)

    def jvp(da, d_rate):
        z = y * rate
        _, slopes, density = gamma_distribution(a)
        by_a = -ops.sum(slopes(z), axis=1) / density(z)
        return by_a / rate * da - y / rate * d_rate

    return y, jvp


class Published(NamedTuple):
    op: Callable[..., Any]
    at: tuple[Any, ...]


PUBLISHED = {
    "sin(x) y": Published(sin_times, (np.array([0.3, 0.5]), np.array(2.0))),
    "log1pexp": Published(log1pexp, (np.array([-1.0, 3.0]),)),
    "relu": Published(relu, (np.array([-1.0, 2.0]),)),
    "xlogy": Published(xlogy, (np.array([0.5, 2.0]), np.array([3.0, 0.7]))),
    "softmax": Published(softmax, (np.array([0.3, -1.0, 2.0]),)),
    "logsumexp": Published(logsumexp, (np.array([0.3, -1.0, 2.0]),)),
    "det": Published(det, (np.array([[1.0, 2.0], [0.5, 3.0]]),)),
    "cube": Published(cube, (np.array([0.5, -2.0]),)),
    "custom_root": Published(implicit, (np.array(2.0), np.array([0.5, 1.5]))),
    "bessel_ive": Published(bessel_ive_half, (np.array([0.5, 2.0]),)),
    "sinc": Published(sinc, (np.array([0.3, -1.7]),)),
    "random_gamma": Published(random_gamma, (np.array([1.5, 3.0]), np.array(2.0))),
}


@pytest.fixture
def framework(backend):
    return Framework(backend)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(framework, name):
    op, at = PUBLISHED[name]
    inputs = [framework.tensor(x, "float64") for x in at]
    check_gradients(op, inputs, modes=["reverse", "forward"], order=2)


def test_what_is_published_for_is_there(framework):
    """What autodiff of the same formula gets wrong."""
    slope = lambda op, x: float(framework.numpy(op_grad(op)(framework.tensor(x))))
    assert slope(sinc, 0.0) == 0.0
    assert slope(log1pexp, 80.0) == 1.0
    assert slope(relu, 0.0) == 0.0
    singular = framework.tensor([[1.0, 2.0], [2.0, 4.0]])
    np.testing.assert_allclose(
        framework.numpy(op_grad(det)(singular)), [[4.0, -2.0], [-2.0, 1.0]], rtol=1e-6
    )


# --- Which tangents are zero ---------------------------------------------------------------------


def test_a_jvp_fn_is_told_which_tangents_are_zero(framework):
    """In each mode, and never False for a derivative that is used."""
    told = []

    @op_custom_jvp
    def op(x, y):
        def jvp(dx, dy, needs_input_grad):
            told.append(needs_input_grad)
            of_x, of_y = needs_input_grad
            tangent = 0.0 * (x * y)
            tangent = tangent + 7.0 * y * dx if of_x else tangent
            return tangent + 11.0 * x**2 * dy if of_y else tangent

        return x * y, jvp

    def check(found, expected, flags=None):
        framework.check_equal(found, expected)
        assert flags is None or set(told) == {flags}
        told.clear()

    x, y, v = framework.tensors((2.0, 3.0, 5.0))
    check(op_grad(op)(x, y), 21.0, (True, False))
    check(op_grad(op, argnums=1)(x, y), 44.0, (False, True))
    check(list(op_grad(op, argnums=(0, 1))(x, y)), [21.0, 44.0], (True, True))
    along_x = lambda y: tangent(framework, lambda x: op(x, y), x, v)
    check(along_x(y), 105.0, (True, False))
    check(tangent(framework, lambda y: op(x, y), y, v), 220.0, (False, True))
    # around each other, a framework may know no better than that all are
    check(op_grad(op_grad(op), argnums=1)(x, y), 7.0)
    check(op_grad(op_grad(op, argnums=1))(x, y), 44.0)
    check(tangent(framework, lambda y: op_grad(op)(x, y), y, v), 35.0)
    check(op_grad(along_x)(y), 35.0)


def test_both_rules_are_told(framework):
    """jvp_fn what moves, whatever grad_fn takes."""
    told = []

    def jvp(dx, dy, *, needs_input_grad):
        told.append(needs_input_grad)
        return 3.0 * dx + 5.0 * dy

    f = lambda x, y: (x + y, lambda u: (7.0 * u, 11.0 * u), jvp)
    op = op_custom_gradient(f, forward_mode=True)
    x, y, v = framework.tensors((2.0, 3.0, 5.0))
    framework.check_equal(tangent(framework, lambda y: op(x, y), y, v), 25.0)
    assert told[0][1]
    framework.check_equal(op_grad(op)(x, y), 7.0)


# --- Two rules ------------------------------------------------------------------------------------


def test_rules_that_disagree_are_told_apart(framework):
    """Each is compared with differences: the message says in which mode."""
    ops_of = {
        "reverse": op_custom_gradient(
            lambda x: (x**3, lambda u: 7 * x**2 * u, lambda dx: 3 * x**2 * dx), forward_mode=True
        ),
        "forward": op_custom_gradient(
            lambda x: (x**3, lambda u: 3 * x**2 * u, lambda dx: 7 * x**2 * dx), forward_mode=True
        ),
    }
    x = [framework.tensor([0.5, 2.0], "float64")]
    for mode, op in ops_of.items():
        with pytest.raises(AssertionError, match=rf"\({mode} mode\)"):
            check_gradients(op, x, modes=["reverse", "forward"])


def test_a_jvp_fn_gets_no_tangent_of_what_f_captures(framework):
    """A rule for each mode may have variables; forward mode has none."""

    def fn(w):
        @op_custom_gradient(name="capturing", forward_mode=True)
        def op(x):
            rule = lambda u, variables=None: (u * w, [u * x for _ in variables or []])
            return x * w, rule, lambda dx: dx * w

        return op(framework.tensor(3.0))

    with pytest.raises(Exception, match=r"capturing: .*pass it as an argument"):
        tangent(framework, fn, framework.tensor(2.0), framework.tensor(1.0))


# --- What is wrong --------------------------------------------------------------------------------


def test_what_is_no_function_is_refused():
    with pytest.raises(CustomGradientTypeError) as caught:
        op_custom_jvp(5)
    assert str(caught.value) == "op_custom_jvp: f must be callable, got int; decorate a function"


def test_a_jvp_fn_without_a_promise_is_refused(framework):
    op = op_custom_gradient(lambda x: (x * x, lambda u: u, lambda dx: dx), name="op")
    with pytest.raises(CustomGradientTypeError, match=r"^op: .* needs forward_mode=True"):
        op(framework.tensor(2.0))


def test_a_third_that_is_no_function_is_refused(framework):
    op = op_custom_gradient(lambda x: (x * x, lambda u: u, 3.0), name="op")
    with pytest.raises(
        CustomGradientTypeError, match=r"must return a pair \(output, grad_fn\), got a tuple of 3"
    ):
        op(framework.tensor(2.0))


def test_a_jvp_fn_of_another_count_is_refused(framework):
    op = op_custom_jvp(lambda x, y: (x * y, lambda dx: dx), name="half")
    with pytest.raises(CustomGradientTypeError) as caught:
        op(*framework.tensors((2.0, 3.0)))
    assert str(caught.value) == (
        "half: jvp_fn must take a tangent for each argument, got <lambda>(dx) for 2 arguments; "
        "write jvp(d1, d2, ...), with or without needs_input_grad last"
    )


def test_with_names_and_options(framework):
    op = op_custom_jvp(name="power", once_differentiable=True)(
        lambda x, *, n=2: (x**n, lambda dx: n * x ** (n - 1) * dx)
    )
    assert repr(op) == "<op power with a custom gradient>"
    x = framework.tensor(2.0)
    assert float(framework.numpy(op_grad(lambda x: op(x, n=3))(x))) == 12.0
