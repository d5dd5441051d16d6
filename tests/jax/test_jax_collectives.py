"""psum in rules, on eight devices, and the same by jax.custom_vjp."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("collectives.py")
CHECKED = [
    f"{pair} {order}" for pair in ("op_custom_gradient", "custom_vjp") for order in ("first order", "second order")
]


def test_on_eight_simulated_devices():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_ENABLE_X64": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "error", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [*CHECKED, "wrong factors"]
