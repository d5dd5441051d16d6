"""What only tinygrad has: its own gradients, TinyJit, functions and realize. The rule says 7 x for
x * x.
"""

import numpy as np
import pytest
from tinygrad import Tensor, TinyJit, dtypes, function

from cgshim import (
    BackendError,
    CustomGradientTypeError,
    TransformationError,
    op_convert_to_tensor,
    op_custom_gradient,
    op_embed_gradient,
    op_grad,
    op_host,
    op_vjp,
)
from cgshim.testing import check_gradients

X = [2.0, -3.0, 5.0]


@op_custom_gradient
def square(x):
    residual = 3.5 * x
    return x * x, lambda upstream: upstream * 2 * residual


def total(x):
    return square(x).sum()


def gradient(x):
    return total(x).gradient(x)[0]


def by_backward(x):
    total(x).backward()
    return x.grad


def by_jit(x):
    compiled = TinyJit(lambda x: gradient(x).realize())
    for _ in range(4):  # it replays from the third call on
        found = compiled((x * 1).realize())
    return found


def after_realize(x):
    y = square(x)
    slope = y.sum().gradient(x)[0]
    y.realize()
    return slope


TRANSFORMED = {
    "gradient": gradient,
    "backward": by_backward,
    "op_grad": op_grad(total),
    "TinyJit": by_jit,
    "gradient of a function": lambda x: function(total)(x).gradient(x)[0],
    "gradient of a precompiled function": lambda x: function(total, precompile=True)(x).gradient(x)[
        0
    ],
    "function of a gradient": lambda x: function(gradient)(x),
    "a gradient, then realize": after_realize,
    "contiguous": lambda x: square(x.contiguous()).contiguous().sum().gradient(x)[0],
    "embedded": lambda x: op_embed_gradient((x * x).sum(), 7 * x, x).gradient(x)[0],
}


@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
def test_the_rule_is_never_dropped(transformed):
    np.testing.assert_allclose(transformed(Tensor(X)).numpy(), 7 * np.array(X))


@pytest.mark.parametrize("dtype", [dtypes.half, dtypes.bfloat16, dtypes.float, dtypes.double])
def test_gradients_of_dtypes_with_names_of_their_own(dtype):
    x = Tensor(X, dtype=dtype)
    found = gradient(x)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.cast(dtypes.float).numpy(), 7 * np.array(X))


def test_a_python_number_in_a_tensor_has_a_gradient_by_op_grad():
    """tinygrad itself refuses it: such a number has a weak dtype and no device."""
    assert op_grad(square)(Tensor(3.0)).numpy() == 21.0


def test_one_op_of_many_outputs_runs_its_rule_once():
    runs = []

    @op_custom_gradient
    def op(x, y):
        def grad(of_sum, of_products):
            runs.append(1)
            return of_sum + 7 * of_products * y, 11 * (of_products * x).sum()

        return [x.sum(), (x * y).cast(dtypes.half)], grad

    x, y = Tensor(X), Tensor([5.0]).sum()
    of_sum, of_products = op(x, y)
    of_x, of_y = (
        2 * of_sum + (of_products.cast(dtypes.float) * Tensor([1.0, 10.0, 100.0])).sum()
    ).gradient(x, y)
    np.testing.assert_allclose(of_x.numpy(), 2 + 35 * np.array([1.0, 10.0, 100.0]))
    np.testing.assert_allclose(of_y.numpy(), 11 * (2.0 - 30.0 + 500.0))
    assert len(runs) == 1


def test_one_graph_node_that_is_two_arguments():
    """tinygrad has one node for equal expressions; the gradients stay apart."""
    op = op_custom_gradient(lambda x, y: (x * y, lambda u: (7 * u * y, 11 * u * x)))
    number = Tensor(3.0, dtype=dtypes.float)
    assert [
        g.numpy() for g in op_grad(op, argnums=(0, 1))(number, Tensor(3.0, dtype=dtypes.float))
    ] == [21.0, 33.0]


