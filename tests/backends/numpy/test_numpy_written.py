"""The rule runs as it was written, wherever f has put what it reads: in each transformation of
autograd, in each order.

f has 2 x, and its rule 5 x sin(x): wrong on purpose, so that autodiff's number cannot pass for the
rule's. The sine is the residual. By hand it is a primitive, which computes it again from x.
"""

import dataclasses
import functools
import math
import types

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import elementwise_grad, hessian, jacobian
from autograd.differential_operators import make_jvp, make_vjp
from autograd.extend import defvjp, primitive
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import getval

from cgshim import CustomGradientError, op_custom_gradient, op_vjp

X = np.array([0.5])


@primitive
def by_hand(x):
    return 2.0 * x


defvjp(by_hand, lambda ans, x: lambda u: 5.0 * u * (x * anp.sin(x)))

# --- Where f puts the sine, and how the rule gets it ----------------------------------------------


@dataclasses.dataclass
class Record:
    held: object


def rule(x, sine):
    return lambda u: 5.0 * u * (x * sine())


def in_a_cell(x, s):
    return lambda u: 5.0 * u * (x * s)


def in_a_list(x, s):
    kept = [s]
    return rule(x, lambda: kept[0])


def in_a_dict(x, s):
    kept = {"s": {"s": s}}
    return rule(x, lambda: kept["s"]["s"])


def in_a_partial(x, s):
    return functools.partial(lambda x, s, u: 5.0 * u * (x * s), x, s)


def in_a_partial_of_numpy(x, s):
    # NumPy's own function does from autograd 1.9 on
    takes_boxes = hasattr(ArrayBox, "__array_ufunc__")
    return functools.partial(np.multiply if takes_boxes else anp.multiply, 5.0 * (x * s))


def in_a_default_value(x, s):
    return lambda u, *, kept=s: 5.0 * u * (x * kept)


def in_a_dataclass(x, s):
    kept = Record(s)
    return rule(x, lambda: kept.held)


def in_a_namespace(x, s):
    kept = types.SimpleNamespace(s=[s])
    return rule(x, lambda: kept.s[0])


def in_an_attribute_of_the_rule(x, s):
    def grad_fn(u):
        return 5.0 * u * (x * grad_fn.s)

    grad_fn.s = s
    return grad_fn


def in_an_inner_vjp(x, s):
    pull = make_vjp(lambda x: -anp.cos(x))(x)[0]
    return lambda u: 5.0 * x * pull(u)


def in_an_inner_op(x, s):
    pull = op_vjp(
        op_custom_gradient(lambda x: (x, lambda u: u * anp.sin(x)), forward_mode=True), x
    )[1]
    return lambda u: 5.0 * x * pull(u)[0]


def by_an_op_in_the_rule(x, s):
    sine = op_custom_gradient(lambda x: (np.sin(x), lambda u: u * anp.cos(x)), forward_mode=True)
    return rule(x, lambda: sine(x))


def by_a_function_of_autograd(x, s):
    sin = anp.sin  # autograd finds the derivative of a function by its identity
    return rule(x, lambda: sin(x))


PLACES = [
    in_a_cell, in_a_list, in_a_dict, in_a_partial, in_a_partial_of_numpy, in_a_default_value, in_a_dataclass,
    in_a_namespace, in_an_attribute_of_the_rule, in_an_inner_vjp, in_an_inner_op, by_an_op_in_the_rule,
    by_a_function_of_autograd,
]  # fmt: skip


def op_of(place, **options):
    return op_custom_gradient(lambda x: (2.0 * x, place(x, anp.sin(x))), name="op", **options)


def nth(derivative, fn, order):
    for _ in range(order):
        fn = derivative(fn)
    return fn


def summed(fn):
    return lambda x: anp.sum(fn(x))


