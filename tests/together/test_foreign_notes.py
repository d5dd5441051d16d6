"""A function of one framework that is given another's tensor raises its own error, with a note on
what to call.
"""

import sys

import jax.numpy as jnp
import pytest
import torch

from cgshim import op_custom_gradient
from cgshim.testing.conformance import Framework

NOTE = (
    "op: f must call functions of the framework whose tensors it is given, got another framework's function; "
    "call functions of cgshim.ops, such as ops.exp, which take tensors of all"
)


@pytest.mark.parametrize(
    ("name", "exp"), [("jax", torch.exp), ("tensorflow", torch.exp), ("torch", jnp.exp)]
)
def test_another_frameworks_function(name, exp):
    op = op_custom_gradient(lambda x: (exp(x), lambda upstream: upstream), name="op")
    with pytest.raises(TypeError) as caught:
        op(Framework(name).tensor([1.0, 2.0]))
    assert NOTE in (str(caught.value) if sys.version_info < (3, 11) else caught.value.__notes__)
