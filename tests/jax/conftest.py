"""What the tests of the JAX backend share."""

import jax
import pytest
from jax_ops import STAGINGS


@pytest.fixture(params=STAGINGS)
def staging(request):
    return STAGINGS[request.param]


@pytest.fixture(params=[lambda f: f, jax.jit], ids=["eager", "jit"])
def compiler(request):
    return request.param
