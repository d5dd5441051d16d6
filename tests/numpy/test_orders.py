"""Second and higher orders under HIPS autograd: what a rule keeps, and how often f runs."""

import functools
import math
import random
import types

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import elementwise_grad, grad, value_and_grad
from autograd.differential_operators import make_jvp, make_vjp

from cgshim import TransformationError, op_custom_gradient, op_grad

X = np.array(0.5)


def nth(fn, order):
    """The derivative of this order."""
    for _ in range(order):
        fn = op_grad(fn)
    return fn


# --- A kept output ------------------------------------------------------------------------------------------------

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
    """exp by Python's math, with 5 for 1 in its rule: each derivative is 5 times the last, and f runs once."""
    runs = []

    @op_custom_gradient
    def exp(x):
        runs.append(x)
        y = np.float64(math.exp(x))
        return y, keep(y)

    np.testing.assert_allclose(nth(exp, order)(X), 5**order * math.exp(0.5))
    assert len(runs) == 1


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

    np.testing.assert_allclose(transformed(lambda x: largest(x)[0])(np.array([1.0, 3.0, 2.0])), [0.0, 7.0, 0.0])


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

    np.testing.assert_allclose(elementwise_grad(elementwise_grad(squares))(np.array([2.0, 3.0])), [36.0, 81.0])


# --- Other residuals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "runs"), [(1, 1), (2, 2), (3, 2), (4, 2)])
def test_another_run_gives_the_derivatives(order, runs):
    """sin(x) x, with the rule 3 sin(x)."""
    ran = []

    @op_custom_gradient
    def op(x):
        ran.append(x)
        i = anp.sin(x)
        return i * x, lambda u: u * 3 * i

    derivatives = [np.sin, np.cos, lambda x: -np.sin(x), lambda x: -np.cos(x)]
    np.testing.assert_allclose(nth(op, order)(X), 3 * derivatives[order - 1](0.5))
    assert len(ran) == runs


def test_f_is_not_run_again_until_somebody_asks():
    ran = []

    @op_custom_gradient
    def op(x):
        ran.append(x)
        i = x * x
        return i * x, lambda u: u * 5 * i

    value, gradient = value_and_grad(lambda x: x * float(op_grad(op)(x)._value))(2.0)
    assert (value, gradient, len(ran)) == (40.0, 20.0, 1)


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
        return (i * x, lambda u: u * 5 * i) if keeps == "an intermediate" else (i, lambda u: u * 5 * i)

    np.testing.assert_allclose(transformed(op), 20.0 if keeps == "an intermediate" else 100.0)


def test_the_work_of_nested_ops_does_not_double_at_each_level():
    runs = [0] * 9

    def level(depth):
        inner = level(depth - 1) if depth > 1 else anp.sin

        @op_custom_gradient
        def op(x):
            runs[depth] += 1
            i = inner(x)
            return 2.0 * i, lambda u: u * 3 * i

        return op

    for order, most in [(1, 1), (2, 2), (3, 3)]:
        runs[:] = [0] * 9
        nth(level(8), order)(X)
        assert max(runs) == most


def test_one_array_in_two_boxes():
    product = op_custom_gradient(lambda x, y: (x * y, lambda u: (7 * u * y, 11 * u * x)))
    mixed = op_grad(lambda y: y * y * op_grad(lambda x: product(x, y))(X))
    np.testing.assert_allclose(mixed(X), 21 * 0.25)


def test_a_constant_that_is_the_argument_too():
    anchored = (lambda anchor: op_custom_gradient(lambda x: (x * anchor, lambda u: u * 7 * anchor)))(X)
    np.testing.assert_allclose(nth(lambda x: anchored(x) * x, 2)(X), 2 * 7 * 0.5)


# --- What is refused ------------------------------------------------------------------------------------------------

ANOTHER_RUN = r"^op: a second order runs f again, which must give grad_fn the same tensors, got "
SETTINGS = {}


def _opaque(x):
    i = np.float64(math.exp(-x * x))
    return i * 1.0, lambda u: u * i


def _in_place(x):
    i = np.array(x)
    i *= x
    return i * 1.0, lambda u: u * i


def _changing_its_argument(x):
    x /= 2.0
    i = x * x
    return i * 1.0, lambda u: u * i


def _reading_a_setting(x):
    SETTINGS["scale"] = SETTINGS.get("scale", 1.0) + 1.0
    i = x * x * SETTINGS["scale"]
    return i * 1.0, lambda u: u * i


def _noise(draw, scale):
    def f(x):
        i = x * x * (1 + scale * draw())
        return i * 1.0, lambda u: u * i

    return f


_generator = np.random.default_rng(3)