TRANSFORMED = {
    "elementwise_grad": lambda fn, order: nth(elementwise_grad, fn, order)(X),
    "of a product": lambda fn, order: nth(elementwise_grad, lambda x: 3.0 * fn(2.0 * x) * x, order)(
        X
    ),
    "of an expression": lambda fn, order: nth(
        elementwise_grad, lambda x: anp.exp(fn(anp.tanh(x))), order
    )(X),
    "jacobian": lambda fn, order: nth(jacobian, fn, order)(X),
    "make_vjp": lambda fn, order: make_vjp(nth(elementwise_grad, fn, order - 1))(X)[0](
        np.array([3.0])
    ),
    "by upstream": lambda fn, order: elementwise_grad(
        lambda u: make_vjp(nth(elementwise_grad, fn, order - 1))(X)[0](u) * u
    )(np.array([3.0])),
    "hessian": lambda fn, order: nth(
        elementwise_grad, lambda x: hessian(summed(fn))(x)[0], order - 1
    )(X),
}


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_as_by_hand(place, transformed, order):
    np.testing.assert_allclose(transformed(op_of(place), order), transformed(by_hand, order))


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize(
    "place",
    [each for each in PLACES if each is not in_an_inner_op],
    ids=lambda place: place.__name__,
)
def test_in_forward_mode(place, order):
    """J v of the last derivative: of a rule that promises it, and is seen to be linear, as op_vjp's
    pullback is not.
    """
    op = op_of(place, forward_mode=True)
    tangent = make_jvp(nth(elementwise_grad, op, order - 1))(X)(np.array([3.0]))[1]
    np.testing.assert_allclose(tangent, 3.0 * nth(elementwise_grad, by_hand, order)(X))
    twice = make_jvp(lambda x: make_jvp(nth(elementwise_grad, op, order - 1))(x)(x)[1])(X)(
        np.array([3.0])
    )[1]
    expected = elementwise_grad(lambda x: x * nth(elementwise_grad, by_hand, order)(x))(X)
    np.testing.assert_allclose(twice, 3.0 * expected)


# --- The first order ------------------------------------------------------------------------------


def test_the_first_order_runs_what_f_returned_on_what_it_holds():
    returned, read = [], []

    @op_custom_gradient
    def op(x):
        sine = np.sin(x)

        def grad_fn(u):
            read.append((grad_fn, x, sine, u))
            return 7.0 * u * sine

        returned.append((grad_fn, x, sine))
        return 2.0 * x, grad_fn

    upstream = np.array([3.0])
    np.testing.assert_allclose(make_vjp(op)(X)[0](upstream), 21.0 * np.sin(X))
    for held, was in zip(read[0], (*returned[0], upstream), strict=True):
        assert held is was
    assert np.shares_memory(returned[0][1], X)


# --- Outputs --------------------------------------------------------------------------------------

OUTPUTS = {
    "the output": (lambda y: y, 49.0),
    "what f has made of it": (lambda y: (lambda z: z / 2.0)(2.0 * y), 7.0),
    "what the rule makes of it": (None, 49.0),
}


@pytest.mark.parametrize(("kept", "expected"), OUTPUTS.values(), ids=OUTPUTS)
def test_an_output_is_the_ops_and_what_f_makes_of_it_is_fs(kept, expected):
    """exp, with 7 for 1: the second derivative of the rule is 7 * 7 exp(x), and of f's own
    operations 7 exp(x).
    """

    @op_custom_gradient
    def op(x):
        y = anp.exp(x)
        z = kept and kept(y)
        return y, (lambda u: 7.0 * u * z) if kept else (lambda u: 7.0 * u * (2.0 * y) / 2.0)

    np.testing.assert_allclose(elementwise_grad(elementwise_grad(op))(X), expected * np.exp(X))


def test_an_output_without_a_derivative_of_its_own():
    @op_custom_gradient
    def op(x):
        y = anp.round(10.0 * x)
        return y, lambda u: 7.0 * u * (y + 0.0 * (2.0 * y))

    np.testing.assert_allclose(elementwise_grad(op)(X), [35.0])
    np.testing.assert_allclose(elementwise_grad(elementwise_grad(op))(X), [7.0 * 35.0])


