"""Compares TensorCircuit-ng with itself, with the adapter in the place of its gradients of QR.

`python examples/adopted/tensorcircuit/run.py` prints what passes, what fails, and the ratio of
times. Its wheel and sdist hold no tests: these are its `backend.qr` and `backend.rq` of matrices of
each form, by derivatives in reverse mode on its three backends, and circuits of matrix product
states, which call them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorcircuit as tc
from tensorcircuit.backends import jax_ops, pytorch_ops, tf_ops

sys.path.insert(0, str(Path(__file__).parents[1]))
from adapter import install
from comparison import compare, print_lines, print_ratios

BACKENDS = "jax", "pytorch", "tensorflow"
RANDOM = np.random.default_rng(11)
FORMS = {"square": (3, 3), "deep": (5, 3), "wide": (3, 5)}


def matrix(form, dtype):
    rows, columns = FORMS[form]
    real = RANDOM.normal(size=(rows, columns))
    if dtype == "complex128":
        return real + 1j * RANDOM.normal(size=(rows, columns))
    return real


def deficient(dtype):
    """A matrix with a column that depends on another: r has a zero on its diagonal."""
    a = matrix("square", dtype)
    a[:, 2] = 2 * a[:, 0]
    return a


def derivative(backend, kind, array, compiled=False):
    """Return the case of a loss of both factors that has no symmetry."""
    weights = RANDOM.normal(size=(25,))

    def loss(a):
        k = tc.backend
        first, second = getattr(k, kind)(a, pivot_axis=1)
        parts = [
            k.real(k.reshape(x, [-1])) + 2 * k.imag(k.reshape(x, [-1])) for x in (first, second)
        ]
        return sum(
            k.sum(part * k.cast(k.convert_to_tensor(weights[: part.shape[0]]), "float64"))
            for part in parts
        )

    def case():
        with tc.runtime_backend(backend), tc.runtime_dtype("complex128"):
            k = tc.backend
            gradient = k.jit(k.grad(loss)) if compiled else k.grad(loss)
            return [k.numpy(gradient(k.convert_to_tensor(array)))]

    return case


def circuit(backend):
    """Return the case of the energy of a matrix product state, by three parameters."""

    def energy(parameters):
        state = tc.MPSCircuit(4, split={"max_singular_values": 2})
        for at in range(4):
            state.ry(at, theta=parameters[at % 3] + 0.3 * at)
        for at in range(3):
            state.cnot(at, at + 1)
            state.rx(at, theta=2.0 * parameters[at])
        return 3.0 * tc.backend.real(state.expectation((tc.gates.z(), [2])))

    def case():
        with tc.runtime_backend(backend), tc.runtime_dtype("complex128"):
            k = tc.backend
            parameters = k.convert_to_tensor(np.array([0.4, 0.9, 1.3]))
            return [k.numpy(y) for y in k.value_and_grad(energy)(parameters)]

    return case


CASES = {
    f"{backend}, {kind} of {form}, {dtype}": derivative(backend, kind, matrix(form, dtype))
    for backend in BACKENDS for kind in ("qr", "rq") for form in FORMS
    for dtype in ("float64", "complex128")
}  # fmt: skip
CASES |= {
    f"{backend}, qr of dependent columns": derivative(backend, "qr", deficient("float64"))
    for backend in BACKENDS
}
CASES |= {
    f"{backend}, jit": derivative(backend, "qr", matrix("deep", "complex128"), compiled=True)
    for backend in ("jax", "tensorflow")
}
CASES |= {f"{backend}, a matrix product state": circuit(backend) for backend in BACKENDS}


def main():
    own = jax_ops.adaware_qr_jit, pytorch_ops.torchqr.apply, tf_ops.tfqr

    def uninstall():
        jax_ops.adaware_qr_jit, pytorch_ops.torchqr.apply, tf_ops.tfqr = own

    failed = compare(CASES, {}, install, uninstall)
    timed = {
        name: CASES[name] for name in CASES if name.endswith(("qr of deep, complex128", "jit"))
    }
    print_ratios(timed, install, uninstall)
    theirs = [jax_ops.adaware_qr.fun, jax_ops.jaxqr_fwd, jax_ops.jaxqr_bwd, pytorch_ops.torchqr]
    theirs += [pytorch_ops.torchqr_grad, tf_ops.tfqr_grad, tf_ops.tfqr]
    print_lines(theirs, Path(__file__).with_name("adapter.py"))
    return failed


if __name__ == "__main__":
    sys.exit(main())
