"""Details that only NumPy has, each of which a small mistake would change unseen."""

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from autograd.core import make_vjp

from cgshim import CustomGradientTypeError, op_custom_gradient, op_grad
from cgshim.ops import convert_to_tensor


def test_f_is_given_the_array_itself_where_an_outer_derivative_looks_on():
    """Not a copy of it, which a large array would pay for."""
    seen = []

    @op_custom_gradient(name="op")
    def op(x):
        seen.append(x)
        return x * x, lambda u: u * 7 * x

    given = np.array([2.0, 3.0])
    second = autograd.elementwise_grad(autograd.elementwise_grad(op))(given)
    np.testing.assert_array_equal(second, [7.0, 7.0])
    assert [np.shares_memory(x, given) for x in seen] == [True]


@pytest.mark.parametrize(
    ("argnums", "expected"), [((0, 0), 3 * 5.0), ((0, 1), 3 * 2.0), ((1, 0), 7 * 5.0), ((1, 1), 7 * 2.0)]
)
def test_second_order_of_what_was_made_of_a_captured_box(argnums, expected):
    def fn(x, w):
        @op_custom_gradient
        def op(x):
            product = x * w
            return product * x, lambda u, variables: (u * 3 * product, [u * 7 * product for _ in variables])

        return op(x)

    first, second = argnums
    np.testing.assert_allclose(op_grad(op_grad(fn, first), second)(np.array(2.0), np.array(5.0)), expected)


class Layer:
    """Holds a weight where f's closure does not show it."""


def test_a_box_that_the_rule_alone_keeps_is_refused_where_it_is_read():
    layer = Layer()

    @op_custom_gradient(name="op")
    def op(x, y):
        product = layer.w * x
        return 2.0 * x * y, lambda u: (u * product, u)

    def value(w):
        layer.w = w
        return make_vjp(lambda x: op(x, w), 3.0)[0](1.0)

    with pytest.raises(CustomGradientTypeError, match=r"^op: "):
        make_vjp(value, 5.0)


def test_an_array_of_boxes_is_connected_with_them():
    found = op_grad(lambda x: anp.exp(convert_to_tensor([x, 3.0 * x, 2.0]))[1])(np.array(2.0))
    np.testing.assert_allclose(found, 3.0 * np.exp(6.0))


def test_second_order_of_a_gradient_in_another_dtype():
    @op_custom_gradient
    def op(x):
        return x * x, lambda u: (u * 7 * x).astype("float32")

    found = op_grad(op_grad(op))(np.array(2.0))
    np.testing.assert_array_equal(found, 7.0)
    assert found.dtype == "float64"
