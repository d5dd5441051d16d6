"""What JAX lets an array, and a tree of arrays, be."""

import dataclasses
import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax_ops import STAGINGS, cube

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
    assert jax.grad(lambda x: STAGINGS[staging](lambda x: constant(x, X))(x).sum())(X).tolist() == [0, 0, 0]


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
        return Affine(y, None), lambda up: (Affine(7 * (up.scale * x).sum(), up.scale), 3 * up.scale)

    def loss(affine, x):
        return (apply(affine, x).scale * x).sum()

    of_affine, of_x = compiler(jax.grad(loss, (0, 1)))(Affine(jnp.array(2.0), X), X)
    assert of_affine.scale == 7 * (X * X).sum()
    assert of_affine.shift.tolist() == X.tolist()
    assert of_x.tolist() == (3 * X + 2 * X + X).tolist()


def test_an_equinox_module_is_an_argument(compiler):
    @op_custom_gradient
    def apply(mlp, x):
        def rule(upstream):
            zeros = jax.tree_util.tree_map(lambda leaf: 0 * leaf if eqx.is_array(leaf) else None, mlp)
            return eqx.tree_at(lambda m: m.layers[-1].bias, zeros, 7 * upstream), 3 * upstream.sum() * x

        return mlp(x), rule

    mlp = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    gradient = eqx.filter_jit(eqx.filter_grad(lambda m, x: (10 * apply(m, x)).sum()))
    of_mlp = gradient(mlp, X)
    assert of_mlp.layers[-1].bias.tolist() == [70, 70]
    assert not of_mlp.layers[0].weight.any()
    assert compiler(jax.grad(lambda x: apply(mlp, x).sum()))(X).tolist() == (6 * X).tolist()


def test_flax_state_is_an_argument(compiler):
    graph, state = nnx.split(nnx.Linear(3, 2, param_dtype="float64", rngs=nnx.Rngs(0)))

    @op_custom_gradient
    def apply(state, x):
        def rule(upstream):
            return jax.tree_util.tree_map(lambda p: 7 * jnp.broadcast_to(upstream, p.shape), state), None

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
    same = op_custom_gradient(lambda x: ((x, jnp.ones(3)), lambda up: 7 * up[0] + 5 * up[1]), forward_mode=forward_mode)
    gradient = compiler(jax.grad(lambda x: (2 * same(x)[0] + 3 * same(x)[1]).sum()))(X)
    assert gradient.tolist() == [29, 29, 29]
    assert compiler(jax.grad(lambda x: jax.grad(lambda x: (x * same(x)[0]).sum())(x).sum()))(X).tolist() == [14, 14, 14]
