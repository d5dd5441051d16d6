"""What only NumPy has: HIPS autograd's own operators on an op."""

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from autograd.differential_operators import make_jvp
from autograd.misc.tracers import const_graph

from cgshim import CustomGradientTypeError, TransformationError, op_custom_gradient, ops
from cgshim.testing import check_gradients

X = np.array([0.5, -2.0, 3.0])


def square(x):
    """x * x, with a rule that is wrong on purpose: 7 x, so that autodiff's 2 x is told apart."""
    i = anp.multiply(x, 3.5)
    return x * x, lambda upstream: upstream * 2 * i


square_in_reverse = op_custom_gradient(square)
square = op_custom_gradient(square, forward_mode=True)


@op_custom_gradient(forward_mode=True)
def mixed(tree, scale):
    """Outputs of two shapes; the gradients of a and b are 3 and 5 times what upstream says."""
    a, b = tree["a"], tree["b"]
    return (a * scale, anp.sum(b)), lambda u: ({"a": 3 * u[0], "b": 5 * u[1] * np.ones(2)}, None)


def test_grad_of_a_sum():
    np.testing.assert_allclose(autograd.grad(lambda x: anp.sum(2 * square(x)))(X), 14 * X)


def test_elementwise_grad():
    np.testing.assert_allclose(autograd.elementwise_grad(square)(X), 7 * X)


def test_jacobian():
    np.testing.assert_allclose(autograd.jacobian(square)(X), np.diag(7 * X))


def test_hessian():
    np.testing.assert_allclose(
        autograd.hessian(lambda x: anp.sum(x * square(x)))(X), np.diag(21 * X)
    )


@pytest.mark.parametrize(
    ("order", "expected"), [(1, 28.0 + 4.0), (2, 28.0 + 14.0), (3, 7.0 + 14.0 + 0.0)]
)
def test_orders_of_x_times_square(order, expected):
    derivative = lambda x: x * square(x)
    for _ in range(order):
        derivative = autograd.grad(derivative)
    np.testing.assert_allclose(derivative(2.0), expected)


def test_jvp_is_the_transpose_of_the_rule():
    value, tangent = make_jvp(square)(X)(np.array([1.0, 10.0, 100.0]))
    np.testing.assert_allclose(value, X**2)
    np.testing.assert_allclose(tangent, 7 * X * [1.0, 10.0, 100.0])


def test_jvp_of_trees():
    def fn(a):
        first, second = mixed({"a": a, "b": a[:2]}, 11.0)
        return first + second

    _, tangent = make_jvp(fn)(X)(np.array([1.0, 10.0, 100.0]))
    np.testing.assert_allclose(tangent, 3 * np.array([1.0, 10.0, 100.0]) + 5 * 11.0)


def test_jvp_over_reverse():
    _, tangent = make_jvp(autograd.grad(lambda x: anp.sum(square(x))))(X)(
        np.array([1.0, 10.0, 100.0])
    )
    np.testing.assert_allclose(tangent, 7 * np.array([1.0, 10.0, 100.0]))


def test_jvp_without_the_flag_is_refused():
    with pytest.raises(TransformationError) as error:
        make_jvp(square_in_reverse)(X)(X)
    assert str(error.value) == (
        "square: forward mode needs a rule that is linear in upstream, got autograd's make_jvp; "
        "if it is, say so with op_custom_gradient(forward_mode=True)"
    )


def test_const_graph_runs_an_op_on_other_values():
    once = op_custom_gradient(lambda x: (x * x, lambda u: 7 * u * x), once_differentiable=True)
    for op in (once, lambda x: anp.sin(square(x))):
        replayed = const_graph(op)
        for x in (X, 2 * X):
            np.testing.assert_array_equal(replayed(x), op(x))


def test_a_box_that_reaches_f_unseen_is_refused():
    class Holder:
        pass

    holder = Holder()

    @op_custom_gradient
    def scaled(x):
        return x * holder.weight, lambda upstream: upstream

    def fn(w):
        holder.weight = w
        return scaled(X[0])

    with pytest.raises(CustomGradientTypeError, match="captured f64\\[\\]; pass it as an argument"):
        autograd.grad(fn)(2.0)


def test_plain_arrays_do_not_meet_autograd():
    value = square(X)
    assert type(value) is np.ndarray
    np.testing.assert_array_equal(value, X**2)


@pytest.mark.parametrize("name", ["cbrt", "median", "ptp"])
def test_a_function_without_a_derivative_in_autograd_has_one(name):
    function = getattr(ops, name)
    check_gradients(lambda x: ops.sum(3 * function(x)), [np.array([3.0, 1.0, 8.0])], order=1)
