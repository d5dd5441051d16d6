"""op_custom_jvp beside jax.custom_jvp: every transformation, what is traced, and what is refused.

Slopes are wrong on purpose: a number that autodiff found by itself does not pass.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cgshim import TransformationError, op_custom_gradient, op_custom_jvp

X, Y, V = 0.7, 1.3, 0.4
XS, YS = jnp.linspace(0.1, 0.9, 4), jnp.linspace(1.0, 2.0, 4)


@op_custom_jvp
def op(x, y):
    """Its rule reads the output, a residual, the arguments, and an argument alone."""
    residual = jnp.sin(x) * y
    z = jnp.exp(x) + residual

    def jvp(dx, dy):
        return 3.0 * z * dx + residual * x * dy + jnp.cos(y) * jnp.sum(dx)

    return z, jvp


@jax.custom_jvp
def by_hand(x, y):
    return jnp.exp(x) + jnp.sin(x) * y


@by_hand.defjvp
def _(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    z = by_hand(x, y)
    return z, 3.0 * z * dx + jnp.sin(x) * y * x * dy + jnp.cos(y) * jnp.sum(dx)


def loss(f):
    return lambda x, y: 3.0 * f(x, y) ** 2


def looped(f):
    """Unrolled by hand: in a scan JAX forgets a custom_jvp whose gradient is differentiated."""

    def body(carry, y):
        return f(0.3 * carry, y), carry

    def unrolled(x):
        for y in YS:
            x, _ = body(x, y)
        return x

    return unrolled if f is by_hand else lambda x: jax.lax.scan(body, x, YS)[0]


def along(f, x, y):
    return jax.jvp(f, (x, y), (V, 2 * V))


WAYS = {
    "jvp": lambda f, x, y: along(loss(f), x, y),
    "jit of jvp": lambda f, x, y: jax.jit(lambda *at: along(loss(f), *at))(x, y),
    "jvp of jit": lambda f, x, y: along(jax.jit(loss(f)), x, y),
    "grad": lambda f, x, y: jax.grad(loss(f), (0, 1))(x, y),
    "jit of grad": lambda f, x, y: jax.jit(jax.grad(loss(f), (0, 1)))(x, y),
    "grad of jit": lambda f, x, y: jax.grad(jax.jit(loss(f)), (0, 1))(x, y),
    "checkpoint": lambda f, x, y: jax.hessian(jax.checkpoint(loss(f)), (0, 1))(x, y),
    "linearize": lambda f, x, y: jax.linearize(loss(f), x, y)[1](V, 3 * V),
    "transpose of linearize": lambda f, x, y: jax.linear_transpose(
        jax.linearize(loss(f), x, y)[1], x, y
    )(V),
    "forward over reverse": lambda f, x, y: jax.hessian(loss(f), (0, 1))(x, y),
    "jit of hessian": lambda f, x, y: jax.jit(jax.hessian(loss(f), (0, 1)))(x, y),
    "reverse over reverse": lambda f, x, y: jax.jacrev(jax.grad(loss(f), (0, 1)), (0, 1))(x, y),
    "forward over forward": lambda f, x, y: jax.jacfwd(jax.jacfwd(loss(f), (0, 1)), (0, 1))(x, y),
    "reverse over forward": lambda f, x, y: jax.jacrev(jax.jacfwd(loss(f), (0, 1)), (0, 1))(x, y),
    "third order": lambda f, x, y: jax.jit(jax.grad(jax.grad(jax.grad(loss(f)))))(x, y),
    "vmap of grad": lambda f, x, y: jax.vmap(jax.grad(loss(f), (0, 1)), (0, None))(XS, y),
    "grad of vmap": lambda f, x, y: jax.grad(
        lambda x, y: jax.vmap(loss(f), (None, 0))(x, y).sum(), (0, 1)
    )(x, YS),
    "vmap of jvp": lambda f, x, y: jax.vmap(lambda v: jax.jvp(loss(f), (x, y), (v, v)))(XS),
    "jvp of vmap": lambda f, x, y: jax.jvp(jax.vmap(loss(f)), (XS, YS), (YS, XS)),
    "hessian of vmap": lambda f, x, y: jax.hessian(lambda x: jax.vmap(loss(f))(x, YS).sum())(XS),
    "pullback called twice": lambda f, x, y: [*map(jax.vjp(f, XS, y)[1], (XS, YS))],
    "gradient by tangents": lambda f, x, y: jax.grad(lambda v: jax.jvp(f, (x, y), (v, v))[1])(V),
    "second order of a scan": lambda f, x, y: jax.jit(jax.hessian(looped(f)))(x),
    "reverse twice over a scan": lambda f, x, y: jax.grad(jax.grad(looped(f)))(x),
}


@pytest.mark.parametrize("way", WAYS)
def test_as_by_hand(way):
    x, y = jnp.asarray(X), jnp.asarray(Y)
    expected, found = (jax.tree.leaves(WAYS[way](f, x, y)) for f in (by_hand, op))
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5)


def test_a_jvp_calls_jvp_fn_on_values():
    """As jax.custom_jvp does: nothing is traced."""
    seen = []

    @op_custom_jvp
    def halved(x):
        def jvp(dx):
            seen.append(dx)
            return 7.0 * dx if x > 0 else 5.0 * dx  # x has a value

        return x / 2, jvp

    x, v = jnp.asarray(2.0), jnp.asarray(3.0)
    assert jax.jvp(halved, (x,), (v,))[1] == 21.0
    assert [*map(float, seen)] == [3.0]
    assert jax.jacfwd(halved)(-x) == 5.0


CROOKED = {
    "grad": lambda f, x: jax.grad(f)(x),
    "jit of grad": lambda f, x: jax.jit(jax.grad(f))(x),
    "hessian": lambda f, x: jax.hessian(f)(x),
    "linearize": lambda f, x: jax.linearize(f, x),
    "scan": lambda f, x: jax.grad(lambda x: jax.lax.scan(lambda c, _: (f(c), c), x, XS)[0])(x),
    "grad of vmap": lambda f, x: jax.grad(lambda x: jax.vmap(f)(x).sum())(XS),
    "checkpoint": lambda f, x: jax.grad(jax.checkpoint(f))(x),
}


@pytest.mark.parametrize("way", CROOKED)
def test_what_is_not_linear_is_refused(way):
    op = op_custom_jvp(lambda x: (x * x, lambda dx: jnp.abs(dx) * x), name="crooked")
    with pytest.raises(TransformationError) as refusal:
        CROOKED[way](op, jnp.asarray(X))
    assert str(refusal.value) == (
        "crooked: jvp_fn must be linear in the tangents, got abs of upstream; "
        "write it in linear operations"
    )


@op_custom_jvp
def powers(x, y):
    """Its jvp_fn has a scan that carries a value beside its tangent, as its own f would be derived."""

    def step(carry, _):
        value, tangent, dx, dy = carry
        return (value * x + y, tangent * x + 3.0 * value * dx + 2.0 * dy, dx, dy), None

    def jvp(dx, dy):
        return jax.lax.scan(step, (x, dx, dx, dy), None, length=3)[0][1]

    return ((x * x + y) * x + y) * x + y, jvp


def tangent_by_hand(x, y, dx, dy):
    value, tangent = x, dx
    for _ in range(3):
        value, tangent = value * x + y, tangent * x + 3.0 * value * dx + 2.0 * dy
    return tangent


@pytest.mark.parametrize("transformed", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_loop_that_carries_values_beside_tangents_is_transposed(transformed):
    x, y = jnp.asarray(X), jnp.asarray(Y)
    gradients = [tangent_by_hand(X, Y, 1.0, 0.0), tangent_by_hand(X, Y, 0.0, 1.0)]
    found = transformed(jax.grad(lambda x, y: 5.0 * powers(x, y), (0, 1)))(x, y)
    np.testing.assert_allclose(found, [5.0 * each for each in gradients], rtol=1e-6)
    slopes = jax.jacfwd(lambda x, y: tangent_by_hand(x, y, 1.0, 0.0), (0, 1))(x, y)
    second = transformed(jax.jacrev(jax.grad(powers), (0, 1)))(x, y)
    np.testing.assert_allclose(second, slopes, rtol=1e-6)
    mapped = jax.vmap(jax.grad(powers), (0, None))(XS, y)
    np.testing.assert_allclose(mapped, tangent_by_hand(XS, Y, 1.0, 0.0), rtol=1e-6)


@pytest.mark.parametrize(
    "transformed", [lambda f: f, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"]
)
def test_what_a_rule_computes_once_and_keeps_is_not_read_by_the_other(transformed):
    def f(x):
        slope = functools.cache(lambda: 3.0 * x * x)
        return x**3, lambda u: slope() * u, lambda dx: slope() * dx

    op = op_custom_gradient(f, name="shares")
    x = XS if transformed is jax.vmap else jnp.asarray(X)
    np.testing.assert_allclose(transformed(jax.grad(op))(x), 3 * x * x, rtol=1e-6)
    np.testing.assert_allclose(transformed(jax.grad(jax.grad(op)))(x), 6 * x, rtol=1e-6)
    with pytest.raises(TransformationError) as refusal:
        transformed(jax.jacfwd(op))(x)
    assert str(refusal.value) == (
        f"shares: grad_fn and jvp_fn must not share what one of them computes, got "
        f"f{8 * x.dtype.itemsize}[] that another run of them has made, and kept; compute it in f"
    )


def test_what_a_rule_computes_once_is_right_where_it_is_traced_for_each_choice_of_arguments():
    def f(x, y):
        product = functools.cache(lambda: x * y)

        def grad(upstream, needs_input_grad):
            return 3.0 * product() * upstream * y, 5.0 * product() * upstream * x

        return x * y, grad

    op = op_custom_gradient(f)
    assert jax.jit(jax.grad(op))(2.0, 3.0) == 3 * 6 * 3
    assert jax.jit(jax.grad(op, 1))(2.0, 3.0) == 5 * 6 * 2
    assert jax.jit(jax.grad(jax.grad(op, 1)))(2.0, 3.0) == 2 * 5 * 2 * 3


# --- An op on a tangent ---------------------------------------------------------------------------


def powered(a, b):
    """a**3 * b by a loop that JAX does not look into."""
    return jax.lax.while_loop(lambda at: at[0] < 3, lambda at: (at[0] + 1, at[1] * a), (0, b))


def host_product(a, b):
    shape = jax.ShapeDtypeStruct(jnp.shape(b), b.dtype)
    return jax.pure_callback(np.multiply, shape, a, b, vmap_method="broadcast_all")


@op_custom_gradient
def scaled(a, b):
    return a * b, lambda u: (u * b, 7.0 * u * a)


@op_custom_gradient
def opaque(a, b):
    """The number of its steps, which nobody uses, is no float."""
    steps, y = powered(a, b)
    return (y, steps), lambda u: (u[0] * y, 7.0 * u[0] * a**3)


@op_custom_gradient
def on_the_host(a, b):
    return host_product(a, b), lambda u: (u * b, 7.0 * u * a)


@op_custom_gradient
def that_asks(a, b):
    def grad(u, needs_input_grad):
        of_a, of_b = needs_input_grad
        return u * b if of_a else None, 7.0 * u * a if of_b else None

    return a * b, grad


@op_custom_gradient
def checked(a, b):
    """As a solver does that raises an error if what it has found is not finite."""
    y = a * b
    status = jnp.where(jnp.isfinite(y).all(), 0, 1)
    y = jax.lax.cond(status == 0, lambda y: y, lambda y: host_product(status, y), y)
    return (y, status), lambda u: (u[0] * b, 7.0 * u[0] * a)


@op_custom_jvp
def by_jvp_fn(a, b):
    """As jax.custom_jvp, it has the transpose of f there, so that both modes agree."""
    return a * b, lambda da, db: 9.0 * (da * b + a * db)


ON_A_TANGENT = {
    "a product": (scaled, 1, 7.0),
    "a while loop": (lambda a, b: opaque(a, b)[0], 3, 7.0),
    "a callback": (on_the_host, 1, 7.0),
    "a check": (lambda a, b: checked(a, b)[0], 1, 7.0),
    "a rule that asks": (that_asks, 1, 7.0),
    "jvp_fn alone": (by_jvp_fn, 1, 1.0),
    "twice": (lambda a, b: scaled(a, scaled(a, b)), 2, 49.0),
    "jit": (jax.jit(scaled), 1, 7.0),
    "a scan": (
        lambda a, b: jax.lax.scan(lambda c, _: (scaled(a, c), None), b, None, 3)[0],
        3,
        343.0,
    ),
    "vmap": (lambda a, b: jax.vmap(scaled, (None, 0))(a, b * XS).sum(), 1, 7.0 * XS.sum()),
}
"""an op of x and of a tangent, its power of x, and by what its gradient differs from its value"""


@pytest.mark.parametrize("kind", ON_A_TANGENT)
def test_an_op_on_a_tangent_has_its_rule_for_a_transpose(kind):
    inner, power, factor = ON_A_TANGENT[kind]
    square = op_custom_jvp(lambda x: (x * x, lambda dx: inner(x, dx)))
    slope = lambda x: 5.0 * factor * x**power
    x = jnp.asarray(X)
    for derivative, wanted in (jax.grad, slope), (lambda f: jax.grad(jax.grad(f)), jax.grad(slope)):
        found = derivative(lambda x: 5.0 * square(x))
        np.testing.assert_allclose(found(x), wanted(x), rtol=1e-5)
        np.testing.assert_allclose(jax.jit(found)(x), wanted(x), rtol=1e-5)
        np.testing.assert_allclose(jax.vmap(found)(XS), jax.vmap(wanted)(XS), rtol=1e-5)
    (found,) = jax.linear_transpose(lambda dx: inner(x, dx), x)(jnp.asarray(5.0))
    np.testing.assert_allclose(found, slope(x), rtol=1e-5)


def test_an_op_that_calls_itself_on_a_tangent():
    """As a linear solver does: 40 steps of Jacobi's, in a loop that JAX cannot transpose."""

    def jacobi(a, b):
        step = lambda at: (at[0] + 1, (b - a @ at[1]) / jnp.diag(a) + at[1])
        return jax.lax.while_loop(lambda at: at[0] < 40, step, (0, jnp.zeros_like(b)))[1]

    @op_custom_gradient
    def solve(a, b):
        x = jacobi(a, b)

        def grad(u):
            w = solve(a.T, u)
            return -jnp.outer(w, x), w

        return x, grad, lambda da, db: solve(a, db - da @ x)

    solve_forward = op_custom_jvp(
        lambda a, b: (x := jacobi(a, b), lambda da, db: solve(a, db - da @ x))
    )
    a, b = jnp.array([[4.0, 1.0], [0.5, 3.0]]), jnp.array([1.0, 2.0])
    of = lambda solver: lambda t: (solver(a + t * t, t * b) ** 2).sum()
    ways = [jax.grad, jax.hessian, lambda f: jax.grad(jax.grad(f))]
    ways += [lambda f: jax.jacrev(jax.jacfwd(f)), lambda f: jax.jacfwd(jax.jacfwd(f))]
    for derivative in ways:
        wanted = derivative(of(jnp.linalg.solve))(X)
        for solver in solve, solve_forward:
            np.testing.assert_allclose(jax.jit(derivative(of(solver)))(X), wanted, rtol=1e-4)
    for solver in solve, solve_forward:
        np.testing.assert_allclose(jax.hessian(of(solver))(X), wanted, rtol=1e-4)


