"""What JAX lets an array, and a tree of arrays, be."""

import dataclasses
import gc
import weakref

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax_ops import STAGINGS, cube, with_nnx_state

from cgshim import op_custom_gradient

X = jnp.array([0.5, -2.0, 3.0])


@pytest.fixture(params=[False, True], ids=["reverse", "both modes"])
def forward_mode(request):
    return request.param


def test_keys_are_handed_through(compiler, forward_mode):
    @op_custom_gradient(forward_mode=forward_mode)
    def dropout(x, key):
        mask = jax.random.bernoulli(key, 0.5, x.shape)
        return (x * mask, jax.random.split(key)), lambda upstream: (7 * upstream[0] * mask, None)

    key = jax.random.key(1)
    gradient = compiler(jax.grad(lambda x, key: dropout(x, key)[0].sum()))(X, key)
    np.testing.assert_array_equal(gradient, 7 * jax.random.bernoulli(key, 0.5, (3,)))
    mapped = jax.vmap(jax.grad(lambda x, key: dropout(x, key)[0].sum()))
    assert compiler(mapped)(X, jax.random.split(key, 3)).shape == (3,)


def test_the_upstream_of_an_integer_is_integer_zeros(compiler, forward_mode):
    seen = []

    @op_custom_gradient(forward_mode=forward_mode)
    def largest(x, k):
        at = jnp.argmax(x) + k

        def rule(of_value, of_place, of_truth):
            seen.append([(u.shape, u.dtype.name) for u in (of_value, of_place, of_truth)])
            return jnp.zeros_like(x).at[at].set(7 * of_value + of_place), jnp.ones_like(k)

        return (x[at], at, x > 0), rule

    loss = jax.value_and_grad(lambda x, k: largest(x, k)[0] * 10 + largest(x, k)[1], allow_int=True)
    value, gradient = compiler(loss)(X, jnp.array(0))
    assert value == 32
    assert gradient.tolist() == [0, 0, 70]
    assert set(map(tuple, seen)) == {(((), "float64"), ((), "int64"), ((3,), "bool"))}


