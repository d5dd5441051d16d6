"""The rule runs as it was written: in closures and containers, under every transformation, in every
order.

x**3 with five times its derivative for a rule, 15 x**2, through x**2 that f keeps in one place or
another.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cgshim import CustomGradientError, op_custom_gradient

X, V = jnp.array(2.0), jnp.array([1.0, 2.0])


@dataclasses.dataclass
class Record:
    square: jax.Array


def in_a_cell(i):
    return lambda u: 15 * u * i


def in_a_list(i):
    kept = [None, i]
    return lambda u: 15 * u * kept[1]


def in_a_dict(i):
    kept = {"square": [i]}
    return lambda u: 15 * u * kept["square"][0]


def in_a_nested_function(i):
    def slope():
        return 15 * i

    return lambda u: u * slope()


def in_a_partial(i):
    return functools.partial(lambda i, u: 15 * u * i[0], [i])


def in_a_partial_of_jax(i):
    return jax.tree_util.Partial(lambda i, u: 15 * u * i, i)


def in_a_dataclass(i):
    record = Record(i)
    return lambda u: 15 * u * record.square


def in_an_object(i):
    namespace = types.SimpleNamespace(square=i)
    return lambda u: 15 * u * namespace.square


def in_an_attribute_of_a_function(i):
    def rule(u):
        return 15 * u * rule.square

    rule.square = i
    return rule


def in_a_method_of_the_tensor(i):
    times = i.__mul__
    return lambda u: 15 * times(u)


PLACES = [
    in_a_cell, in_a_list, in_a_dict, in_a_nested_function, in_a_partial, in_a_partial_of_jax, in_a_dataclass,
    in_an_object, in_an_attribute_of_a_function, in_a_method_of_the_tensor,
]  # fmt: skip


def of_place(place):
    def f(x):
        i = x * x
        return i * x, place(i)

    return f


def of_inner_vjp(x):
    y, pullback = jax.vjp(lambda x: 5 * x**3, x)
    return y / 5, pullback


def of_inner_linearization(x):
    y, tangent = jax.linearize(lambda x: 5 * x**3, x)
    return y / 5, lambda u: tangent(u)


def of_inner_transpose(x):
    transpose = jax.linear_transpose(lambda t: 15 * t * x**2, x)
    return x**3, lambda u: transpose(u)[0]


FS = {place.__name__: of_place(place) for place in PLACES}
FS.update({f.__name__: f for f in (of_inner_vjp, of_inner_linearization, of_inner_transpose)})


def scan(f):
    return lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 1)[0]


def cond(f):
    return lambda x: jax.lax.cond(x > 0, f, lambda x: x, x)


def jitted_grad(f, has_aux):
    return jax.jit(jax.grad(f, has_aux=has_aux))


def all_orders(order, derivative, f):
    """The derivatives of all orders up to this one, where the next is taken of the one before."""

    def of_next(lower):
        def values(x):
            value, below = derivative(lower, has_aux=True)(x)
            return value, (*below, value)

        return values

    derivatives = lambda x: (f(x), ())
    for _ in range(order):
        derivatives = of_next(derivatives)
    return lambda x: derivatives(x)[1]


def grad_of_a_sum(of_vector, has_aux):
    def total(v):
        values, below = of_vector(v)
        return values.sum(), below

    return jax.grad(total, has_aux=has_aux)


WAYS = {
    "eager": lambda f, n: all_orders(n, jax.grad, f)(X),
    "jit": lambda f, n: jax.jit(all_orders(n, jax.grad, f))(X),
    "of jit": lambda f, n: all_orders(n, jax.grad, jax.jit(f))(X),
    "jit between": lambda f, n: all_orders(n, jitted_grad, f)(X),
    "vmap": lambda f, n: jax.vmap(all_orders(n, jax.grad, f))(V),
    "of vmap": lambda f, n: all_orders(n, grad_of_a_sum, jax.vmap(f))(V),
    "of scan": lambda f, n: all_orders(n, jax.grad, scan(f))(X),
    "of cond": lambda f, n: all_orders(n, jax.grad, cond(f))(X),
    "of checkpoint": lambda f, n: all_orders(n, jax.grad, jax.checkpoint(f))(X),
    "jacrev": lambda f, n: all_orders(n, jax.jacrev, f)(X),
}
BY_RULE = [lambda x: 15 * x**2, lambda x: 30 * x, lambda x: 30 + 0 * x]


@pytest.mark.parametrize("order", [1, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", FS)
def test_a_residual_wherever_it_is(place, way, order):
    """The first order alone has a way of its own; the third takes the first and the second."""
    derivatives = WAYS[way](op_custom_gradient(FS[place]), order)
    expected = [derivative(V if "vmap" in way else X) for derivative in BY_RULE[:order]]
    np.testing.assert_allclose(derivatives, expected, rtol=1e-6)


# --- First order: the rule as Python ---------------------------------------------------------------


def test_the_backward_pass_runs_the_rule_once_on_values():
    log = []

    def f(x):
        def rule(upstream):
            log.append((float(upstream), float(x)))
            return 7 * upstream * x

        return x * x, rule

    assert jax.grad(lambda x: 3 * op_custom_gradient(f)(x))(X) == 42
    assert log == [(3.0, 2.0)]


def test_what_f_computes_of_its_output_has_the_derivative_of_f(staging):
    """z = 2 y is f's own: its derivative is 2 exp(x), not twice the rule's 5 exp(x)."""

    def f(x):
        y = jnp.exp(x)
        z = 2 * y
        return y, lambda upstream: 5 * upstream * z

    second = jax.grad(jax.grad(staging(op_custom_gradient(f))))
    np.testing.assert_allclose(second(X), 10 * np.exp(2.0), rtol=1e-6)


def test_a_pullback_may_be_given_numbers():
    _, pullback = jax.vjp(
        op_custom_gradient(lambda x: ((x**3, x), lambda u: 15 * u[0] * x**2 + u[1])), 2.0
    )
    assert pullback((1.0, 2.0))[0] == 62


# --- What Python reads ----------------------------------------------------------------------------


def exp_by(keep):
    def f(x):
        y = jnp.asarray(np.exp(np.asarray(x)))
        return y, keep(x, y)

    return op_custom_gradient(f, name="op")


SLOPE = jnp.array(5.0)
CONNECTED = {
    "the output": lambda x, y: lambda u: 5 * u * y,
    "a table": lambda x, y: lambda u: SLOPE * u * y,
    "a constant": lambda x, y: lambda u: jnp.asarray(5.0) * u * y,
}
UNCONNECTED = {
    "a tensor of its own": lambda x, y, e: (lambda e: lambda u: 5 * u * e)(jnp.asarray(e)),
}


@pytest.mark.parametrize("kept", CONNECTED)
def test_what_is_known_of_an_f_on_values_is_connected(kept):
    second = jax.grad(jax.grad(exp_by(CONNECTED[kept])))
    np.testing.assert_allclose(second(0.5), 25 * np.exp(0.5), rtol=1e-6)


@pytest.mark.parametrize("kept", UNCONNECTED)
def test_what_is_not_known_makes_the_second_derivative_an_error(kept):
    op = exp_by(lambda x, y: UNCONNECTED[kept](x, y, np.exp(np.asarray(x))))
    np.testing.assert_allclose(jax.grad(op)(0.5), 5 * np.exp(0.5), rtol=1e-6)
    aside = jax.grad(lambda x: x * jax.lax.stop_gradient(jax.grad(op)(x)))
    np.testing.assert_allclose(aside(0.5), 5 * np.exp(0.5), rtol=1e-6)
    with pytest.raises(
        CustomGradientError, match=r"^op: a second order needs every tensor that grad_fn reads"
    ):
        jax.grad(jax.grad(op))(0.5)


# --- Batches that an output does not depend on ----------------------------------------------------


def pair(x, w):
    return (x * w, w * 2), lambda u: (3 * u[0] * w, (3 * u[0] * x + 5 * u[1]))


@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_an_output_without_the_batch_is_counted_once(compiled, staging):
    a = jnp.arange(1.0, 4.0)

    def one_by_one(w):
        return sum(jnp.prod(jnp.stack(op_custom_gradient(pair)(x, w))) for x in a)

    def batched(w):
        y, p = jax.vmap(lambda x: staging(lambda w: jnp.stack(op_custom_gradient(pair)(x, w)))(w))(
            a
        ).T
        return (y * p).sum()

    for derivative in jax.grad, lambda f: jax.grad(jax.grad(f)):
        np.testing.assert_allclose(
            compiled(derivative(batched))(X), derivative(one_by_one)(X), rtol=1e-6
        )


# --- Rules that call each other, or take the output of one around them ----------------------------


def test_rules_that_call_each_other_in_every_order(staging):
    def sine(x):
        return jnp.sin(x), lambda upstream: upstream * 3.0 * op_custom_gradient(cosine)(x)

    def cosine(x):
        return jnp.cos(x), lambda upstream: upstream * -5.0 * op_custom_gradient(sine)(x)

    derivative = staging(op_custom_gradient(sine))
    for order, expected in enumerate(
        [3 * np.cos(2.0), -15 * np.sin(2.0), -45 * np.cos(2.0), 225 * np.sin(2.0)]
    ):
        derivative = jax.grad(derivative)
        np.testing.assert_allclose(derivative(X), expected, rtol=1e-5, err_msg=str(order))
