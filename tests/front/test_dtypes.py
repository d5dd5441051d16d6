"""The names of dtypes: NumPy's, whatever a framework calls them, and an error for a dtype without a
name.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from cgshim import BackendError, Spec, op_host, ops
from cgshim._dtypes import dtype_name, is_complex, is_differentiable
from cgshim._registry import load

ml_dtypes = importlib.import_module("ml_dtypes")
FLOATS = ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"]
OTHERS = ["bool", "int4", "int8", "int32", "uint8", "uint64"]


@pytest.mark.parametrize("name", [*FLOATS, "complex64", "complex128", *OTHERS])
def test_names_of_numpy_and_their_extensions(name: str) -> None:
    for dtype in (name, np.dtype(name), np.dtype(name).type):
        assert dtype_name(dtype) == name
        assert is_differentiable(dtype) == (name not in OTHERS)
        assert is_complex(dtype) == name.startswith("complex")


@pytest.mark.parametrize(
    ("written", "name"),
    [("half", "float16"), ("f4", "float32"), ("double", "float64"), (float, "float64"), (complex, "complex128"),
     (int, np.dtype(int).name), ("?", "bool")],
)  # fmt: skip
def test_what_a_user_may_write_is_what_numpy_reads(written: object, name: str) -> None:
    assert (dtype_name(written), is_differentiable(written)) == (
        name,
        not name.startswith(("int", "bool")),
    )


@pytest.mark.parametrize(
    "name", ["string", "resource", "variant", "key<fry>", "void", "qint8", "bits2x4", "str224"]
)
def test_what_is_no_number_has_no_gradient(name: str) -> None:
    assert not is_differentiable(type("Dtype", (), {"name": name})())


class Half:
    """A class that stands for a dtype."""


@pytest.mark.parametrize(
    "unknown", ["half", "double", "FLOAT32", "float", "unsigned char", "int", ""]
)
def test_a_name_that_is_none_of_numpys(unknown: str) -> None:
    """It might be a float: to take it for an integer would be a gradient of zero."""
    dtype = type("Dtype", (), {"name": unknown, "__module__": "tiny.dtypes"})()
    for ask in (dtype_name, is_differentiable, is_complex):
        with pytest.raises(BackendError) as raised:
            ask(dtype)
        assert str(raised.value) == (
            f"cgshim: a dtype of tiny must have a name of NumPy's, such as float32 or bfloat16, got {unknown!r}; "
            "let dtype_name(dtype) in the backend of tiny return it"
        )


@pytest.mark.parametrize("unknown", ["FLOAT32", Half])
def test_a_name_or_a_class_that_is_none_of_numpys(unknown: object) -> None:
    with pytest.raises(BackendError, match="must have a name of NumPy's"):
        is_differentiable(unknown)


def test_a_message_about_a_tensor_never_fails_by_its_dtype() -> None:
    assert repr(Spec((2,), type("Dtype", (), {"name": "FLOAT32"})())) == "FLOAT32[2]"


def test_every_dtype_of_a_framework_has_a_name(backend: str) -> None:
    kind = type(load(backend).convert_to_tensor([1.0]).dtype)
    dtypes = [x for x in vars(importlib.import_module(backend)).values() if isinstance(x, kind)]
    if issubclass(kind, np.dtype):  # as with JAX, too
        extensions = [
            x for x in vars(ml_dtypes).values() if isinstance(x, type) and issubclass(x, np.generic)
        ]
        dtypes = [np.dtype(x) for x in (*np.typecodes["All"], *extensions)]
    assert len(dtypes) > 10
    for dtype in dtypes:
        assert is_differentiable(dtype) == any(
            part in dtype_name(dtype) for part in ("float", "complex")
        ), dtype


def test_the_name_that_a_backend_gives(python, tmp_path: Path) -> None:
    metadata = tmp_path / "tiny_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[cgshim.backends]\ntiny = tiny_plugin\n[cgshim.aliases]\nlittle = tiny\n"
    )
    dtypes = "class DType:\n    def __init__(self, name):\n        self.name = name\nhalf, short = map(DType, 'hs')\n"
    for framework in ("tiny", "little"):
        (tmp_path / f"{framework}.py").write_text(dtypes)
    names = "def dtype_name(dtype):\n    return {'h': 'float16', 's': 'int16'}.get(dtype.name, dtype.name)\n"
    (tmp_path / "tiny_plugin.py").write_text("from cgshim_numpy import *\n" + names)
    program = """
import cgshim, little, tiny
from cgshim._dtypes import is_differentiable
cgshim.set_backend("tiny")
for framework in tiny, little:
    print(cgshim.Spec((2,), framework.half), is_differentiable(framework.half), is_differentiable(framework.short))
try:
    is_differentiable(tiny.DType("long"))
except cgshim.BackendError as error:
    print(error)
"""
    result = python("-c", program, path=(tmp_path,))
    assert result.stdout == "f16[2] True False\n" * 2 + (
        "cgshim: a dtype of tiny must have a name of NumPy's, such as float32 or bfloat16, got 'long'; "
        "let dtype_name(dtype) in the backend of tiny return it\n"
    ), result.stderr


def test_ops_name_a_dtype_as_numpy_does() -> None:
    op = op_host(lambda x: np.asarray(x, "half"), outputs=lambda x: Spec(x.shape, "half"))
    assert ops.dtype(op(np.ones(2))) == "float16"
