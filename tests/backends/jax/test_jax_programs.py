"""What JAX makes of an op: the same program as of a custom_vjp that is written by hand, and once."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_ops import by_rule, cube

from cgshim import op_custom_gradient

X = jnp.arange(12.0).reshape(4, 3) / 10
W = jnp.arange(9.0).reshape(3, 3) / 7


@jax.custom_vjp
def by_hand(x, w):
    return jnp.tanh(x @ w)


def _forward(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, 1 - y * y)


def _backward(residuals, upstream):
    x, w, slope = residuals
    t = upstream * slope
    return t @ w.T, x.T @ t


by_hand.defvjp(_forward, _backward)


@op_custom_gradient
def dense(x, w):
    y = jnp.tanh(x @ w)
    slope = 1 - y * y

    def rule(upstream):
        t = upstream * slope
        return t @ w.T, x.T @ t

    return y, rule


PROGRAMS = {
    "forward": lambda f, x, w: f(x, w),
    "gradient": lambda f, x, w: jax.grad(lambda x, w: (f(x, w) ** 2).sum(), (0, 1))(x, w),
    "gradient of one argument": lambda f, x, w: jax.grad(lambda w: (f(x, w) ** 2).sum())(w),
    "vmap of gradient": lambda f, x, w: jax.vmap(
        jax.grad(lambda x, w: (f(x[None], w) ** 2).sum(), 1), (0, None)
    )(x, w),
    "gradient of vmap": lambda f, x, w: jax.grad(
        lambda w: (jax.vmap(lambda x: f(x[None], w))(x) ** 2).sum()
    )(w),
    "gradient of scan": lambda f, x, w: jax.grad(
        lambda w: jax.lax.scan(lambda carry, _: (f(carry, w), None), x, None, 3)[0].sum()
    )(w),
    "gradient of checkpoint": lambda f, x, w: jax.grad(lambda w: jax.checkpoint(f)(x, w).sum())(w),
    "hessian": lambda f, x, w: jax.hessian(lambda x: f(x, w).sum())(x),
}


def operations(program):
    """The operations of the optimised HLO, with their shapes."""
    text = jax.jit(program).lower(X, W).compile().as_text()
    found = re.findall(r"^\s*(?:ROOT )?%\S+ = (.+?) ([\w-]+)\(", text, re.MULTILINE)
    return collections.Counter(found)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_optimised_program_is_that_of_a_custom_vjp(name):
    found = operations(functools.partial(PROGRAMS[name], dense))
    assert found == operations(functools.partial(PROGRAMS[name], by_hand))
    assert {"parameter", "dot"} <= {operation for _, operation in found}


@pytest.mark.parametrize(
    "staging", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.vmap(f, (0, None)))]
)
def test_the_residuals_are_those_of_a_custom_vjp(staging):
    x = X[:, None] if staging not in (jax.jit, jax.checkpoint) else X
    kept = [
        collections.Counter(
            leaf.shape for leaf in jax.tree_util.tree_leaves(jax.vjp(staging(f), x, W)[1])
        )
        for f in (by_hand, dense)
    ]
    assert kept[1] == kept[0]


@dataclasses.dataclass(frozen=True)
class Config:
    factor: float


@pytest.mark.parametrize(
    ("program", "runs"),
    [
        (lambda f: jax.jit(f, static_argnums=1), {"f": 1}),
        (lambda f: jax.jit(jax.grad(f), static_argnums=1), {"f": 1, "rule": 1}),
        (lambda f: jax.jit(jax.grad(jax.grad(f)), static_argnums=1), {"f": 1, "rule": 1}),
        (
            lambda f: jax.jit(jax.grad(jax.jit(f, static_argnums=1)), static_argnums=1),
            {"f": 1, "rule": 1},
        ),
        (lambda f: jax.grad(jax.jit(f, static_argnums=1)), {"f": 1, "rule": 1}),
        (lambda f: jax.grad(f), {"f": 100, "rule": 100}),
    ],
    ids=["jit", "jit of grad", "jit of grad of grad", "jit of grad of jit", "grad of jit", "eager"],
)
@pytest.mark.parametrize("variables", [{}, {"variables": None}], ids=["", "variables"])
def test_a_hundred_calls_trace_once(program, runs, variables):
    counted = collections.Counter()

    @op_custom_gradient
    def scale(x, config):
        counted["f"] += 1

        def rule(upstream, **variables):
            counted["rule"] += 1
            return 7 * upstream * x * config.factor

        return x * x * config.factor, rule

    compiled = program(scale)
    for i in range(100):
        compiled(float(i), Config(3.0))
    assert counted == runs


def test_f_and_its_rule_run_once_in_an_eager_gradient():
    runs = []

    @op_custom_gradient
    def square(x):
        runs.append("f")
        return x * x, lambda upstream: runs.append("rule") or 7 * upstream * x

    assert jax.grad(square)(3.0) == 21
    assert runs == ["f", "rule"]


@pytest.mark.parametrize(
    "policy",
    [
        None,
        "nothing_saveable",
        "everything_saveable",
        "dots_saveable",
        "dots_with_no_batch_dims_saveable",
    ],
)
def test_checkpoint_policies(policy):
    policy = getattr(jax.checkpoint_policies, policy) if policy else None
    x = X.ravel()

    @functools.partial(jax.checkpoint, policy=policy)
    def loss(x):
        return (x * cube(x)).sum()

    np.testing.assert_allclose(jax.grad(loss)(x), by_rule(x))
    np.testing.assert_allclose(
        jax.jit(jax.grad(lambda x: jax.grad(loss)(x).sum()))(x), by_rule(x, 2)
    )


def test_export_with_two_orders():
    x = X.ravel()
    sized = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), x.dtype)
    exported = jax.export.export(jax.jit(lambda x: x * cube(x)))(sized)
    restored = jax.export.deserialize(exported.serialize(vjp_order=2)).call
    first = jax.grad(lambda x: restored(x).sum())
    np.testing.assert_allclose(first(x), by_rule(x))
    np.testing.assert_allclose(jax.grad(lambda x: first(x).sum())(x), by_rule(x, 2))


def test_a_custom_vjp_inside_and_around():
    @jax.custom_vjp
    def inner(x):
        return x * x

    inner.defvjp(lambda x: (inner(x), x), lambda x, upstream: (100 * upstream * x,))
    op = op_custom_gradient(lambda x: (inner(x), lambda upstream: upstream * inner(x)))

    @jax.custom_vjp
    def outer(x):
        return op(x)

    outer.defvjp(lambda x: jax.vjp(op, x), lambda pullback, upstream: pullback(upstream))
    for f in (op, outer, jax.jit(op), jax.jit(outer), lambda x: jax.vmap(outer)(x[None])[0]):
        assert jax.grad(f)(jnp.array(3.0)) == 9
        assert jax.grad(jax.grad(f))(jnp.array(3.0)) == 300


def test_pullbacks_leave_jit_and_vmap():
    x = X.ravel()
    for staged in (jax.jit, jax.vmap):
        pullback = staged(lambda x: jax.vjp(cube, x)[1])(x)
        apply = (
            jax.vmap(lambda pullback, u: pullback(u)[0])
            if staged is jax.vmap
            else lambda p, u: p(u)[0]
        )
        np.testing.assert_allclose(apply(pullback, 10 * x), 150 * x**3)


def test_a_pullback_leaves_an_outer_derivative():
    x = X.ravel()
    of_x, pullback = jax.grad(lambda x: ((x * x).sum(), jax.vjp(cube, x)[1]), has_aux=True)(x)
    np.testing.assert_allclose(of_x, 2 * x)
    np.testing.assert_allclose(pullback(10 * x)[0], 150 * x**3)


def test_donated_buffers():
    step = jax.jit(lambda x: x - jax.grad(lambda x: cube(x).sum())(x), donate_argnums=0)
    x = X.ravel()
    given = x + 0
    np.testing.assert_allclose(step(given), x - 15 * x**2)
    assert given.is_deleted()


class Layer:
    def __init__(self, runs):
        self.runs = runs

    @op_custom_gradient
    def double(self, x):
        self.runs.append(1)
        return 2 * x, lambda upstream: 6 * upstream


def test_a_method_as_a_static_argument_is_traced_once():
    runs = []
    layer = Layer(runs)
    apply = jax.jit(lambda op, x: jax.grad(op)(x), static_argnums=0)
    assert [apply(layer.double, 3.0).item() for _ in range(3)] == [6, 6, 6]
    assert len(runs) == 1
    assert apply(Layer(runs).double, 3.0) == 6
    assert len(runs) == 2
