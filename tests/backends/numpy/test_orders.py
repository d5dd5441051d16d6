"""Second and higher orders under HIPS autograd: what a rule keeps, and how often f runs."""

import functools
import math
import random

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.special
from autograd import elementwise_grad, grad, value_and_grad
from autograd.differential_operators import make_jvp, make_vjp

from cgshim import (
    TransformationError,
    op_convert_to_numpy,
    op_convert_to_tensor,
    op_custom_gradient,
    op_grad,
    ops,
)

X = np.array(0.5)


def nth(fn, order):
    """The derivative of this order."""
    for _ in range(order):
        fn = op_grad(fn)
    return fn


# --- A kept output --------------------------------------------------------------------------------

KEEPERS = {
    "a closure": lambda y: lambda u: u * 5 * y,
    "a list": lambda y: (lambda kept: lambda u: u * 5 * kept[0])([y]),
    "a dict": lambda y: (lambda kept: lambda u: u * 5 * kept["y"])({"y": y, "n": 2}),
    "a partial": lambda y: functools.partial(lambda kept, u: u * 5 * kept, y),
    "an inner function": lambda y: (lambda get: lambda u: u * 5 * get())(lambda: y),
    "a default value": lambda y: lambda u, kept=y: u * 5 * kept,
}


@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS)
@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_kept_output_of_an_opaque_f(keep, order):
    """exp by Python's math, with 5 for 1 in its rule: each derivative is 5 times the last, and f
    runs once.
    """
    runs = []

    @op_custom_gradient
    def exp(x):
        runs.append(x)
        y = np.float64(math.exp(x))
        return y, keep(y)

    np.testing.assert_allclose(nth(exp, order)(X), 5**order * math.exp(0.5))
    assert len(runs) == 1


class WrongTypeError(Exception):
    """What Numba, ctypes and other libraries raise for a box is no TypeError."""


def opaque(x):
    if not isinstance(x, (np.ndarray, np.generic)):
        raise WrongTypeError(type(x).__name__)
    return np.exp(x)


@pytest.mark.parametrize(
    ("f", "value"),
    [(opaque, math.exp(0.5)), (ops.special.log_ndtr, scipy.special.log_ndtr(0.5))],
    ids=["an error of its own", "one of cgshim.ops"],
)
def test_an_f_that_raises_what_it_likes_for_a_box(f, value):
    """With 5 for 1 in the rule, which calls the op itself."""
    op = op_custom_gradient(lambda x: (f(x), lambda u: u * 5 * op(x)))
    for order in (1, 2, 3):
        np.testing.assert_allclose(nth(op, order)(X), 5**order * value)


def test_one_of_several_outputs():
    @op_custom_gradient
    def square_and_exp(x):
        y = np.float64(math.exp(x))
        return (x * x, y), lambda u: 3 * u[0] * x + 5 * u[1] * y

    np.testing.assert_allclose(nth(lambda x: square_and_exp(x)[1], 3)(X), 125 * math.exp(0.5))
    np.testing.assert_allclose(nth(lambda x: square_and_exp(x)[0], 2)(X), 3.0)
    both = nth(lambda x: square_and_exp(x)[0] * square_and_exp(x)[1], 2)(X)
    e = math.exp(0.5)
    np.testing.assert_allclose(both, (3 + 2 * (1.5 * 5) + 0.25 * 25) * e)


@pytest.mark.parametrize("transformed", [
    lambda fn: elementwise_grad(elementwise_grad(fn)), lambda fn: lambda x: make_jvp(elementwise_grad(fn))(x)(x / x)[1],
], ids=["reverse", "forward"])  # fmt: skip
def test_a_kept_integer_output_is_a_constant(transformed):
    @op_custom_gradient(forward_mode=True)
    def largest(x):
        at = np.argmax(x)
        return (x[at] * x[at], at), lambda u: u[0] * 7 * x * np.eye(3)[at]

    np.testing.assert_allclose(
        transformed(lambda x: largest(x)[0])(np.array([1.0, 3.0, 2.0])), [0.0, 7.0, 0.0]
    )


def test_numpy_in_place_and_while_loops():
    @op_custom_gradient
    def squares(x):
        y = np.empty_like(x)
        y[...] = x
        at = 0
        while at < 1:
            y *= x
            at += 1
        return y, lambda u: 3.0 * u * y

    np.testing.assert_allclose(
        elementwise_grad(elementwise_grad(squares))(np.array([2.0, 3.0])), [36.0, 81.0]
    )


# --- Other residuals ------------------------------------------------------------------------------


