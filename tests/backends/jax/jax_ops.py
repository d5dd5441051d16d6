"""The ops that the tests transform. Each rule is wrong on purpose by a factor, so that autodiff's
number would show.
"""

import os
import subprocess
import sys
from importlib.metadata import version

import jax
import jax.experimental
import jax.export
import jax.numpy as jnp
import pytest

from cgshim import op_custom_gradient


def _cube(x):
    """x**3, with the rule 15 x**2 (five times the true one) through a residual."""
    i = x * x
    return i * x, lambda upstream: upstream * 15.0 * i


def _product(x, y):
    """x * y, with the rules 7 y and 11 x; y may be of a smaller shape, as a scale is."""

    def rule(upstream):
        return 7.0 * upstream * y, 11.0 * (upstream * x).sum(range(x.ndim - y.ndim)).reshape(
            y.shape
        )

    return x * y, rule


cube = op_custom_gradient(_cube, name="cube")
product = op_custom_gradient(_product, name="product")
cube_both_modes = op_custom_gradient(_cube, name="cube", forward_mode=True)
product_both_modes = op_custom_gradient(_product, name="product", forward_mode=True)

with_nnx_state = pytest.mark.skipif(
    tuple(map(int, version("flax").split(".")[:2])) < (0, 12), reason="its states held no arrays"
)

CUBES = {"reverse": cube, "both modes": cube_both_modes}
PRODUCTS = {"reverse": product, "both modes": product_both_modes}


def by_rule(x, order=1):
    """The derivatives of x * cube(x), as the rule has them."""
    return {1: 16 * x**3, 2: 60 * x**2, 3: 120 * x, 4: 120 + 0 * x}[order]


# before JAX 0.8
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64

STAGINGS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "scan": lambda f: lambda x: jax.lax.scan(lambda carry, x: (carry, f(x)), None, x[None])[1][0],
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda x: jax.lax.cond(jnp.all(x == x), f, lambda x: -f(x), x),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
}
"""ways to have JAX stage a function"""


def printed_on_devices(count, program, *arguments):
    """The lines that a program prints for which the CPU is so many devices; it has float64, and no
    warnings.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_ENABLE_X64": "1"}
    command = [sys.executable, "-W", "error", program, *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()
