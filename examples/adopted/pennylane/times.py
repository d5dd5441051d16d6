"""What a gradient of circuits costs with the adapter, beside PennyLane's own interfaces.

    python examples/adopted/pennylane/times.py

prints the executions of each, and the ratio of their times: the median over pairs, one after the
other.
"""

import statistics
import sys
import time

import adapter
import jax
import numpy as np
import pennylane as qp
import torch
from pennylane import numpy as pnp

jax.config.update("jax_enable_x64", True)
RUN = sys.modules["pennylane.workflow.run"]
PARTS = "_get_ml_boundary_execute", "_construct_tf_autograph_pipeline"
THEIRS = {name: getattr(RUN, name) for name in PARTS}
DEVICE = qp.device("default.qubit")
PAIRS = 60


def circuit(method):
    """Return the energy of four qubits by eight parameters."""

    @qp.qnode(DEVICE, diff_method=method)
    def energy(x):
        for layer in range(2):
            for wire in range(4):
                qp.RX(x[4 * layer + wire], wire)
            for wire in range(3):
                qp.CNOT((wire, wire + 1))
        return qp.expval(qp.Z(0) @ qp.X(3))

    return energy


def gradients(energy):
    """Return a gradient for each interface, of functions without arguments."""
    values = np.linspace(0.1, 0.8, 8)
    compiled = jax.jit(jax.grad(energy))

    def of_torch():
        x = torch.tensor(values, requires_grad=True)
        energy(x).backward()
        return x.grad.numpy()

    return {
        "autograd": lambda: qp.grad(energy)(pnp.array(values)),
        "torch": of_torch,
        "jax": lambda: jax.grad(energy)(values),
        "jax.jit": lambda: compiled(values),
    }


def with_parts(parts, function):
    """Call a function on these parts of PennyLane; return its result, executions and seconds."""
    for name, part in parts.items():
        setattr(RUN, name, part)
    with DEVICE.tracker:
        start = time.perf_counter()
        result = np.asarray(function())
        seconds = time.perf_counter() - start
    return result, int(DEVICE.tracker.totals.get("executions", 0)), seconds


def main():
    """Print a line for each method and interface."""
    adapter.install()
    ours = {name: getattr(RUN, name) for name in PARTS}
    for method in ("parameter-shift", "adjoint"):
        pairs = gradients(circuit(method)), gradients(circuit(method))
        for interface in pairs[0]:
            theirs_, ours_ = (each[interface] for each in pairs)
            expected, their_count, _ = with_parts(THEIRS, theirs_)
            found, count, _ = with_parts(ours, ours_)
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
            times = [
                with_parts(ours, ours_)[2] / with_parts(THEIRS, theirs_)[2] for _ in range(PAIRS)
            ]
            ratio = statistics.median(times)
            print(
                f"{method:16} {interface:9} executions {their_count} -> {count}, time {ratio:.2f}"
            )


if __name__ == "__main__":
    main()