@pytest.mark.parametrize("transformed", [
    lambda op: make_jvp(grad(op))(2.0)(1.0)[1],
    lambda op: make_jvp(lambda x: make_jvp(op)(x)(1.0)[1])(2.0)(1.0)[1],
    lambda op: grad(lambda x: make_jvp(op)(x)(1.0)[1])(2.0),
], ids=["forward over reverse", "forward over forward", "reverse over forward"])  # fmt: skip
@pytest.mark.parametrize("keeps", ["an intermediate", "an output"])
def test_forward_mode(transformed, keeps):
    @op_custom_gradient(forward_mode=True)
    def op(x):
        i = x * x
        return (
            (i * x, lambda u: u * 5 * i) if keeps == "an intermediate" else (i, lambda u: u * 5 * i)
        )

    np.testing.assert_allclose(transformed(op), 20.0 if keeps == "an intermediate" else 100.0)


def test_one_array_in_two_boxes():
    product = op_custom_gradient(lambda x, y: (x * y, lambda u: (7 * u * y, 11 * u * x)))
    mixed = op_grad(lambda y: y * y * op_grad(lambda x: product(x, y))(X))
    np.testing.assert_allclose(mixed(X), 21 * 0.25)


def test_a_constant_that_is_the_argument_too():
    anchored = (
        lambda anchor: op_custom_gradient(lambda x: (x * anchor, lambda u: u * 7 * anchor))
    )(X)
    np.testing.assert_allclose(nth(lambda x: anchored(x) * x, 2)(X), 2 * 7 * 0.5)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_f_runs_once_per_order(order):
    """sin(x) x, with the rule 3 sin(x)."""
    ran = []

    @op_custom_gradient
    def op(x):
        ran.append(x)
        i = anp.sin(x)
        return i * x, lambda u: u * 3 * i

    derivatives = [np.sin, np.cos, lambda x: -np.sin(x), lambda x: -np.cos(x)]
    np.testing.assert_allclose(nth(op, order)(X), 3 * derivatives[order - 1](0.5))
    assert len(ran) == order


def test_runs_of_nested_ops_do_not_multiply():
    runs = [0] * 9

    def level(depth):
        inner = level(depth - 1) if depth > 1 else anp.sin

        @op_custom_gradient
        def op(x):
            runs[depth] += 1
            i = inner(x)
            return 2.0 * i, lambda u: u * 3 * i

        return op

    for order in (1, 2):
        runs[:] = [0] * 9
        nth(level(8), order)(X)
        assert runs[1:] == [order] * 8


# --- What f does besides computing in autograd ----------------------------------------------------


def _noise(draw):
    def f(x):
        i = x * x * (1 + draw())
        return i * 1.0, lambda u: u * i

    return f


_generator = np.random.default_rng(3)

RANDOM = {
    "numpy.random": _noise(np.random.normal),
    "a Generator": _noise(_generator.normal),
    "a Generator of f's own": _noise(lambda: np.random.default_rng().normal()),
    "random": _noise(random.random),
}


@pytest.mark.parametrize("f", RANDOM.values(), ids=RANDOM)
def test_random_residuals_have_a_first_derivative_and_no_second(f):
    """f runs again for the second derivative, and draws another number."""
    op = op_custom_gradient(f, name="op")
    found = []

    def gradient(x):
        found.append(value_and_grad(op)(x))
        return found[-1][1]

    with pytest.raises(TransformationError, match=r"^op: .* f must return the same, got other res"):
        grad(gradient)(np.array(0.5))
    ((residual, first),) = found
    np.testing.assert_allclose(first._value, residual._value)


def _opaque(x):
    i = np.float64(math.exp(-x * x))
    return i * 1.0, lambda u: u * i


def _opaque_argument(x):
    i = np.float64(math.exp(x))
    return i * 1.0, lambda u: u * i


def _in_place(x):
    i = np.array(x)
    i *= x
    return i * 1.0, lambda u: u * i


REFUSED = {
    "Python's math": _opaque,
    "Python's math, of the argument": _opaque_argument,
    "in place": _in_place,
}


@pytest.mark.parametrize("f", REFUSED.values(), ids=REFUSED)
def test_a_residual_made_of_numbers_has_a_first_order_only(f):
    op = op_custom_gradient(f, name="op")
    found = []

    def gradient(x):
        found.append(value_and_grad(op)(x))
        return found[-1][1]

    made = (
        r"^op: a second order needs every tensor that .*, "
        r"got .* f made of values that Python read; let grad_fn compute"
    )
    with pytest.raises(TransformationError, match=made):
        grad(gradient)(np.array(0.5))
    ((residual, first),) = found
    np.testing.assert_allclose(first._value, residual._value)


TABLE = np.array(7.0)


class Scaled:
    table = np.array(3.0)

    def __init__(self):
        self.own = np.array(0.5)

    @op_custom_gradient
    def exp(self, x):
        y = np.float64(math.exp(x))
        return y, lambda u: u * y * TABLE * self.table * self.own * self.factor()

    def factor(self):
        return np.ones(())


