"""The functions that cgshim.ops defines in terms of others, for a backend that lacks them: here on
NumPy.
"""

from __future__ import annotations

import types
from typing import Any

import compare
import numpy as np
import pytest
from calls import CALLS, name_of

import cgshim
from cgshim._registry import load
from cgshim.ops import _numpy, _special, _tensors
from cgshim.testing.conformance import Framework

REFUSED = {"quantile(n, 0.3, method='lower')", "diff(n, prepend=0.0)", "pad(v, 1, mode='mean')"}


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each function be looked for anew, and none be NumPy's own for plain arrays."""
    monkeypatch.setattr(_numpy, "_functions", types.SimpleNamespace())
    monkeypatch.delattr(load("numpy"), "numpy_function_of")
    monkeypatch.setattr(_numpy, "_ways", {})


@pytest.mark.parametrize(
    "call", [call for call in CALLS if _numpy.definition(name_of(call)) is not None]
)
def test_a_definition_has_numpys_numbers(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, name = _numpy.own_function, name_of(call)
    monkeypatch.setattr(
        _numpy, "own_function", lambda backend, of: None if of == name else own(backend, of)
    )
    _forget(monkeypatch)
    assert compare.outcome(call, "numpy") == ("refused" if call in REFUSED else "ok")


def test_a_definition_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_numpy, "own_function", lambda backend, of: None)
    _forget(monkeypatch)
    monkeypatch.setattr(_special, "special_expit", lambda x: 3 * x)
    monkeypatch.setattr(_special.special_expit, "__module__", _special.__name__)
    assert "for" in compare.outcome("special.expit(a)", "numpy")


def test_an_axis_is_the_first_one_by_default(backend: str) -> None:
    framework = Framework(backend)
    x, values = framework.tensor([[1.0, 2.0], [3.0, 4.0]]), framework.tensor([[10.0, 20.0]])
    index: Any = framework.backend.convert_to_tensor([1], "int32")
    found = _tensors.index_add(x, index, values)
    framework.check_equal(found, np.array([[1.0, 2.0], [13.0, 24.0]]))


@pytest.mark.parametrize("name", ["astype", "asarray", "array"])
def test_what_is_cut_off_has_no_derivative(backend: str, name: str) -> None:
    framework, to = Framework(backend), getattr(cgshim.ops, name)
    cut = lambda x: cgshim.op_cast(to(x, "int32"), "float32") * x
    gradient = cgshim.op_vjp(cut, framework.tensor([1.5, 2.5]))[1](framework.tensor([3.0, 5.0]))[0]
    framework.check_equal(gradient, np.array([3.0, 10.0]))


def test_what_is_a_tensor(backend: str) -> None:
    assert _tensors.is_tensor(Framework(backend).tensor([1.0]))
    assert not _tensors.is_tensor([1.0])
    assert not cgshim.ops.is_tensor(1.0)
