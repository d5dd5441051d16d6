"""psum in rules, on eight devices, and the same by jax.custom_vjp."""

from pathlib import Path

from jax_ops import printed_on_devices

PROGRAM = Path(__file__).with_name("collectives.py")
CHECKED = [
    f"{pair} {order}"
    for pair in ("op_custom_gradient", "custom_vjp")
    for order in ("first order", "second order")
]


def test_on_eight_simulated_devices():
    assert printed_on_devices(8, PROGRAM) == [*CHECKED, "wrong factors"]
