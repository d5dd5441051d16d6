"""pmap, shard_map and sharded programs on several devices."""

from pathlib import Path

from jax_ops import printed_on_devices

PROGRAM = Path(__file__).with_name("devices.py")
MODES = ("reverse", "both modes")
CHECKS = (
    "pmap", "shard_map", "forward_shard_map", "hessian_of_shared", "sharded_jit", "explicit_shardings",
    "batches_of_what_is_sharded", "kept_outputs", "constants_in_a_shard_map",
)  # fmt: skip


def test_on_simulated_devices():
    devices = 4  # test_jax_collectives.py has eight
    printed = printed_on_devices(devices, PROGRAM, str(devices))
    assert printed == [f"{devices} {mode} {check}" for mode in MODES for check in CHECKS]
