"""NumPy's functions on every backend have NumPy's numbers and derivatives, or raise, as in docs/ops.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import compare
import numpy as np
import pytest
from calls import ARRAYS, CALLS, DERIVATIVES, name_of

import cgshim
from cgshim import ops

NAMES = list(dict.fromkeys(map(name_of, CALLS)))
DOCUMENT = (Path(__file__).parents[2] / "docs" / "ops.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_function_has_numpys_numbers_or_is_refused(backend: str, name: str) -> None:
    calls = [call for call in CALLS if name_of(call) == name]
    if _is_jaxs_own(backend, name):
        calls = calls[:1]  # the first call shows whose it is; the others are jax.numpy's to test
    found = {call: compare.outcome(call, backend) for call in calls}
    assert found == {call: _documented(call, backend) for call in calls}


def _documented(call: str, backend: str) -> str:
    name, listed = name_of(call), compare.documented(DOCUMENT, "On")
    (backends,) = [backends for backends, names in listed.items() if name in names]
    refused = compare.documented(DOCUMENT, "Not on")[backend]
    return "ok" if backend in backends.split(", ") and call not in refused else "refused"


def _is_jaxs_own(backend: str, name: str) -> bool:
    """Return True if the function is one of jax.numpy itself."""
    return backend == "jax" and cgshim._registry.load("jax").numpy_function(name) is not None


def test_the_comparison_can_fail(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "cos", ops.sin, raising=False)
    assert "for" in compare.outcome("cos(n)", backend)


FLOATS = "antvms"
DIFFERENTIATED = {
    name_of(call): call for call in reversed(CALLS) if re.search(rf"\b[{FLOATS}]\b", call)
}
"""for each function its first call with an array of float64"""


@pytest.mark.parametrize("call", [*DIFFERENTIATED.values(), *DERIVATIVES])
def test_a_derivative_is_numpys_or_raises(backend: str, call: str) -> None:
    if _is_jaxs_own(backend, name_of(call)):
        return  # and so is its derivative
    at = next(re.finditer(rf"\b[{FLOATS}z]\b", call))[0]
    wanted = _by_differences(call, at)
    if wanted is None:
        return  # not a function with a derivative
    with compare.wide(backend), cgshim.use_backend(backend):
        tensors = compare.tensors(backend)
        try:
            found = cgshim.op_grad(lambda x: _weighed(compare.run(call, ops, {**tensors, at: x})))(
                tensors[at]
            )
        except Exception:  # noqa: BLE001  # the framework's own words: there is no derivative
            return
        np.testing.assert_allclose(ops.convert_to_numpy(found), wanted, rtol=1e-4, atol=1e-4)


def _weighed(outputs: list[Any]) -> Any:
    """One number, in which each element of each output weighs something else."""
    weights = (ops.convert_to_tensor(_weights(tuple(output.shape))) for output in outputs)
    return sum(ops.sum(weight * output) for weight, output in zip(weights, outputs, strict=True))


def _weights(shape: tuple[int, ...]) -> Any:
    return 0.5 + np.arange(np.prod(shape)).reshape(shape) % 7 / 7.0


def _by_differences(call: str, at: str) -> Any:
    """The derivative of the number by differences, on NumPy itself; None where an output is not of
    floats.
    """

    def number(x: Any) -> Any:
        outputs = [np.asarray(y) for y in compare.run(call, compare.Reference(), {**ARRAYS, at: x})]
        if {y.dtype for y in outputs} != {np.dtype("float64")}:
            raise TypeError
        return sum((_weights(y.shape) * y).sum() for y in outputs)

    x, step = ARRAYS[at], 1e-6
    if at == "s":  # a function of symmetric matrices: the derivative is symmetric by convention
        return None
    try:
        slopes = [
            (number(x + step * d) - number(x - step * d)) / (2 * step)
            for d in np.eye(x.size).reshape(-1, *x.shape)
        ]
    except TypeError:
        return None
    return np.reshape(slopes, x.shape)


def test_parameters_that_a_backend_lacks_are_refused(backend: str) -> None:
    x = compare.tensors(backend)["n"]
    with pytest.raises(
        cgshim.BackendError,
        match=rf"^op_sum: a keyword must be a parameter of NumPy's sum known to {backend}(?: and autograd)?, "
        rf"got nonsense; leave it out, or call {backend}'s own function$",
    ):
        ops.sum(x, nonsense=1)


@pytest.mark.parametrize("name", ["float_power", "index_add"])
def test_the_functions_of_a_backend_are_numpys(backend: str, name: str) -> None:
    """A function of a framework by the name of one of NumPy's is used only if it is listed: see the
    table.
    """
    module = cgshim._registry.load(backend)
    assert module.numpy_function(name) is not None
    assert module.numpy_function("no_such_function") is None


@pytest.mark.parametrize("name", ["unwrap", "nanstd", "nanvar", "ediff1d"])
def test_what_a_framework_lacks_is_refused(backend: str, name: str) -> None:
    """NumPy and JAX have their own."""
    x = compare.tensors(backend)["v"]
    if backend in ("numpy", "jax"):
        assert ops.convert_to_numpy(getattr(ops, name)(x)) == pytest.approx(
            getattr(np, name)(ARRAYS["v"])
        )
        return
    with pytest.raises(cgshim.BackendError) as error:
        getattr(ops, name)(x)
    assert str(error.value) == (
        f"op_{name}: NumPy's {name} must exist in {backend}, got nothing that gives its numbers; "
        f"call {backend}'s own function"
    )