@pytest.mark.parametrize("staging", STAGINGS)
def test_none_is_no_gradient(staging, forward_mode):
    constant = op_custom_gradient(
        lambda x, w: (x * w, lambda upstream: (None, 7 * upstream)), forward_mode=forward_mode
    )
    pair = STAGINGS[staging](lambda v: constant(v, v * 10))
    assert jax.grad(lambda x: pair(x).sum())(X).tolist() == [70, 70, 70]
    assert jax.grad(lambda x: STAGINGS[staging](lambda x: constant(x, X))(x).sum())(X).tolist() == [
        0,
        0,
        0,
    ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Affine:
    scale: jax.Array
    shift: jax.Array | None
    name: str = dataclasses.field(metadata={"static": True}, default="affine")


def test_a_registered_dataclass_is_a_tree(compiler):
    @op_custom_gradient
    def apply(affine, x):
        assert affine.name == "affine"
        y = affine.scale * x if affine.shift is None else affine.scale * x + affine.shift
        return Affine(y, None), lambda up: (
            Affine(7 * (up.scale * x).sum(), up.scale),
            3 * up.scale,
        )

    def loss(affine, x):
        return (apply(affine, x).scale * x).sum()

    of_affine, of_x = compiler(jax.grad(loss, (0, 1)))(Affine(jnp.array(2.0), X), X)
    assert of_affine.scale == 7 * (X * X).sum()
    assert of_affine.shift.tolist() == X.tolist()
    assert of_x.tolist() == (3 * X + 2 * X + X).tolist()


def test_none_is_no_gradient_of_a_branch_in_a_dataclass():
    op = op_custom_gradient(
        lambda affine: (affine.scale * affine.shift[0], lambda up: Affine(7 * up, None))
    )
    found = jax.grad(lambda x: op(Affine(x, [X, {"rest": X}])).sum())(X)
    assert found.tolist() == [7, 7, 7]


def test_an_equinox_module_is_an_argument(compiler):
    @op_custom_gradient
    def apply(mlp, x):
        def rule(upstream):
            zeros = jax.tree_util.tree_map(
                lambda leaf: 0 * leaf if eqx.is_array(leaf) else None, mlp
            )
            return eqx.tree_at(
                lambda m: m.layers[-1].bias, zeros, 7 * upstream
            ), 3 * upstream.sum() * x

        return mlp(x), rule

    mlp = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    gradient = eqx.filter_jit(eqx.filter_grad(lambda m, x: (10 * apply(m, x)).sum()))
    of_mlp = gradient(mlp, X)
    assert of_mlp.layers[-1].bias.tolist() == [70, 70]
    assert not of_mlp.layers[0].weight.any()
    assert compiler(jax.grad(lambda x: apply(mlp, x).sum()))(X).tolist() == (6 * X).tolist()


@with_nnx_state
def test_flax_state_is_an_argument(compiler):
    graph, state = nnx.split(nnx.Linear(3, 2, param_dtype="float64", rngs=nnx.Rngs(0)))

    @op_custom_gradient
    def apply(state, x):
        def rule(upstream):
            return jax.tree_util.tree_map(
                lambda p: 7 * jnp.broadcast_to(upstream, p.shape), state
            ), None

        return nnx.merge(graph, state)(x), rule

    of_state = compiler(jax.grad(lambda state: (10 * apply(state, X)).sum()))(state)
    np.testing.assert_array_equal(of_state["kernel"][...], np.full((3, 2), 70))
    np.testing.assert_array_equal(of_state["bias"][...], np.full(2, 70))
    model = nnx.merge(graph, state)
    of_model = nnx.grad(lambda m: apply(nnx.state(m), X).sum())(model)
    np.testing.assert_array_equal(of_model["kernel"][...], np.full((3, 2), 7))


def test_weak_types_stay_weak(compiler):
    for x, name in ((2.0, "float64"), (np.float32(2), "float32"), (jnp.bfloat16(2), "bfloat16")):
        value, gradient = compiler(jax.value_and_grad(lambda x: cube(x + 0)))(x)
        assert (value.dtype.name, gradient.dtype.name, gradient.item()) == (name, name, 60)
        value, gradient = compiler(jax.value_and_grad(cube))(jnp.asarray(x))
        assert (value.dtype.name, value.weak_type) == (name, isinstance(x, float))
        assert gradient.item() == 60


def weak_by_hand(dtype):
    op = jax.custom_vjp(lambda x: x * x)
    op.defvjp(lambda x: (x * x, x), lambda x, upstream: (7 * upstream * x * dtype(1),))
    return op


def weak_by_rule(dtype, forward_mode=False):
    return op_custom_gradient(
        lambda x: (x * x, lambda u: 7 * u * x * dtype(1)), forward_mode=forward_mode
    )


@pytest.mark.parametrize("dtype", [float, np.float64], ids=["weak rule", "strong rule"])
@pytest.mark.parametrize(
    "x",
    [3.0, jnp.asarray(3.0), jnp.float32(3), jnp.bfloat16(3)],
    ids=["a number", "float64", "float32", "bfloat16"],
)
def test_gradients_are_as_weak_as_those_by_hand(x, dtype, compiler, forward_mode):
    """What a gradient is added to keeps its dtype, as parameters in bfloat16 do beside a scale that
    is a number.
    """

    def types(op):
        scanned = lambda x: jax.lax.scan(lambda c, _: (c + 0 * jax.grad(op)(c), None), x, None, 2)[
            0
        ]
        results = [
            compiler(jax.grad(op))(x),
            jnp.bfloat16(1) + compiler(jax.grad(op))(x),
            compiler(jax.grad(jax.grad(op)))(x),
            compiler(lambda x: jax.vjp(op, x)[0])(x),
            *([compiler(scanned)(x)] if dtype is float else []),
        ]
        return [(y.dtype.name, y.weak_type) for y in map(jnp.asarray, results)]

    # else the rule by hand has a gradient of another dtype
    if dtype is float or jnp.result_type(x) == jnp.float64:
        assert types(weak_by_rule(dtype, forward_mode)) == types(weak_by_hand(dtype))
    tangent = compiler(lambda x: jax.jvp(weak_by_rule(float, True), (x,), (x,))[1])(x)
    auto = compiler(lambda x: jax.jvp(lambda x: x * x, (x,), (x,))[1])(x)
    assert (tangent.dtype, tangent.weak_type) == (auto.dtype, auto.weak_type)


def test_nothing_is_kept_alive_for_nothing():
    @op_custom_gradient
    def halve(x):
        unneeded.append(weakref.ref(x))
        return x / 2, lambda upstream: 7 * upstream

    unneeded = []
    _, pullback = jax.vjp(lambda x: halve(x * 1.0), X)
    gc.collect()
    assert [reference() for reference in unneeded] == [None]
    assert pullback(X)[0].tolist() == (7 * X).tolist()


def test_an_output_may_be_an_input_or_a_constant(compiler, forward_mode):
    same = op_custom_gradient(
        lambda x: ((x, jnp.ones(3)), lambda up: 7 * up[0] + 5 * up[1]), forward_mode=forward_mode
    )
    gradient = compiler(jax.grad(lambda x: (2 * same(x)[0] + 3 * same(x)[1]).sum()))(X)
    assert gradient.tolist() == [29, 29, 29]
    assert compiler(jax.grad(lambda x: jax.grad(lambda x: (x * same(x)[0]).sum())(x).sum()))(
        X
    ).tolist() == [14, 14, 14]


class Scale(nn.Module):
    """A parameter that f makes, or reads where it is made already: Flax refuses a second time in
    one call.
    """

    @nn.compact
    def __call__(self, x):
        def f(x):
            runs.append(1)
            w = self.param("w", lambda key: jnp.array(2.0))

            def rule(upstream, variables=None):
                of_x = 7 * upstream * w
                return (of_x, [11 * (upstream * x).sum()]) if variables else of_x

            return w * x, rule

        return op_custom_gradient(f)(x)


def _scale(self, x):
    runs.append(1)
    w = self.w[...]
    return (
        w * x,
        lambda u, variables=None: (7 * u * w, [11 * (u * x).sum()]) if variables else 7 * u * w,
    )


class ScaleBySetup(nn.Module):
    def setup(self):
        self.w = self.param("w", lambda key: jnp.array(2.0))

    scale = op_custom_gradient(_scale)

    def __call__(self, x):
        return self.scale(x)


class ScaleInNnx(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.array(2.0))

    scale = op_custom_gradient(_scale)


class ScaleInEquinox(eqx.Module):
    w: jax.Array

    scale = op_custom_gradient(_scale)

    def apply(self, parameters, x):
        return eqx.combine(parameters, self).scale(x)


runs = []


def modules():
    for module in Scale(), ScaleBySetup():
        yield module, {"params": {"w": jnp.array(2.0)}}
    yield ScaleInEquinox(None), ScaleInEquinox(jnp.array(2.0))


@pytest.mark.parametrize("staged", ["eager", "jit", "checkpoint", "scan"])
@pytest.mark.parametrize("at", range(3), ids=["linen", "linen, setup", "equinox"])
def test_f_runs_once_in_a_differentiated_module(at, staged, compiler):
    if at == 0 and staged != "eager" and compiler is not jax.jit:
        pytest.skip("f makes a parameter, and JAX traces f again where Flax has left the module")
    module, parameters = list(modules())[at]
    loss = lambda parameters, x: (
        10 * STAGINGS[staged](lambda x: module.apply(parameters, x))(x)
    ).sum()
    runs.clear()
    of_parameters, of_x = compiler(jax.grad(loss, (0, 1)))(parameters, X)
    assert len(runs) == 1
    assert jax.tree_util.tree_leaves(of_parameters) == [110 * X.sum()]
    assert of_x.tolist() == [140, 140, 140]
    np.testing.assert_array_equal(compiler(jax.grad(loss, 1))(parameters, X), [140, 140, 140])


@with_nnx_state
def test_f_runs_once_in_a_module_of_nnx(compiler):
    runs.clear()
    gradient = nnx.jit if compiler is jax.jit else lambda f: f
    of_model, of_x = gradient(nnx.grad(lambda m, x: (10 * m.scale(x)).sum(), argnums=(0, 1)))(
        ScaleInNnx(), X
    )
    assert len(runs) == 1
    assert of_model["w"][...] == 110 * X.sum()
    assert of_x.tolist() == [140, 140, 140]


def test_an_object_may_hold_what_f_does_not_read():
    """Then f may go on branching on values: where it cannot be staged, it runs on them."""

    class Model:
        def __init__(self, w):
            self.w = w

        @op_custom_gradient
        def double(self, x):
            return (2 * x, lambda u: 14 * u) if x > 0 else (x, lambda u: 5 * u)

    assert jax.grad(lambda w: Model(w).double(3.0) * w)(10.0) == 6
    assert jax.grad(lambda w: Model(w).double(w))(10.0) == 14