NOT_LINEAR = {
    "a rule that reads it": (
        lambda b: (host_product(b, b), lambda u: 2.0 * u * b),
        "crooked, whose gradient depends on the tangent",
    ),
    "a straight-through estimator": (lambda b: (jnp.round(b), lambda u: u), "round of upstream"),
    "a constant part": (lambda b: (b + 1.0, lambda u: u), "one with a constant part"),
    "an effect": (
        lambda b: (jax.debug.print("") or b, lambda u: u),
        "one that does something besides",
    ),
}


@pytest.mark.parametrize("kind", NOT_LINEAR)
def test_an_op_on_a_tangent_that_is_not_linear_in_it_is_refused(kind):
    f, what = NOT_LINEAR[kind]
    inner = op_custom_gradient(f, name="crooked")
    square = op_custom_jvp(lambda x: (x * x, lambda dx: inner(dx) * x))
    x = jnp.asarray(X)
    assert jax.jvp(square, (x,), (x,))[1] == jax.jit(inner)(x) * x
    for derivative in jax.grad, lambda f: jax.jit(jax.grad(f)):
        with pytest.raises(TransformationError):
            derivative(square)(x)
    with pytest.raises(TransformationError) as refusal:
        jax.linear_transpose(inner, x)(x)
    assert str(refusal.value) == (
        f"crooked: an op that is called on a tangent must be linear in it, got {what}; call there "
        "the functions that it is made of, or return (output, grad_fn, jvp_fn)"
    )


@jax.custom_jvp
def triple(x):
    return 3.0 * x


triple.defjvp(lambda primals, tangents: (triple(*primals), 5.0 * tangents[0]))


@pytest.mark.parametrize("inner", [triple, jax.jit(triple)], ids=["itself", "jit"])
def test_a_custom_jvp_on_a_tangent_is_transposed_as_by_hand(inner):
    op = op_custom_jvp(lambda x: (x * x, lambda dx: x * inner(dx)))
    by_hand = jax.custom_jvp(lambda x: x * x)
    by_hand.defjvp(lambda primals, tangents: (primals[0] ** 2, primals[0] * inner(tangents[0])))
    x = jnp.asarray(X)
    second = lambda f: jax.grad(jax.grad(f))
    along = lambda f: lambda x: jax.jvp(lambda v: jax.jvp(f, (x,), (v,))[1], (x,), (x,))
    for derivative in jax.grad, jax.hessian, second, along, jax.jacfwd:
        for compiled in lambda f: f, jax.jit:
            found, wanted = (compiled(derivative(f))(x) for f in (op, by_hand))
            np.testing.assert_allclose(found, wanted, rtol=1e-6)