@pytest.mark.parametrize("order", [1, 2, 3])
def test_tables_that_were_there_are_constants_to_an_opaque_f(order):
    np.testing.assert_allclose(nth(Scaled().exp, order)(X), 10.5**order * math.exp(0.5))


def test_an_argument_that_f_changes_is_another_one():
    """In a second order `/=` makes another box, as in autograd: the rule keeps (x/2)^2."""

    def halved(x):
        x = x * 1.0
        x /= 2.0
        i = x * x
        return i * 1.0, lambda u: u * i

    np.testing.assert_allclose(nth(op_custom_gradient(halved), 2)(X), 0.25)


MATRIX = np.array([[2.0, 0.3], [0.1, 1.5]])


def _squared(x):
    return anp.einsum("ij,ij->ij", x, x)


@pytest.mark.parametrize(
    "rule",
    [
        lambda x: (lambda kept: lambda u: u * 5 * kept)(_squared(x)),
        lambda x: lambda u: anp.einsum("ij,ij->ij", u * 5, _squared(x)),
    ],
    ids=["in f", "in the rule"],
)
def test_einsum_whose_derivative_wants_its_arguments_in_a_tuple(rule):
    """As autograd's own primitives have them."""
    op = op_custom_gradient(lambda x: (x * x, rule(x)))
    second, _ = make_vjp(lambda x: make_vjp(op)(x)[0](MATRIX))(MATRIX)
    np.testing.assert_allclose(second(MATRIX), MATRIX * MATRIX * 10 * MATRIX)


def test_once_differentiable_in_forward_mode():
    """The first order is there, promised or not; of it nothing has a derivative."""
    op = op_custom_gradient(
        lambda x: (x**3, lambda u: u * 5 * x * x), forward_mode=True, once_differentiable=True
    )
    np.testing.assert_allclose(make_jvp(op)(2.0)(3.0), (8.0, 60.0))
    for second in (
        lambda: make_jvp(grad(op))(2.0)(1.0),
        lambda: grad(lambda x: make_jvp(op)(x)(1.0)[1])(2.0),
    ):
        with pytest.raises(TransformationError, match="a rule that is once_differentiable"):
            second()


def test_gradients_that_come_in_a_box_together():
    """As autograd's own make_vjp gives those of a tuple, while it is differentiated in turn."""

    @op_custom_gradient
    def sine(x, w):
        return anp.sin(x * w), lambda u: make_vjp(lambda both: anp.sin(both[0] * both[1]))((x, w))[
            0
        ](5 * u)

    second = grad(grad(sine, 0), 1)(0.5, 0.75)
    np.testing.assert_allclose(second, 5 * (np.cos(0.375) - 0.375 * np.sin(0.375)))


def test_a_gradient_of_another_dtype_in_forward_mode():
    """A rule that computes in float64 for float32: its gradient is cast, and that has a derivative
    too.
    """

    @op_custom_gradient(forward_mode=True)
    def cubed(x):
        cast = op_convert_to_tensor
        return x**3, lambda upstream: np.float64(7.0) * cast(upstream * x**2, "float64")

    x, tangent = np.array([1.0, 2.0], "float32"), np.array([1.0, 10.0], "float32")
    gradient, derivative = make_jvp(elementwise_grad(cubed))(x)(tangent)
    np.testing.assert_allclose(gradient, [7, 28])
    np.testing.assert_allclose(derivative, [14, 280])
    assert (gradient.dtype, derivative.dtype) == (np.float32, np.float32)


READING = {
    "Python's math": (lambda x: lambda u: 5.0 * u * math.sin(x), TypeError),
    "NumPy's array": (lambda x: lambda u: 5.0 * u * np.sin(np.asarray(x)), TypeError),
    "cgshim's array": (
        lambda x: lambda u: 5.0 * u * np.sin(op_convert_to_numpy(x)),
        TransformationError,
    ),
}


@pytest.mark.parametrize(("make", "error"), READING.values(), ids=READING)
def test_rule_that_reads_numbers_has_no_second_derivative(make, error):
    """The TypeErrors are those of a rule in autograd."""
    op = op_custom_gradient(lambda x: (2.0 * x, make(x)), name="op")
    both = grad(lambda x: op(x) * grad(lambda x: 3.0 * x * x)(x))(0.5)
    np.testing.assert_allclose(both, 5.0 * np.sin(0.5) * 3.0 + 2.0 * 0.5 * 6.0)
    with pytest.raises(error):
        grad(grad(op))(0.5)


def test_second_order_of_a_gradient_in_another_dtype():
    @op_custom_gradient
    def op(x):
        return x * x, lambda u: (u * 7 * x).astype("float32")

    found = op_grad(op_grad(op))(np.array(2.0))
    np.testing.assert_array_equal(found, 7.0)
    assert found.dtype == "float64"
