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
from cgshim import ops
from cgshim._registry import load
from cgshim.ops import _elementwise, _numpy, _tensors
from cgshim.testing.conformance import Framework

REFUSED = {"quantile(n, 0.3, method='lower')", "diff(n, prepend=0.0)", "pad(v, 1, mode='mean')"}


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each function be looked up again, and none be NumPy's own for plain arrays."""
    monkeypatch.setattr(_numpy, "_functions", types.SimpleNamespace())
    monkeypatch.delattr(load("numpy"), "numpy_function_of")
    monkeypatch.setattr(_numpy, "_ways", {})


@pytest.mark.parametrize(
    "name", [name for name in dict.fromkeys(map(name_of, CALLS)) if _numpy.definition(name)]
)
def test_a_definition_has_numpys_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = _numpy.own_function
    monkeypatch.setattr(
        _numpy, "own_function", lambda backend, of: None if of == name else own(backend, of)
    )
    _forget(monkeypatch)
    for call in (call for call in CALLS if name_of(call) == name):
        assert compare.outcome(call, "numpy") == ("refused" if call in REFUSED else "ok"), call


def test_a_definition_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_numpy, "own_function", lambda backend, of: None)
    _forget(monkeypatch)
    monkeypatch.setattr(_elementwise, "special_expit", lambda x: 3 * x)
    monkeypatch.setattr(_elementwise.special_expit, "__module__", _elementwise.__name__)
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


IN_ITS_DTYPE = {
    "zeros": lambda dtype, x: ops.zeros((2,), dtype=dtype),
    "eye": lambda dtype, x: ops.eye(2, dtype=dtype),
    "full": lambda dtype, x: ops.full((2,), 3.0, dtype=dtype),
    "arange": lambda dtype, x: ops.arange(3, dtype=dtype),
    "linspace": lambda dtype, x: ops.linspace(0.0, 1.0, 3, dtype=dtype),
    "astype": lambda dtype, x: ops.astype(x, dtype),
    "asarray": lambda dtype, x: ops.asarray(x, dtype=dtype),
    "sum": lambda dtype, x: ops.sum(x, axis=0, dtype=dtype),
    "zeros_like": lambda dtype, x: ops.zeros_like(x, dtype=dtype),
}
COMPILED = {
    "dot": lambda x: ops.dot(x, x),
    "quantile": lambda x: ops.quantile(x, [0.3, 0.6], axis=0),
    "percentile": lambda x: ops.percentile(x, 30),
    "pad": lambda x: ops.pad(x, ((1, 2), (0, 1)), constant_values=2.0),
    "pad_edge": lambda x: ops.pad(x, 1, mode="edge"),
    "interp": lambda x: ops.interp(x, [0.0, 1.0, 2.0], [0.0, 3.0, 5.0]),
    "convolve": lambda x: ops.convolve(x[0], x[1]),
    "corrcoef": lambda x: ops.corrcoef(x),
    "allclose": lambda x: ops.cast(ops.allclose(x, x + 1e-9), "int32"),
} | {name: lambda x, of=of: of(ops.dtype(x), x) for name, of in IN_ITS_DTYPE.items()}


def compiled(backend: str, fn: Any) -> Any:
    """The function as the framework's compiler runs it, in one piece."""
    if backend == "torch":
        import torch

        torch.compiler.reset()  # cases share code
        return torch.compile(fn, fullgraph=True, backend="eager")
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.function(fn)
    if backend == "jax":
        import jax

        return jax.jit(fn)
    return fn


@pytest.mark.parametrize("name", COMPILED)
def test_a_function_compiles_in_one_piece(backend: str, name: str) -> None:
    framework, fn = Framework(backend), COMPILED[name]
    x = framework.tensor([[0.3, 1.2], [2.5, 0.7]])
    with cgshim.use_backend(backend):
        found, wanted = compiled(backend, fn)(x), fn(x)
    assert ops.dtype(found) == ops.dtype(wanted)
    framework.check_equal(found, ops.convert_to_numpy(wanted))


@pytest.mark.parametrize("fn", [lambda x, y: ops.fmod(3 * x, y), lambda x, y: ops.corrcoef(x)])
def test_derivatives_that_a_framework_lacks(backend: str, fn: Any) -> None:
    framework = Framework(backend)
    x = framework.tensor([[0.3, 1.2, -0.9], [2.5, 0.7, 3.0]])
    cgshim.testing.check_gradients(fn, [x, 1.0 + 0.5 * x * x], order=1, modes=["reverse"])


def test_an_error_of_the_framework_is_unchanged_and_noted(backend: str) -> None:
    framework = Framework(backend)
    x, y = framework.tensor([[1.0, 2.0]]), framework.tensor([[1.0, 2.0, 3.0]])
    for _ in range(2):
        with pytest.raises(Exception) as caught:  # noqa: PT011  # the framework's own
            ops.matmul(x, y)
        assert not isinstance(caught.value, cgshim.CustomGradientError)
        notes = getattr(caught.value, "__notes__", None)
        noted = f"op_matmul: raised by {backend}'s matmul, called with f32[1,2], f32[1,3]"
        assert notes is None or noted in notes


@pytest.mark.parametrize(("key", "do"), [("dim", "write axis"), ("keepdim", "write keepdims")])
def test_pytorchs_keywords_are_named(backend: str, key: str, do: str) -> None:
    with pytest.raises(cgshim.BackendError, match=rf"known to {backend}.*, got {key}; {do}$"):
        ops.max(Framework(backend).tensor([1.0]), **{key: True})
