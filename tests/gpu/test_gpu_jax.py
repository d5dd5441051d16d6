"""JAX on CUDA: cgshim's rules beside jax.custom_vjp, both wrong on purpose by the same factors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cgshim import Spec, op_convert_to_tensor, op_custom_gradient, op_host, op_sum_to_shape, ops

pytestmark = pytest.mark.gpu

PLATFORM = {"cuda": "gpu", "cpu": "cpu"}
WEIGHTS = np.array([[2.0, -3.0], [0.5, 7.0], [1.5, -1.0]], "float32")
"""the upstream gradients"""


@jax.custom_vjp
def by_hand(x, w):
    """x**3 * w, with the rules 15 x**2 w and 7 x**3: five and seven times the true ones."""
    return x**3 * w


by_hand.defvjp(
    lambda x, w: (by_hand(x, w), (x, w)),
    lambda kept, upstream: (
        upstream * 15.0 * kept[0] ** 2 * kept[1], (upstream * 7.0 * kept[0] ** 3).sum(0),
    ),
)  # fmt: skip


def _scale(x, w):
    return x**3 * w, lambda upstream: (
        upstream * 15.0 * x**2 * w,
        op_sum_to_shape(upstream * 7.0 * x**3, w),
    )


scale = op_custom_gradient(_scale, name="scale")
scale_both_modes = op_custom_gradient(_scale, name="scale", forward_mode=True)


@op_custom_gradient(host_outputs=lambda x, w: Spec(x.shape, x.dtype))
def on_host(x, w):
    """The same in NumPy, in f and in its rule."""
    assert type(x) is type(w) is np.ndarray
    return x**3 * w, lambda upstream: (upstream * 15.0 * x**2 * w, (upstream * 7.0 * x**3).sum(0))


@pytest.fixture
def place(device):
    """The device of the tensors."""
    return jax.devices(PLATFORM[device])[0]


@pytest.fixture
def tensors(place):
    x = np.array([[0.5, -2.0], [3.0, 1.0], [-1.5, 0.25]], "float32")
    return jax.device_put(x, place), jax.device_put(np.array([2.0, -5.0], "float32"), place)


@pytest.fixture(params=[lambda f: f, jax.jit], ids=["eager", "jit"])
def compiler(request):
    return request.param


def loss(op):
    return lambda x, w: (op(jnp.sin(x), w) * WEIGHTS).sum()


def check(found, expected, place):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.devices() == {place}
        np.testing.assert_allclose(a, b, rtol=2e-5)


@pytest.mark.parametrize(
    "op", [scale, scale_both_modes, on_host], ids=["reverse", "both modes", "on the host"]
)
def test_gradients(op, tensors, compiler, place):
    check(compiler(jax.value_and_grad(loss(op), (0, 1)))(*tensors),
          jax.value_and_grad(loss(by_hand), (0, 1))(*tensors), place)  # fmt: skip


@pytest.mark.parametrize("op", [scale, scale_both_modes], ids=["reverse", "both modes"])
def test_second_order(op, tensors, compiler, place):
    check(
        compiler(jax.jacrev(jax.grad(loss(op))))(*tensors),
        jax.jacrev(jax.grad(loss(by_hand)))(*tensors),
        place,
    )


@pytest.mark.parametrize("op", [scale, on_host], ids=["on the device", "on the host"])
def test_batches(op, tensors, compiler, place):
    x, w = tensors
    batch = jnp.stack([x, 2.0 * x])
    check(compiler(jax.vmap(jax.grad(loss(op)), (0, None)))(batch, w),
          jax.vmap(jax.grad(loss(by_hand)), (0, None))(batch, w), place)  # fmt: skip


def test_forward_mode(tensors, compiler, place):
    """The tangent is the transposed rule's: no function by hand has both modes."""
    x, w = tensors
    tangent = compiler(lambda x, w: jax.jvp(scale_both_modes, (x, w), (w * x, 3.0 * w))[1])(x, w)
    check(tangent, 15.0 * x**2 * w * (w * x) + 7.0 * x**3 * 3.0 * w, place)


def test_a_scan(tensors, compiler, place):
    def looped(op):
        step = lambda x, _: (jnp.tanh(op(x, tensors[1])), None)
        return lambda x: (jax.lax.scan(step, x, None, 3)[0] * WEIGHTS).sum()

    check(
        compiler(jax.grad(looped(scale)))(tensors[0]), jax.grad(looped(by_hand))(tensors[0]), place
    )


def test_what_a_rule_makes(tensors, compiler, place):
    @op_custom_gradient
    def shifted(x):
        return x + ops.arange(
            2.0
        ), lambda upstream: upstream * op_convert_to_tensor(np.array([3.0, 11.0], "float32"))

    with jax.default_device(place):
        found = compiler(jax.grad(lambda x: (shifted(x) * WEIGHTS).sum()))(tensors[0])
    check(found, WEIGHTS * np.array([3.0, 11.0], "float32"), place)


def test_a_function_on_the_host(tensors, compiler, place):
    """It is given NumPy's arrays, once per call, and what it returns is on the device."""
    seen = []
    root = op_host(
        lambda x: (seen.append(type(x)), np.cbrt(x))[1], outputs=lambda x: Spec(x.shape, x.dtype)
    )
    check(compiler(root)(tensors[0]), np.cbrt(np.asarray(tensors[0])), place)
    assert seen == [np.ndarray]