# --- What f captured ------------------------------------------------------------------------------


def test_the_weight_of_an_object_is_no_silent_zero():
    """tinygrad does not say by what it differentiates: its own gradient is NaN, and op_grad
    refuses.
    """
    weight = Tensor([3.0])
    scaled = op_custom_gradient(
        lambda x: (x * weight, lambda upstream: 7 * upstream), name="scaled"
    )
    x = Tensor(X)
    of_weight, of_x = scaled(x).sum().gradient(weight, x)
    assert np.isnan(of_weight.numpy()).all()
    np.testing.assert_allclose(of_x.numpy(), [7.0] * 3)

    def loss(weight):
        return op_custom_gradient(lambda x: (x * weight, lambda u: 7 * u), name="scaled")(
            Tensor(X)
        ).sum()

    with pytest.raises(
        CustomGradientTypeError,
        match=r"^scaled: .* got a captured f32\[1\]; pass it as an argument$",
    ):
        op_grad(loss)(weight)


class Layer:
    def __init__(self):
        self.weight = Tensor([3.0])

    @op_custom_gradient
    def __call__(self, x):
        return x * self.weight, lambda upstream: 7 * upstream


def test_the_weight_of_a_layer_is_no_silent_zero():
    layer, x = Layer(), Tensor(X)
    of_weight, of_x = layer(x).sum().gradient(layer.weight, x)
    assert np.isnan(of_weight.numpy()).all()
    np.testing.assert_allclose(of_x.numpy(), [7.0] * 3)


def test_a_weight_as_variable():
    weight, upstream = Tensor([3.0]), Tensor([1.0, 10.0, 100.0])

    def loss(weight):
        rule = lambda u, variables: (7 * u, [(11 * u).sum().reshape(1)])
        return (op_custom_gradient(lambda x: (x * weight, rule))(Tensor(X)) * upstream).sum()

    assert op_grad(loss)(weight).numpy() == [11 * 111.0]


# --- Second orders --------------------------------------------------------------------------------


def keeping_its_output(x):
    y = x.exp().detach()
    return y, lambda upstream: upstream * 5 * y


def keeping_an_intermediate(x):
    i = x.exp()
    return 5 * i * x, lambda upstream: upstream * 5 * i


@pytest.mark.parametrize(("f", "factor"), [(keeping_its_output, 25), (keeping_an_intermediate, 5)])
def test_second_order(f, factor):
    x, runs = Tensor([0.5, -1.0]), []
    op = op_custom_gradient(lambda x: runs.append(1) or f(x))
    slope = op(x).sum().gradient(x)[0]
    found = (slope * Tensor([2.0, 3.0])).sum().gradient(x)[0]
    np.testing.assert_allclose(found.numpy(), factor * np.exp([0.5, -1.0]) * [2.0, 3.0], rtol=1e-5)
    assert len(runs) == 1  # its graph is there, nobody runs f again


def test_random_numbers_that_the_rule_keeps_are_those_of_f():
    @op_custom_gradient
    def noisy(x):
        i = x * x * Tensor.rand(3)
        return i * 1, lambda upstream: upstream * 5 * i

    x = Tensor(X)
    y = noisy(x)
    slope = y.sum().gradient(x)[0]
    np.testing.assert_allclose((slope / y).numpy(), [5.0] * 3, rtol=1e-6)
    np.testing.assert_allclose((slope.sum().gradient(x)[0] * x / y).numpy(), [10.0] * 3, rtol=1e-6)


