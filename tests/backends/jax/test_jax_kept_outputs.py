"""An output that the rule keeps is the op's output at every order, and f may be opaque to JAX."""

import functools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_ops import STAGINGS

from cgshim import CustomGradientError, TransformationError, op_custom_gradient

X = jnp.array(0.5)


def by_callback(x):
    return jax.pure_callback(
        np.exp, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"
    )


def by_loop(x):
    return jax.lax.while_loop(
        lambda state: state[1] < 3, lambda state: (state[0] * x, state[1] + 1), (x, 0)
    )[0]


def cut_off(x):
    return jax.lax.stop_gradient(jnp.exp(x))


BODIES = {by_callback: math.exp(0.5), by_loop: 0.5**4, cut_off: math.exp(0.5)}


class Holder:
    def __init__(self, y):
        self.y = y


def in_a_list(y):
    kept = [y]
    return lambda upstream: upstream * 5 * kept[0]


def in_a_dict(y):
    kept = {"y": (y, None)}
    return lambda upstream: upstream * 5 * kept["y"][0]


def in_a_partial(y):
    return functools.partial(lambda y, upstream: upstream * 5 * y, y)


def in_an_inner_function(y):
    def slope():
        return 5 * y

    return lambda upstream: upstream * slope()


KEEPERS = [
    lambda y: lambda upstream: upstream * 5 * y,
    in_a_list,
    in_a_dict,
    in_a_partial,
    in_an_inner_function,
]


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("body", BODIES)
def test_f_may_be_opaque_at_every_order(body, order, staging):
    def f(x):
        y = body(x)
        return y, lambda upstream: upstream * 5 * y

    op = op_custom_gradient(f)
    of_staged, staged = staging(op), op
    for _ in range(order):
        of_staged, staged = jax.grad(of_staged), staging(jax.grad(staged))
    np.testing.assert_allclose([of_staged(X), staged(X)], BODIES[body] * 5**order, rtol=1e-6)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("body", BODIES)
def test_f_may_be_opaque_where_its_rule_is_made_of_the_op(body, order, staging):
    op = op_custom_gradient(lambda x: (body(x), lambda upstream: upstream * 5 * op(x)))
    of_staged, staged = staging(op), op
    for _ in range(order):
        of_staged, staged = jax.grad(of_staged), staging(jax.grad(staged))
    np.testing.assert_allclose([of_staged(X), staged(X)], BODIES[body] * 5**order, rtol=1e-6)


@pytest.mark.parametrize("keeper", KEEPERS)
def test_wherever_the_rule_keeps_it(keeper, staging):
    def f(x):
        y = cut_off(x)
        return y, keeper(y)

    second = jax.grad(jax.grad(staging(op_custom_gradient(f))))
    np.testing.assert_allclose(second(X), 25 * math.exp(0.5), rtol=1e-6)


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize(
    "derivative",
    [jax.hessian, lambda f: jax.jacrev(jax.jacrev(f)), lambda f: jax.grad(jax.grad(f))],
)
def test_one_of_several_outputs(derivative, staging, forward_mode):
    @op_custom_gradient(forward_mode=forward_mode)
    def f(x):
        y, square = cut_off(x), x * x
        return {
            "y": y,
            "square": square,
            "x": x,
            "at": jnp.argmax(x),
        }, lambda u: u["y"] * 5 * y + u["square"] * 7 * x + u["x"] * 3 * square

    for key, expected in {"y": 25 * math.exp(0.5), "square": 7.0, "x": 3 * 7 * 0.5}.items():
        np.testing.assert_allclose(derivative(staging(lambda x: f(x)[key]))(X), expected, rtol=1e-6)  # noqa: B023


def test_three_times_in_forward_mode(staging):
    def f(x):
        y = cut_off(x)
        return y, lambda upstream: upstream * 5 * y

    derivative = staging(op_custom_gradient(f, forward_mode=True))
    for _ in range(3):
        derivative = jax.jacfwd(derivative)
    np.testing.assert_allclose(derivative(X), 125 * math.exp(0.5), rtol=1e-6)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_python_runs_once_below_eager_derivatives(order):
    runs = []

    @op_custom_gradient
    def erf(x):
        runs.append(x)
        y = jnp.asarray(math.erf(float(jax.lax.stop_gradient(x))))
        return y, lambda upstream: upstream * 5 * y

    for op in erf, op_custom_gradient(erf._f, forward_mode=True):
        runs.clear()
        derivative = op
        for _ in range(order):
            derivative = jax.grad(derivative)
        np.testing.assert_allclose(derivative(0.5), math.erf(0.5) * 5**order, rtol=1e-6)
        assert len(runs) == 1


