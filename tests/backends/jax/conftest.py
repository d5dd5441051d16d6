"""What the tests of the JAX backend share."""

import jax
import pytest
from jax_ops import STAGINGS

# Where this folder alone is named, pytest imports JAX for it before tests/conftest.py can ask for
# float64.
jax.config.update("jax_enable_x64", True)


@pytest.fixture(params=STAGINGS)
def staging(request):
    return STAGINGS[request.param]


@pytest.fixture(params=[lambda f: f, jax.jit], ids=["eager", "jit"])
def compiler(request):
    return request.param
