"""cgshim.ops on JAX's arrays."""

import jax
import jax.numpy as jnp

from cgshim import ops


def test_a_tensor_that_is_given_by_name_alone():
    assert isinstance(ops.sum(a=jnp.array([1.0, 2.0])), jax.Array)
