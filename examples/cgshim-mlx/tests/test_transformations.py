"""What only MLX has: its own transformations around an op. The rule says 7 x for x * x, which
autodiff would not.
"""

import mlx.core as mx
import numpy as np
import pytest

from cgshim import (
    BackendError,
    CustomGradientTypeError,
    TransformationError,
    op_custom_gradient,
    op_embed_gradient,
    op_host,
    op_vjp,
)
from cgshim.testing import check_gradients

X = [2.0, -3.0, 5.0]


def square(x):
    residual = 3.5 * x
    return x * x, lambda upstream: upstream * 2 * residual


in_reverse = op_custom_gradient(square)
square = op_custom_gradient(square, forward_mode=True)


def total(x):
    return square(x).sum()


TRANSFORMED = {
    "grad": mx.grad(total),
    "compile of grad": mx.compile(mx.grad(total)),
    "grad of compile": mx.grad(mx.compile(total)),
    "vmap of grad": mx.vmap(mx.grad(square)),
    "grad of vmap": mx.grad(lambda x: mx.vmap(square)(x).sum()),
    "grad of vmap over one of two": mx.grad(
        lambda x: mx.vmap(lambda x, y: square(x) + y, in_axes=(0, None))(x, x).sum() / 3
    ),
    "grad of a checkpoint": mx.grad(mx.checkpoint(total)),
    "jvp": lambda x: mx.jvp(square, [x], [mx.ones_like(x)])[1][0],
    "jvp of grad": lambda x: x * mx.jvp(mx.grad(total), [x], [mx.ones_like(x)])[1][0],
    "embedded": mx.grad(lambda x: op_embed_gradient((x * x).sum(), 7 * x, x)),
    "embedded, compiled": mx.compile(mx.grad(lambda x: op_embed_gradient((x * x).sum(), 7 * x, x))),
}


@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
def test_the_rule_is_never_dropped(transformed):
    extra = len(X) / 3 if transformed is TRANSFORMED["grad of vmap over one of two"] else 0
    np.testing.assert_allclose(transformed(mx.array(X)), 7 * np.array(X) + extra)


def test_rows_that_share_an_argument():
    """The gradient of an argument that vmap does not map is the sum over the rows, each 11 times
    upstream.
    """
    scaled = op_custom_gradient(lambda x, w: (x * w, lambda u: (5 * u * w, 11 * (u * x).sum())))
    rows, upstreams = mx.array([[1.0, 2.0], [3.0, 4.0]]), mx.array([[1.0, 10.0], [100.0, 1000.0]])
    mapped = mx.vmap(scaled, in_axes=(1, None), out_axes=1)
    _, (of_x, of_w) = mx.vjp(mapped, [rows, mx.array(3.0)], [upstreams])
    np.testing.assert_allclose(of_x, 15 * np.array(upstreams))
    np.testing.assert_allclose(of_w, 11 * (np.array(rows) * np.array(upstreams)).sum())


def test_forward_mode_is_refused_without_a_promise():
    with pytest.raises(
        TransformationError,
        match=r"^square: forward mode needs a rule .* got mx.jvp; if it is, say so",
    ):
        mx.jvp(in_reverse, [mx.array(X)], [mx.array(X)])


class Layer:
    def __init__(self):
        self.weight = mx.array(3.0)

    @op_custom_gradient
    def __call__(self, x):
        return x * self.weight, lambda upstream: 7 * upstream


def test_the_weight_of_an_object_is_no_silent_zero():
    layer = Layer()

    def loss(weight):
        layer.weight = weight
        return layer(mx.array(2.0))

    with pytest.raises(
        CustomGradientTypeError,
        match=r"got a captured f32\[\] \(self\.weight\); pass it as an argument$",
    ):
        mx.grad(loss)(mx.array(5.0))
    assert mx.grad(layer)(mx.array(2.0)).item() == 7.0


def test_a_shared_constant_may_be_captured_under_vmap():
    weight = mx.array(3.0)
    scaled = op_custom_gradient(lambda x: (x * weight, lambda upstream: 7 * upstream * weight))
    np.testing.assert_allclose(mx.grad(lambda x: mx.vmap(scaled)(x).sum())(mx.array(X)), [21.0] * 3)


