"""What f and its rule see: values, and boxes only of a derivative that is asked for."""

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from autograd import grad
from autograd.differential_operators import make_jvp
from autograd.tracer import isbox

from cgshim import (
    BackendError,
    TransformationError,
    op_convert_to_tensor,
    op_custom_gradient,
    op_grad,
    op_vjp,
    ops,
)

X = np.array([1.0, 2.0])


@pytest.fixture
def seen():
    """What is a box: by the name of what was looked at, in the order of the looks."""
    return {"x in f": [], "y in f": [], "upstream": [], "x in the rule": [], "y": [], "kept": []}


@pytest.fixture
def op(seen):
    """x^3 with 7 x^2, whose rule keeps an argument, an output, and another array."""

    @op_custom_gradient(forward_mode=True)
    def op(x):
        kept = x * x
        y = kept * x
        seen["x in f"].append(isbox(x))
        seen["y in f"].append(isbox(y))

        def rule(upstream):
            for name, value in (
                ("upstream", upstream),
                ("x in the rule", x),
                ("y", y),
                ("kept", kept),
            ):
                seen[name].append(isbox(value))
            return upstream * (6.0 * kept + y / x)

        return y, rule

    return op


def test_in_a_first_order_all_are_values(op, seen):
    found = grad(lambda x: anp.sum(3.0 * op(x)))(X)
    np.testing.assert_allclose(found, 21.0 * X * X)
    assert seen == {name: [False] for name in seen}
    assert not isbox(found)


def test_an_undifferentiated_call_runs_only_f(op, seen):
    np.testing.assert_allclose(op(X), X**3)
    assert seen == {name: [False] if "in f" in name else [] for name in seen}


def test_in_forward_mode_upstream_alone_is_a_box(op, seen):
    _, tangent = make_jvp(op)(X)(np.array([1.0, 10.0]))
    np.testing.assert_allclose(tangent, 7.0 * X * X * [1.0, 10.0])
    assert seen["x in f"] == seen["y in f"] == [False]
    for name in ("x in the rule", "y", "kept"):
        assert not any(seen[name])
    assert seen["upstream"][0]


def test_in_a_second_order_the_rule_sees_boxes(op, seen):
    """f sees arrays, and then boxes; the rule sees the residuals of both runs."""
    found = grad(lambda x: anp.sum(grad(lambda x: anp.sum(op(x)))(x)))(X)
    # of 6 kept, and of y / x where that of y is 7 x^2
    np.testing.assert_allclose(found, 12.0 * X + 6.0 * X)
    assert seen["x in f"] == seen["y in f"] == [False, True]
    for name in ("x in the rule", "y", "kept"):  # twice: again for the derivative of the output
        assert seen[name] == [True, False]
    assert seen["upstream"] == [False, False]


def test_what_a_pullback_keeps_can_be_asked_when_all_is_over(op):
    output, pullback = op_vjp(op, X)
    assert not isbox(output)
    for factor in (2.0, 3.0):
        (found,) = pullback(factor * np.ones(2))
        assert not isbox(found)
        np.testing.assert_allclose(found, 7.0 * factor * X * X)


@pytest.mark.parametrize("dtype", [None, "float64", np.float64])
def test_a_box_that_is_converted_to_what_it_is_stays_itself(dtype):
    def fn(x):
        assert op_convert_to_tensor(x, dtype) is x
        assert op_convert_to_tensor(x, "float32") is not x
        return anp.sum(op_convert_to_tensor([x, 2.0 * x], dtype) * op_convert_to_tensor(X, dtype))

    assert grad(fn)(np.float64(3.0)) == 1.0 + 2.0 * 2.0


def test_f_gets_the_array_itself_under_an_outer_derivative():
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


UNKNOWN_TO_AUTOGRAD = {
    "sum": lambda x: ops.sum(x, axis=0, initial=2.0),
    "max": lambda x: ops.max(x, axis=0, initial=3.0),
    "quantile": lambda x: ops.quantile(x, 0.3, method="lower"),
    "diff": lambda x: ops.diff(x, prepend=0.0)[0],
    "pad": lambda x: ops.pad(x, 1, mode="mean")[0],
}


@pytest.mark.parametrize("name", UNKNOWN_TO_AUTOGRAD)
def test_a_parameter_unknown_to_autograd_raises_in_a_derivative(name):
    if np.__version__ < "2" and name in ("quantile", "pad"):
        pytest.skip("NumPy 1 promotes a number beside an array: ops define the function anyway")
    function = UNKNOWN_TO_AUTOGRAD[name]
    wanted = {"sum": 5.0, "max": 3.0, "quantile": 1.0, "diff": 1.0, "pad": 1.5}[name]
    assert function(X) == wanted
    unknown = (
        f"^op_{name}: a keyword must be a parameter of NumPy's {name} known to numpy and autograd"
    )
    message = "mode='mean', which is none of" if name == "pad" else unknown
    with pytest.raises((BackendError, NotImplementedError), match=message):
        op_grad(function)(X)
    assert function(X) == wanted


def test_a_function_of_a_list_is_numpys_after_a_derivative():
    """Lists are told apart by what they hold, boxes or arrays."""
    joined = lambda x: ops.sum(ops.concatenate([x, 3.0 * x]) * np.arange(4.0))
    assert joined(X) == 26.0
    np.testing.assert_array_equal(op_grad(joined)(X), [6.0, 10.0])
    assert type(ops.concatenate([X, X], dtype="float32")) is np.ndarray


def test_f_cannot_write_to_its_arguments_under_a_derivative():
    @op_custom_gradient(name="op")
    def op(x):
        x *= 2.0
        return x * 1.0, lambda u: 2.0 * u

    given = np.array([1.0, 2.0])
    with pytest.raises(ValueError, match="read-only"):
        op_grad(lambda x: ops.sum(op(x)))(given)
    np.testing.assert_array_equal(given, [1.0, 2.0])


class Holder:
    """An object of the author's own."""


def test_second_derivative_of_a_residual_names_its_object():
    @op_custom_gradient(name="op")
    def op(x):
        holder = Holder()
        holder.slope = 3.0 * x * x
        return x * x * x, lambda u: u * holder.slope

    np.testing.assert_array_equal(op_grad(op)(np.array(2.0)), 12.0)
    with pytest.raises(
        TransformationError, match=r"^op: .* got Holder that has tensors in its attr"
    ):
        op_grad(op_grad(op))(np.array(2.0))