REFUSED = {
    "Python's math": (
        _opaque,
        "a TypeError in it; compute in the framework what grad_fn keeps, or keep arguments and outputs alone",
    ),
    "in place": (_in_place, "a .*Error in it"),
    "a changed argument": (_changing_its_argument, "one that changes its arguments; let f work on copies"),
    "a setting": (_reading_a_setting, "others; compute them from the arguments alone"),
    "numpy.random": (_noise(np.random.normal, 1.0), "one that draws random numbers"),
    "numpy.random, a little": (_noise(np.random.normal, 1e-12), "one that draws random numbers"),
    "a Generator": (_noise(_generator.normal, 1.0), "one that draws random numbers"),
    "a Generator of f's own": (_noise(lambda: np.random.default_rng().normal(), 1e-6), "others"),
    "random": (_noise(random.random, 1e-6), "one that draws random numbers"),
}


@pytest.mark.parametrize(("f", "got"), REFUSED.values(), ids=REFUSED)
def test_another_run_that_is_not_the_same_is_refused_and_the_first_order_is_not(f, got):
    op = op_custom_gradient(f, name="op")
    found = []

    def gradient(x):
        found.append(value_and_grad(op)(x))
        return found[-1][1]

    with pytest.raises(TransformationError, match=ANOTHER_RUN + got):
        grad(gradient)(np.array(0.5))
    (residual, first), *rest = found
    assert not rest
    np.testing.assert_allclose(first._value, residual._value)


def test_the_cause_of_a_refusal_is_told():
    with pytest.raises(TransformationError) as error:
        nth(op_custom_gradient(_opaque), 2)(X)
    assert type(error.value.__cause__) is TypeError


@pytest.mark.parametrize("make", [
    lambda i: (lambda kept: lambda u: u * 5 * kept.i)(types.SimpleNamespace(i=i)),
    lambda i: (TAPE.append(i), lambda u: u * 5 * TAPE.pop())[1],
], ids=["an attribute", "a tape"])  # fmt: skip
def test_a_residual_where_nobody_can_put_another_is_refused(make):
    op = op_custom_gradient(lambda x: (x * x * x, make(x * x)))
    np.testing.assert_allclose(op_grad(op)(2.0), 20.0)
    with pytest.raises(TransformationError, match="a second order needs what grad_fn keeps as a tensor"):
        nth(op, 2)(2.0)


TAPE = []


def test_once_differentiable_in_forward_mode():
    """The first order is there, promised or not; of it nothing has a derivative."""
    op = op_custom_gradient(lambda x: (x**3, lambda u: u * 5 * x * x), forward_mode=True, once_differentiable=True)
    np.testing.assert_allclose(make_jvp(op)(2.0)(3.0), (8.0, 60.0))
    for second in (lambda: make_jvp(grad(op))(2.0)(1.0), lambda: grad(lambda x: make_jvp(op)(x)(1.0)[1])(2.0)):
        with pytest.raises(TransformationError, match="a rule that is once_differentiable"):
            second()


def test_a_variable_that_f_assigns_to_holds_what_the_first_run_left():
    """No box of another run, which would be a captured one in the next call."""
    last, runs = None, 0

    @op_custom_gradient
    def cube(x):
        nonlocal last, runs
        last, runs = x * x, runs + 1
        return last * x, lambda u: u * 5 * last

    np.testing.assert_allclose([nth(cube, order)(X) for order in (1, 2, 3)], [5 * 0.25, 10 * 0.5, 10])
    assert isinstance(last, (np.ndarray, np.floating))
    assert runs == 3


def test_gradients_that_come_in_a_box_together():
    """As autograd's own make_vjp gives those of a tuple, while it is differentiated in turn."""

    @op_custom_gradient
    def sine(x, w):
        return anp.sin(x * w), lambda u: make_vjp(lambda both: anp.sin(both[0] * both[1]))((x, w))[0](5 * u)

    second = grad(grad(sine, 0), 1)(0.5, 0.75)
    np.testing.assert_allclose(second, 5 * (np.cos(0.375) - 0.375 * np.sin(0.375)))


def test_a_gradient_of_another_dtype_in_forward_mode():
    """A rule that computes in float64 for float32: its gradient is cast, and that has a derivative too."""

    @op_custom_gradient(forward_mode=True)
    def cubed(x):
        return x**3, lambda upstream: np.float64(7.0) * (upstream * x**2).astype("float64")

    x, tangent = np.array([1.0, 2.0], "float32"), np.array([1.0, 10.0], "float32")
    gradient, derivative = make_jvp(elementwise_grad(cubed))(x)(tangent)
    np.testing.assert_allclose(gradient, [7, 28])
    np.testing.assert_allclose(derivative, [14, 280])
    assert (gradient.dtype, derivative.dtype) == (np.float32, np.float32)
