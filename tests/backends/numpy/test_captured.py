"""Boxes that reach f or its rule by another way than the arguments."""

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import grad
from autograd.differential_operators import make_jvp
from autograd.extend import defjvp, defvjp, primitive

from cgshim import CustomGradientTypeError, op_custom_gradient, op_grad

REFUSED = (
    r"^{}: f must be given every tensor that is differentiated, got (a captured f64\[\]|f64\[\] in the option w); "
    r"pass it as an argument$"
)


# --- What grad_fn alone reads ---------------------------------------------------------------------


class Layer:
    @op_custom_gradient
    def twice(self, x):
        return 2.0 * x, lambda u: 7.0 * u * self.w


@op_custom_gradient
def with_an_option(x, *, w):
    return 2.0 * x, lambda u: 7.0 * u * w


HELD = {}


@op_custom_gradient
def of_a_global(x):
    return 2.0 * x, lambda u: 7.0 * u * HELD["w"]


def by_attribute(x, w):
    layer = Layer()
    layer.w = w
    return layer.twice(x)


def by_global(x, w):
    HELD["w"] = w
    return of_a_global(x)


READERS = {
    "attribute": by_attribute,
    "option": lambda x, w: with_an_option(x, w=w),
    "global": by_global,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_what_the_rule_alone_reads_does_not_leak(read):
    fn = op_grad(lambda x, w: read(x, w) * w, (0, 1))
    with pytest.raises(
        CustomGradientTypeError, match=REFUSED.format("(twice|with_an_option|of_a_global)")
    ):
        fn(3.0, 5.0)
    found = op_grad(lambda x: read(x, 5.0))(3.0)
    assert type(found) is np.ndarray
    np.testing.assert_allclose(found, 35.0)


def test_a_box_of_a_derivative_that_is_over_does_not_leak():
    HELD["w"] = None
    grad(lambda w: HELD.update(w=w) or w * 1.0)(5.0)
    with pytest.raises(CustomGradientTypeError, match=REFUSED.format("of_a_global")):
        op_grad(of_a_global)(3.0)


# --- Python numbers -------------------------------------------------------------------------------


def of_weight(w):
    """2 w^2, by an op that captures w: its rule has 11 w for 4 w."""
    op = op_custom_gradient(lambda x: (x * w * w, lambda u, variables: (7.0 * u, [11.0 * u * w])))
    return op(np.array(2.0))


@pytest.mark.parametrize(("order", "expected"), [(1, 33.0), (2, 11.0)])
def test_a_captured_python_float(order, expected):
    fn = of_weight
    for _ in range(order):
        fn = grad(fn)
    assert fn(3.0) == expected


def test_a_captured_python_complex():
    """autograd's convention, for a rule in that of all backends: the conjugate of dL/dx + i dL/dy."""

    def fn(w):
        op = op_custom_gradient(
            lambda x: (x * w, lambda u, variables: ((None,), [7.0 * u * anp.conj(x)]))
        )
        return anp.real(op(np.array(2.0 + 1.0j)))

    assert (
        grad(fn)(3.0 + 2.0j)
        == 7 * grad(lambda w: anp.real((2.0 + 1.0j) * w))(3.0 + 2.0j)
        == 14 + 7j
    )


def test_a_python_float_as_an_argument_of_a_rule():
    op = op_custom_gradient(
        lambda x, y: (x * y, lambda x, y, upstream: (7.0 * upstream * y, 11.0 * upstream * x))
    )
    assert grad(grad(op, 1), 0)(2.0, 3.0) == 11.0


@pytest.mark.parametrize("transformed", [
    lambda fn: make_jvp(fn)(3.0)(0.5)[1],
    lambda fn: make_jvp(grad(fn))(3.0)(0.5)[1],
    lambda fn: make_jvp(lambda w: make_jvp(fn)(w)(w)[1])(3.0)(0.5)[1],
    lambda fn: grad(lambda w: make_jvp(fn)(w)(w)[1])(3.0),
], ids=["forward", "forward over reverse", "forward over forward", "reverse over forward"])  # fmt: skip
def test_a_captured_box_that_the_rule_reads_itself(transformed):
    """2 w^2 with 11 w for 4 w, in forward mode: the transpose of the rule reads it too."""

    def fn(w):
        op = op_custom_gradient(
            lambda x: (x * w * w, lambda u, variables: (7.0 * u * w * w, [11.0 * u * x * w / 2.0])),
            forward_mode=True,
        )
        return op(np.array(2.0))

    by_hand = primitive(lambda w: 2.0 * w * w)
    defvjp(by_hand, lambda ans, w: lambda u: 11.0 * u * w)
    defjvp(by_hand, lambda u, ans, w: 11.0 * u * w)
    np.testing.assert_allclose(transformed(fn), transformed(by_hand))


def test_a_captured_dict_of_boxes_is_refused():
    def fn(weights):
        return op_custom_gradient(lambda x: (x * weights["w"], lambda u, variables: (u, [u])))(
            np.array(2.0)
        )

    with pytest.raises(CustomGradientTypeError, match="captured DictBox; pass it as an argument"):
        grad(fn)({"w": 3.0})


# --- Ops in rules ---------------------------------------------------------------------------------


@op_custom_gradient(forward_mode=True)
def fused(x):
    """x^3; 11 x^2 and 13 x are wrong on purpose."""
    value, first = x * x * x, 11.0 * x * x

    @op_custom_gradient(forward_mode=True)
    def derivative(x):
        return first, lambda u: u * 13.0 * x

    return value, lambda u: u * derivative(x)


@pytest.mark.parametrize(
    ("fn", "expected"), [(fused, (44.0, 26.0)), (lambda x: fused(3 * x), (1188.0, 702.0))]
)
def test_forward_over_reverse_of_the_nested_recipe(fn, expected):
    np.testing.assert_allclose(make_jvp(grad(fn))(2.0)(1.0), expected)


def test_forward_over_reverse_of_the_nested_recipe_in_a_rule():
    """In the rule of an op that the outer rule differentiates, the outer one's residuals are known
    too.
    """

    @op_custom_gradient(forward_mode=True)
    def op(x):
        first = 11.0 * x * x
        derivative = op_custom_gradient(
            lambda x: (first, lambda u: u * 13.0 * x), forward_mode=True
        )
        middle = op_custom_gradient(
            lambda x: (x * x, lambda u: u * derivative(x)), forward_mode=True
        )
        return x * x * x, lambda u: u * grad(middle)(x)

    np.testing.assert_allclose(make_jvp(grad(op))(2.0)(1.0), (44.0, 26.0))


def test_a_gradient_that_a_rule_takes_of_an_op_with_variables():
    """5 x + 2 at 2: what the rule differentiates is state to the op inside."""

    @op_custom_gradient
    def checkpoint(x, w):
        def fn(w):
            op = op_custom_gradient(
                lambda x: (x * w, lambda u, variables: (7.0 * u * w, [5.0 * u * x]))
            )
            return op(x) + 2.0 * w

        return fn(w), lambda u: (None, u * op_grad(fn)(w))

    assert grad(checkpoint, 1)(np.array(2.0), 3.0) == 12.0


@pytest.mark.parametrize(("order", "expected"), [(1, 26.0), (2, 13.0)])
def test_the_nested_recipe_in_a_gradient_of_values(order, expected):
    """While a rule runs, what was made of an op's own argument alone is a constant, in a first
    order too.
    """

    def fn(z):
        square = z * z
        return op_custom_gradient(lambda z: (square, lambda u: 13.0 * u * z))(z)

    found = op_custom_gradient(lambda x: (x * 1.0, lambda u: u * grad(fn)(x)))
    for _ in range(order):
        found = grad(found)
    assert found(2.0) == expected


@pytest.mark.parametrize(
    ("argnums", "expected"),
    [((0, 0), 3 * 5.0), ((0, 1), 3 * 2.0), ((1, 0), 7 * 5.0), ((1, 1), 7 * 2.0)],
)
def test_second_order_of_what_was_made_of_a_captured_box(argnums, expected):
    def fn(x, w):
        @op_custom_gradient
        def op(x):
            product = x * w
            return product * x, lambda u, variables: (
                u * 3 * product,
                [u * 7 * product for _ in variables],
            )

        return op(x)

    first, second = argnums
    np.testing.assert_allclose(
        op_grad(op_grad(fn, first), second)(np.array(2.0), np.array(5.0)), expected
    )


# --- Declared variables ---------------------------------------------------------------------------


class Weighted:
    """A layer whose rule reads the weight as a variable, and another attribute by itself."""

    def __init__(self, weight, scale):
        self.weight, self.scale = weight, scale

    @op_custom_gradient(variables=lambda self: [self.weight])
    def __call__(self, x):
        def grad_fn(u, variables):
            (w,) = variables
            return 5.0 * u * w * self.scale, [3.0 * u * x * w * self.scale]

        return x * self.weight, grad_fn


@pytest.mark.parametrize(("order", "expected"), [(1, 3 * 2 * 7 * 0.5), (2, 3 * 2 * 0.5), (3, 0.0)])
def test_declared_variable_of_an_object(order, expected):
    """x w, with 3 x w s for the derivative by w."""
    fn = lambda w: Weighted(w, np.array(0.5))(np.array(2.0))
    for _ in range(order):
        fn = op_grad(fn)
    np.testing.assert_allclose(fn(np.array(7.0)), expected)


def test_mixed_derivative_by_variable_and_argument():
    """5 w s for the derivative by x: by w, 5 s."""
    by_x = lambda w: op_grad(lambda x: Weighted(w, np.array(0.5))(x))(np.array(2.0))
    np.testing.assert_allclose(op_grad(by_x)(np.array(7.0)), 2.5)