def test_derivatives_of_a_right_rule():
    right = op_custom_gradient(
        lambda x, y: (x * x * y, lambda u: (2 * u * x * y, u * x * x)), forward_mode=True
    )
    check_gradients(right, [mx.array(X), mx.array(X[::-1])], order=3)
    with pytest.raises(
        AssertionError, match=r"order 1: the gradient of x\[2\] through output must be"
    ):
        check_gradients(square, [mx.array([0.0, 0.0, 2.0])])


def test_a_pullback_may_be_asked_again():
    _, pullback = op_vjp(square, mx.array(X))
    for upstream in (1.0, 10.0):
        np.testing.assert_allclose(
            pullback(mx.array([upstream] * 3))[0], 7 * upstream * np.array(X)
        )


# --- Second orders --------------------------------------------------------------------------------


def keeping_its_output(runs):
    def f(x):
        runs.append(x)
        y = mx.stop_gradient(mx.exp(x))
        return y, lambda upstream: upstream * 5 * y

    return op_custom_gradient(f, forward_mode=True)


def keeping_an_intermediate(runs):
    def f(x):
        runs.append(x)
        i = mx.exp(x)
        return 5 * i * x, lambda upstream: upstream * 5 * i

    return op_custom_gradient(f, forward_mode=True)


ONE = mx.array(1.0)
SECOND = {
    "grad of grad": lambda op: mx.vmap(mx.grad(mx.grad(op))),
    "compiled": lambda op: mx.compile(mx.vmap(mx.grad(mx.grad(op)))),
    "grad of a compiled grad": lambda op: (
        lambda xs: mx.stack([mx.grad(mx.compile(mx.grad(op)))(x) for x in xs])
    ),
    "grad of vmap of grad": lambda op: mx.grad(lambda x: mx.vmap(mx.grad(op))(x).sum()),
    "grad of grad of vmap": lambda op: mx.grad(
        lambda x: mx.grad(lambda x: mx.vmap(op)(x).sum())(x).sum()
    ),
    "vmap of vmap": lambda op: lambda x: mx.vmap(mx.vmap(mx.grad(mx.grad(op))))(x[None])[0],
    "jvp of grad": lambda op: (
        lambda xs: mx.stack([mx.jvp(mx.grad(op), [x], [ONE])[1][0] for x in xs])
    ),
    "jvp of jvp": lambda op: (
        lambda xs: mx.stack(
            [mx.jvp(lambda x: mx.jvp(op, [x], [ONE])[1][0], [x], [ONE])[1][0] for x in xs]
        )
    ),
}


@pytest.mark.parametrize("transformed", SECOND.values(), ids=SECOND)
@pytest.mark.parametrize(("op", "factor"), [(keeping_its_output, 25), (keeping_an_intermediate, 5)])
def test_second_order(transformed, op, factor):
    x = mx.array([0.5, -1.0])
    runs = []
    np.testing.assert_allclose(transformed(op(runs))(x), factor * np.exp(np.array(x)), rtol=1e-5)
    assert len(runs) <= len(x)


def test_a_first_derivative_calls_the_very_rule_that_f_returned():
    class Slope:
        def __init__(self, x):
            self.stack = [5 * x]

        def __call__(self, upstream):
            return upstream * self.stack.pop()

    returned = []

    @op_custom_gradient
    def op(x):
        returned.append(Slope(x))
        return x * x, returned[-1]

    assert mx.grad(op)(mx.array(3.0)).item() == 15.0
    assert [slope.stack for slope in returned] == [[]]


def test_a_random_residual_is_that_of_the_one_run():
    @op_custom_gradient
    def noisy(x):
        i = x * x * mx.random.normal()
        return i * 1, lambda upstream: upstream * 5 * i

    x = mx.array(3.0)
    mx.random.seed(0)
    first = mx.grad(noisy)(x).item()
    mx.random.seed(0)
    np.testing.assert_allclose(mx.grad(mx.grad(noisy))(x).item(), first * 2 / 3, rtol=1e-6)


def residual_of_numpy(x):
    i = mx.array(np.exp(np.array(x)))
    return i * 1, lambda upstream: upstream * 5 * i


def output_of_numpy(x):
    y = np.exp(np.array(x))
    return y, lambda upstream: upstream * mx.array(5 * y)