@pytest.mark.parametrize("order", [1, 2, 3])
def test_python_may_read_what_is_differentiated(order):
    """JAX breaks off the first run under several derivatives: then f runs on values."""

    @op_custom_gradient
    def erf(x):
        y = jnp.asarray(math.erf(float(x)))
        return y, lambda upstream: upstream * 5 * y

    derivative = erf
    for _ in range(order):
        derivative = jax.grad(derivative)
    np.testing.assert_allclose(derivative(0.5), math.erf(0.5) * 5**order, rtol=1e-6)


def test_a_rule_reads_an_option_beside_what_python_has_read():
    @op_custom_gradient
    def op(x, *, scale):
        assert float(x) == 0.5
        return x * x * scale, lambda upstream: upstream * 7 * scale * x

    np.testing.assert_allclose(jax.grad(jax.grad(op))(0.5, scale=1.25), 7 * 1.25)


def test_a_residual_beside_a_callback_has_no_derivative():
    """The second derivative of it by hand is an error of JAX, too."""

    @op_custom_gradient
    def f(x):
        y = jax.pure_callback(np.exp, jax.ShapeDtypeStruct((), X.dtype), x)
        i = x * x * x
        return y, lambda upstream: upstream * y * i

    np.testing.assert_allclose(jax.jit(jax.grad(f))(X), math.exp(0.5) * 0.5**3, rtol=1e-6)
    with pytest.raises(TransformationError, match=r"^f: a second order needs every tensor that"):
        jax.jit(jax.grad(jax.grad(f)))(X)


DRAWS = {
    "NumPy": lambda generator: np.random.normal(),
    "Python": lambda generator: random.random(),
    "tiny": lambda generator: 1e-6 * random.random(),
    "a generator that f holds": lambda generator: generator.normal(),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_leave_the_first_order_as_it_is(draw, dtype):
    def gradient(derivative):
        np.random.seed(3)
        random.seed(3)
        generator = np.random.default_rng(3)

        def noisy(x):
            i = x * jnp.asarray(DRAWS[draw](generator), x.dtype)
            return i * x, lambda upstream: upstream * 15 * i

        return derivative(op_custom_gradient(noisy, name="noisy"))(jnp.asarray(2, dtype))

    first = gradient(jax.grad)
    aside = gradient(
        lambda f: jax.grad(lambda x: (x * jax.lax.stop_gradient(jax.grad(f)(x))).astype("float32"))
    )
    assert first == aside
    assert first != 0
    with pytest.raises(TransformationError, match="return the same, got other residuals"):
        gradient(lambda f: jax.grad(jax.grad(f)))


def test_two_arguments_that_are_one_array_are_two():
    w = jnp.array(3.0)

    @op_custom_gradient
    def f(x, y):
        return x * y, lambda upstream: (upstream * 5 * y * w, upstream * 7 * x)

    of_both = jax.grad(lambda y: jax.grad(f)(w, y))
    np.testing.assert_allclose(of_both(w), 15.0)
    np.testing.assert_allclose(jax.grad(jax.grad(lambda x: f(x, w)))(w), 0.0)


def test_second_order_of_a_staged_pullback_raises_or_is_right():
    op = op_custom_gradient(lambda x: _through_a_residual(x), name="op")
    _, pullback = jax.vjp(jax.grad(op), X)
    np.testing.assert_allclose(pullback(jnp.array(10.0))[0], 150.0)
    np.testing.assert_allclose(jax.vmap(pullback)(jnp.array([10.0, 1.0]))[0], [150.0, 15.0])
    try:
        found = jax.jit(lambda p, u: p(u)[0])(pullback, jnp.array(10.0))
    except CustomGradientError as error:
        assert "values that are not known yet" in str(error)  # noqa: PT017
    else:
        np.testing.assert_allclose(found, 150.0)


def _through_a_residual(x):
    i = x * x
    return i * x, lambda upstream: upstream * 15 * i


def test_the_keeping_can_be_seen():
    """Where the rule keeps something else than its output, autodiff's number (or none) would show."""

    def f(x):
        y = cut_off(x)
        return y + 0, lambda upstream: upstream * 5 * y

    assert jax.grad(jax.grad(op_custom_gradient(f)))(X) == 0


@pytest.mark.parametrize("staged", STAGINGS)
def test_a_scan_whose_gradient_is_differentiated_again(staged):
    def f(x):
        y = cut_off(x)
        return y, lambda upstream: upstream * y

    def by_hand(x):
        return jnp.exp(x)

    def loss(op):
        op = STAGINGS[staged](op)
        return lambda x: jax.lax.scan(lambda carry, _: (op(carry * 0.3), None), x, None, 3)[0]

    for derivative in (
        jax.grad,
        lambda f: jax.grad(jax.grad(f)),
        lambda f: jax.jit(jax.grad(jax.grad(jax.grad(f)))),
    ):
        np.testing.assert_allclose(
            derivative(loss(op_custom_gradient(f)))(X), derivative(loss(by_hand))(X), rtol=1e-5
        )
