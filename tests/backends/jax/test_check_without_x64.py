"""check_gradients where JAX has no float64: its switch is thrown for the checks alone."""

import jax.numpy as jnp
import pytest
from jax_ops import enable_x64

from cgshim import op_custom_gradient
from cgshim.testing import check_gradients


@pytest.mark.parametrize("factor", [2.0, 2.00002])
def test_float32_is_checked_in_float64(factor):
    """A relative error of 1e-5 is found, which differences in float32 would not show."""
    square = op_custom_gradient(lambda x: (x * x, lambda u: factor * u * x))
    tight = {"rtol": 1e-7, "atol": 1e-7, "modes": ["reverse"], "order": 1}
    with enable_x64(False):
        x = jnp.array([0.5, -2.0, 3.0])
        if factor == 2.0:
            check_gradients(square, [x], **tight)
        else:
            with pytest.raises(AssertionError, match="is expected"):
                check_gradients(square, [x], **tight)
        assert jnp.ones(1).dtype == jnp.float32