@pytest.mark.parametrize("f", [residual_of_numpy, output_of_numpy])
def test_what_f_made_of_numbers_has_no_second_order(f):
    op, x = op_custom_gradient(f), mx.array(0.5)
    np.testing.assert_allclose(mx.grad(op)(x).item(), 5 * np.exp(0.5), rtol=1e-6)
    with pytest.raises(
        TransformationError,
        match="a second order needs every tensor that grad_fn reads as a function",
    ):
        mx.grad(mx.grad(op))(x)


def test_what_another_call_has_left_has_no_second_order():
    """mx.grad has long left the call that wrote it: its derivative would be zero."""
    kept = {}

    @op_custom_gradient
    def op(x):
        kept["i"] = mx.exp(x)
        return 5 * x, lambda upstream: upstream * kept["i"]

    def both(x):
        y = op(x)
        mx.grad(op)(x)
        return y

    x = mx.array(0.5)
    np.testing.assert_allclose(mx.grad(both)(x).item(), np.exp(0.5), rtol=1e-6)
    with pytest.raises(
        TransformationError, match="that was made of what is differentiated elsewhere"
    ):
        mx.grad(mx.grad(both))(x)


def test_a_changed_argument():
    """MLX changes an array in place for whoever holds it; the rule gets what f has left of it."""

    @op_custom_gradient
    def doubled(x):
        x *= 2.0
        return x * 1.0, lambda upstream: upstream * 5 * x

    x = mx.array(3.0)
    assert mx.grad(doubled)(x).item() == 30.0
    assert mx.grad(mx.grad(doubled))(x).item() == 10.0
    assert x.item() == 3.0


WEIGHT = {"w": mx.array(3.0)}


def test_a_differentiated_global_is_no_silent_zero():
    op = op_custom_gradient(lambda x: (x * WEIGHT["w"], lambda upstream: 7 * upstream), name="op")

    def loss(w):
        WEIGHT["w"] = w
        return op(mx.array(2.0))

    with pytest.raises(
        CustomGradientTypeError,
        match=r"^op: f must be given every tensor .* pass it as an argument$",
    ):
        mx.grad(loss)(mx.array(5.0))


def test_an_object_may_hold_weights_that_f_does_not_read():
    class Layer:
        @op_custom_gradient
        def act(self, x):
            return x * x, lambda upstream: 7 * upstream * x

    layer = Layer()

    def loss(weight):
        layer.weight = weight
        return layer.act(weight * 2)

    assert mx.grad(loss)(mx.array(3.0)).item() == 84.0


def test_nobody_evaluates_what_an_outer_derivative_is_made_of():
    """mx.eval cuts an array off from outer derivatives: they would be zero, silently."""
    op = keeping_an_intermediate([])
    penalty = mx.grad(lambda x: mx.grad(op)(x) ** 2 + op(mx.grad(op)(x)))
    slope = 5 * np.exp(0.5)
    np.testing.assert_allclose(
        penalty(mx.array(0.5)).item(), 2 * slope**2 + 5 * np.exp(slope) * slope, rtol=1e-4
    )


def test_an_op_in_a_rule_captures_constants_under_vmap():
    """Its gradient is defined with respect to its arguments only; w is differentiated outside."""

    @op_custom_gradient
    def fn(x, w):
        inner = lambda: op_custom_gradient(
            lambda y: (3 * y * y * w, lambda upstream: 7 * upstream), name="inner"
        )
        return x * x * x * w, lambda upstream: (upstream * inner()(x), None)

    def slopes(x, w):
        return mx.vmap(mx.grad(fn))(x, w).sum()

    x, w = mx.array([2.0, 3.0]), mx.array([5.0, 7.0])
    np.testing.assert_array_equal(mx.grad(slopes, 1)(x, w), [0.0, 0.0])
    np.testing.assert_allclose(
        mx.vmap(mx.grad(fn))(x, w), 3 * np.array([4.0, 9.0]) * np.array([5.0, 7.0])
    )


def test_a_function_on_the_host_is_refused_in_compiled_code():
    """Without a way of its own to the host, a backend has none where there are no values."""
    double = op_host(lambda x: 2 * x, outputs=lambda x: x, name="double")
    x = mx.array([1.0, 2.0])
    assert double(x).tolist() == [2.0, 4.0]
    with pytest.raises(
        BackendError, match=r"^double: a function on the host needs the values of its arguments"
    ):
        mx.compile(double)(x)
