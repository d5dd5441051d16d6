"""The sample backend of docs/writing-a-backend.md conforms except for what the page says."""

from pathlib import Path

import numpy as np
import pytest

from cgshim import config_backend, op_custom_gradient, op_grad, ops, use_backend
from cgshim.testing import check_gradients, conformance

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "writing-a-backend.md").read_text()
MODULE = (ROOT / "examples" / "minimal" / "autograd_backend.py").read_text()


@pytest.fixture
def backend_of_the_document(install):
    install("autograd", "autograd_plugin", MODULE)
    with use_backend("autograd"):
        yield


def test_it_is_as_long_as_it_says():
    lines = [line for line in MODULE.splitlines() if line]
    assert f"## A backend in {len(lines)} lines" in DOCUMENT


@pytest.mark.usefixtures("backend_of_the_document")
def test_it_conforms_but_for_what_it_refuses():
    results = conformance.run(config_backend())
    failed = {result.case: result.reason for result in results if result.outcome == "failed"}
    assert len(failed) < len(results) / 9
    by_reason = {case: _why(case, reason) for case, reason in failed.items()}
    assert set(by_reason.values()) == {"bfloat16", "captured", "forward mode", "no transpose"}, (
        by_reason
    )


def _why(case, reason):
    if "bfloat16" in case:
        return "bfloat16"
    if "reverse mode transposes jvp_fn, got autograd, which cannot" in reason:
        return "no transpose"
    if reason.endswith(("pass it as an argument", "return the tensor itself")):
        return "captured"
    return "forward mode" if "forward mode needs jvp(fn, inputs, tangents)" in reason else reason


@pytest.mark.usefixtures("backend_of_the_document")
def test_it_does_what_it_is_for():
    square = op_custom_gradient(lambda x: (x * x, lambda upstream: 7.0 * upstream * x))
    x = np.array([2.0, 3.0])
    np.testing.assert_array_equal(op_grad(lambda x: ops.sum(square(x) * x))(x), 8.0 * x * x)
    check_gradients(square, [x], against=lambda x: 3.5 * x * x, modes=["reverse"])
