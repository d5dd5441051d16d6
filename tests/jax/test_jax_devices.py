"""pmap, shard_map and sharded programs on several devices."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("devices.py")
MODES = ("reverse", "both modes")
CHECKS = (
    "pmap", "shard_map", "forward_shard_map", "hessian_of_shared", "sharded_jit", "explicit_shardings",
    "host_of_explicit_shardings", "kept_outputs",
)  # fmt: skip


def test_on_simulated_devices():
    devices = 4  # test_jax_collectives.py has eight
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags}
    run = subprocess.run(
        [sys.executable, "-W", "error", PROGRAM, str(devices)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [f"{devices} {mode} {check}" for mode in MODES for check in CHECKS]
