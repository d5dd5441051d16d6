"""Ops where JAX's own machinery is another one: Pallas kernels, jet, messages, shardings that are a
part of types.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cgshim_jax
from cgshim import op_custom_gradient

X = jnp.arange(1.0, 1025.0).reshape(8, 128).astype(jnp.float32)


def scaled(scale):
    return lambda x: (scale * x, lambda upstream: 7 * upstream * scale)


def by_hand(scale):
    op = jax.custom_vjp(lambda x: scale * x)
    op.defvjp(lambda x: (scale * x, None), lambda _, upstream: (7 * upstream * scale,))
    return op


# --- Pallas ---------------------------------------------------------------------------------------


def in_a_loop(op):
    return lambda x: jax.lax.fori_loop(0, 3, lambda _, x: op(x), x)


def gradient(op):
    return jax.grad(lambda x: (3 * op(x)).sum())


@pytest.mark.parametrize(
    "use", [lambda op: op, in_a_loop, gradient], ids=["op", "loop", "gradient"]
)
def test_an_op_in_a_kernel(use):
    pallas = pytest.importorskip("jax.experimental.pallas")

    def of(op):
        def kernel(x, y):
            y[...] = use(op)(x[...])

        like = jax.ShapeDtypeStruct(X.shape, X.dtype)
        return lambda interpret: pallas.pallas_call(kernel, out_shape=like, interpret=interpret)

    mine, other = of(op_custom_gradient(scaled(2.0))), of(by_hand(2.0))
    np.testing.assert_array_equal(mine(True)(X), other(True)(X))
    if hasattr(jax.stages.Traced, "lower"):
        traced = jax.jit(mine(False)).trace(X)
        if use is gradient:
            program = traced.lower(lowering_platforms=("tpu",))
            assert "tpu_custom_call" in program.as_text()
        else:  # Pallas lowers neither custom_jvp with symbolic zeros, nor primitives of others
            with pytest.raises(NotImplementedError):
                traced.lower(lowering_platforms=("tpu",))


# --- Messages -------------------------------------------------------------------------------------


def branching(x):
    return (x if x > 0 else -x), lambda upstream: upstream


def with_branching_rule(x):
    def rule_of_it(upstream):
        return upstream if upstream > 0 else -upstream

    return 2 * x, rule_of_it


def test_what_other_versions_lack_is_told_until_one_has_it(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 5, 3))
    told = cgshim_jax.version_limits()
    assert told[0] == (
        "shard_map refuses an op, in JAX's own words (from JAX 0.6 on it is as documented)"
    )
    monkeypatch.setattr(jax, "__version_info__", (0, 6, 0))
    assert len(cgshim_jax.version_limits()) < len(told)