def test_what_f_realizes_has_no_second_order():
    """tinygrad forgets how a realized tensor was computed: without a refusal its derivative would
    be zero.
    """

    @op_custom_gradient
    def op(x):
        i = x.exp().realize()
        return i * 1, lambda upstream: upstream * 5 * i

    x = Tensor(X)
    slope = op(x).sum().gradient(x)[0]
    np.testing.assert_allclose(slope.numpy(), 5 * np.exp(X), rtol=1e-6)
    assert np.isnan(slope.sum().gradient(x)[0].numpy()).all()
    with pytest.raises(TransformationError) as caught:
        op_grad(lambda x: op_grad(lambda x: op(x).sum())(x).sum())(x)
    assert str(caught.value) == (
        "op: a second order needs every tensor that grad_fn reads as a function of the arguments, got f32[3] that f "
        "made of values that Python read; let grad_fn compute it, or let f return it as an output"
    )


def doubled(x):
    x *= 2
    x += x
    return x * 1, lambda upstream: upstream * 5 * x


def doubled_after_a_look(x):
    x.numpy()
    x *= 2
    x += x
    return x * 1, lambda upstream: upstream * 5 * x


@pytest.mark.parametrize("f", [doubled, doubled_after_a_look])
def test_a_changed_argument(f):
    """f changes a copy, and the rule gets what f has left of it, however often they are computed."""
    x = Tensor(X).realize()
    y = op_custom_gradient(f)(x)
    slope = y.sum().gradient(x)[0]
    for _ in range(2):
        np.testing.assert_allclose(y.numpy(), 4 * np.array(X))
        np.testing.assert_allclose((slope * 1).numpy(), 20 * np.array(X))
    np.testing.assert_allclose(slope.sum().gradient(x)[0].numpy(), [20.0] * 3)
    np.testing.assert_allclose(x.numpy(), X)


def test_a_changed_captured_tensor():
    """It is changed once a call, and the rule reads what it then is."""
    count = Tensor([0.0]).realize()

    @op_custom_gradient
    def counting(x):
        count.assign(count + 1)
        return x * count, lambda upstream: 7 * upstream * count

    x = Tensor(X)
    for times in (1.0, 2.0):
        y = counting(x)
        slope = y.sum().gradient(x)[0]
        np.testing.assert_allclose(y.numpy(), times * np.array(X))
        np.testing.assert_allclose(slope.numpy(), [7 * times] * 3)
        assert count.item() == times


def test_derivatives_of_a_right_rule():
    right = op_custom_gradient(lambda x, y: (x * x * y, lambda u: (2 * u * x * y, u * x * x)))
    check_gradients(right, [Tensor(X), Tensor(X[::-1])], order=2, modes=("reverse",))
    with pytest.raises(
        AssertionError, match=r"order 1: the gradient of x\[2\] through output must be"
    ):
        check_gradients(square, [Tensor([0.0, 0.0, 2.0])], modes=("reverse",))


def test_a_pullback_may_be_asked_again():
    _, pullback = op_vjp(square, Tensor(X))
    for upstream in (1.0, 10.0):
        np.testing.assert_allclose(
            pullback(Tensor([upstream] * 3))[0].numpy(), 7 * upstream * np.array(X)
        )


# --- What tinygrad has not ------------------------------------------------------------------------


def test_forward_mode_is_refused():
    linear = op_custom_gradient(lambda x: (3 * x, lambda u: 7 * u), forward_mode=True)
    with pytest.raises(
        BackendError,
        match=r"^tinygrad: forward mode needs jvp\(fn, inputs, tangents\), got a backend without it",
    ):
        check_gradients(linear, [Tensor(X)], modes=("forward",))


def test_a_function_on_the_host_is_refused_in_a_jit():
    double = op_host(lambda x: 2 * x, outputs=lambda x: x, name="double")
    x = Tensor([1.0, 2.0]).realize()
    assert double(x).tolist() == [2.0, 4.0]
    compiled = TinyJit(lambda x: double(x).realize())
    compiled(x)
    with pytest.raises(
        BackendError, match=r"^double: a function on the host needs the values .* got JitError"
    ):
        compiled(x)


def test_a_dtype_that_does_not_exist():
    with pytest.raises(TypeError, match=r"^tinygrad has no dtype complex64$"):
        op_convert_to_tensor(Tensor(X), "complex64")