def test_a_value_that_f_has_taken_out_of_its_box_is_a_constant():
    """As it is in a function that autograd differentiates."""
    op = op_custom_gradient(
        lambda x: (2.0 * x, (lambda s: lambda u: 5.0 * u * (x * s))(np.sin(getval(x))))
    )
    np.testing.assert_allclose(elementwise_grad(elementwise_grad(op))(X), 5.0 * np.sin(X))


# --- An f that computes in Python -----------------------------------------------------------------

NOT_THE_SINE = (
    in_an_inner_vjp,
    in_an_inner_op,
    by_an_op_in_the_rule,
    by_a_function_of_autograd,
)
OF_SINE = [place for place in PLACES if place not in NOT_THE_SINE]


def sine_in_python(x):
    return np.array([math.sin(each) for each in np.asarray(x)])


@pytest.mark.parametrize("place", OF_SINE, ids=lambda place: place.__name__)
def test_what_python_has_computed_is_refused_wherever_it_is(place):
    op = op_custom_gradient(lambda x: (2.0 * x, place(x, sine_in_python(x))), name="op")
    np.testing.assert_allclose(elementwise_grad(op)(X), 5.0 * X * np.sin(X))
    with pytest.raises(
        CustomGradientError,
        match=r"^op: a second order needs .* f made of values that Python read; ",
    ):
        elementwise_grad(elementwise_grad(op))(X)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize(
    "place",
    [each for each in OF_SINE if each is not in_a_partial_of_numpy],
    ids=lambda place: place.__name__,
)
def test_an_output_computed_by_python_is_the_ops_output(place, order):
    """y' is the rule's, 5 x y."""

    @op_custom_gradient(name="op")
    def op(x):
        y = sine_in_python(x)
        return y, place(x, y)

    y, x = np.sin(X), X
    expected = [5 * x * y, 5 * y + 25 * x**2 * y, 75 * x * y + 125 * x**3 * y]
    np.testing.assert_allclose(nth(elementwise_grad, op, order)(X), expected[order - 1])


@op_custom_gradient(name="op")
def compiled(x, scale):
    """exp(scale x) by Python's math, whose rule has 7 for 1."""
    y = np.array([math.exp(each * scale[0]) for each in np.asarray(x)])
    return y, lambda u: (7.0 * u * y * scale, None)


def test_undifferentiated_argument_of_an_opaque_f_is_constant():
    scale = np.array([3.0])
    for order in (1, 2, 3):
        found = nth(elementwise_grad, lambda x: compiled(x, scale), order)(X)
        np.testing.assert_allclose(found, 21.0**order * np.exp(3.0 * X))


HARMLESS = {
    "a table": lambda x: lambda u: u * x * TABLE_OF_7,
    "constants of the rule": lambda x: lambda u: u * x * (np.ones(1) * np.float32(7.0)),
    "a constant of f": lambda x: (lambda k: lambda u: u * x * k)(np.full(1, 7.0)),
    "an index": lambda x: (lambda at: lambda u: 7.0 * u[at] * x)(np.argsort(x)),
    "a comparison": lambda x: (lambda positive: lambda u: 7.0 * u * x * positive)(x > 0),
}
TABLE_OF_7 = np.array([7.0])


@pytest.mark.parametrize("write", HARMLESS.values(), ids=HARMLESS)
def test_constants_are_not_refused(write):
    op = op_custom_gradient(lambda x: (2.0 * x, write(x)))
    np.testing.assert_allclose(elementwise_grad(elementwise_grad(lambda x: 3.0 * op(x)))(X), [21.0])


def test_numpys_own_functions_in_a_rule():
    op = op_custom_gradient(
        lambda x: (np.sin(x), functools.partial(np.multiply, 5.0 * x)), name="op"
    )
    np.testing.assert_allclose(nth(elementwise_grad, op, 2)(X), np.full_like(X, 5.0))
