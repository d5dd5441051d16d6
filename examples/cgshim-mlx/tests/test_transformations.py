"""What only MLX has: its own transformations round an op. The rule says 7 x for x * x, which autodiff would not."""

import mlx.core as mx
import numpy as np
import pytest

from cgshim import CustomGradientTypeError, TransformationError, op_custom_gradient, op_embed_gradient, op_vjp
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
    """The gradient of an argument that vmap does not map is the sum over the rows, each 11 times upstream."""
    scaled = op_custom_gradient(lambda x, w: (x * w, lambda u: (5 * u * w, 11 * (u * x).sum())))
    rows, upstreams = mx.array([[1.0, 2.0], [3.0, 4.0]]), mx.array([[1.0, 10.0], [100.0, 1000.0]])
    mapped = mx.vmap(scaled, in_axes=(1, None), out_axes=1)
    _, (of_x, of_w) = mx.vjp(mapped, [rows, mx.array(3.0)], [upstreams])
    np.testing.assert_allclose(of_x, 15 * np.array(upstreams))
    np.testing.assert_allclose(of_w, 11 * (np.array(rows) * np.array(upstreams)).sum())


def test_forward_mode_is_refused_without_a_promise():
    with pytest.raises(
        TransformationError, match=r"^square: forward mode needs a rule .* got mx.jvp; if it is, say so"
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

    with pytest.raises(CustomGradientTypeError, match=r"got a captured f32\[\]; pass it as an argument$"):
        mx.grad(loss)(mx.array(5.0))
    assert mx.grad(layer)(mx.array(2.0)).item() == 7.0


def test_a_shared_constant_may_be_captured_under_vmap():
    weight = mx.array(3.0)
    scaled = op_custom_gradient(lambda x: (x * weight, lambda upstream: 7 * upstream * weight))
    np.testing.assert_allclose(mx.grad(lambda x: mx.vmap(scaled)(x).sum())(mx.array(X)), [21.0] * 3)


def test_derivatives_of_a_right_rule():
    right = op_custom_gradient(lambda x, y: (x * x * y, lambda u: (2 * u * x * y, u * x * x)), forward_mode=True)
    check_gradients(right, [mx.array(X), mx.array(X[::-1])], order=3)
    with pytest.raises(AssertionError, match=r"order 1: the gradient of x\[2\] through output must be"):
        check_gradients(square, [mx.array([0.0, 0.0, 2.0])])


def test_a_pullback_may_be_asked_again():
    _, pullback = op_vjp(square, mx.array(X))
    for upstream in (1.0, 10.0):
        np.testing.assert_allclose(pullback(mx.array([upstream] * 3))[0], 7 * upstream * np.array(X))
