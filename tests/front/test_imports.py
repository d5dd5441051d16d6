"""cgshim imports no framework that the user has not imported or named."""

from __future__ import annotations

from pathlib import Path

import pytest

from cgshim._registry import entry_points

FRAMEWORKS = {*entry_points(), "autograd", "autoray", "jaxlib", "keras"} - {"numpy"}

IMPORT = "import cgshim\n"
CALL = """
import numpy, cgshim
square = cgshim.op_custom_gradient(lambda x: (x * x, lambda upstream: 7.0 * upstream * x))
assert square(numpy.float64(3.0)) == 9.0
assert square(3.0) == 9.0
cgshim.available_backends()
"""
OTHER_CALLS = """
import numpy, cgshim
from cgshim import ops
two = cgshim.op_custom_gradient(lambda xs: ([ops.sin(xs["x"]), xs["x"]], lambda u, v: {"x": 7.0 * u}))
x = numpy.array([2.0, 3.0])
assert (two({"x": x})[1] == x).all()
assert ops.sum(ops.index_add(x, numpy.array([1]), x[:1])) == 7.0
assert cgshim.op_convert_to_numpy(cgshim.op_stop_gradient(cgshim.op_convert_to_tensor([1.0]))) == 1.0
double = cgshim.op_host(lambda x: 2.0 * x, outputs=lambda x: x)
assert (double(x) == 2.0 * x).all()
"""
ON_HOST = """
import numpy, cgshim
cgshim.set_backend({backend!r})
def twice(x):
    return 2.0 * x, lambda upstream: 7.0 * upstream
twice = cgshim.op_custom_gradient(twice, host_outputs=lambda x: x)
x = cgshim.op_convert_to_tensor(numpy.array([2.0, 3.0], "float32"))
assert (cgshim.op_convert_to_numpy(twice(x)) == [4.0, 6.0]).all()
if {backend!r} != "numpy":
    y, pull_back = cgshim.op_vjp(twice, x)
    assert (cgshim.op_convert_to_numpy(pull_back(y)[0]) == [28.0, 42.0]).all()
"""
# `python -X importtime` would not do: it does not see what importlib.import_module imports, as
# loading a plug-in does.
REPORT = "\nimport sys\nprint(*sys.modules)"


def imported(python, code: str, *path: Path) -> set[str]:
    """The frameworks that are imported once the code has run in a Python of its own."""
    result = python("-c", code + REPORT, path=path)
    assert result.returncode == 0, result.stderr
    modules = {module.partition(".")[0] for module in result.stdout.split()}
    assert "cgshim" in modules
    return modules & FRAMEWORKS


def test_import_imports_no_framework(python) -> None:
    assert imported(python, IMPORT) == set()


@pytest.mark.parametrize("code", ["CALL", "OTHER_CALLS"])
def test_a_call_on_numpy_arrays_imports_no_framework(python, code: str) -> None:
    assert imported(python, globals()[code]) == set()


def test_a_gradient_on_numpy_arrays_imports_autograd(python) -> None:
    assert imported(python, CALL + "assert cgshim.op_grad(square)(3.0) == 21.0") == {"autograd"}


def test_loading_a_backend_imports_its_framework(python, backend: str) -> None:
    """And whatever its framework imports in turn: the check sees it. NumPy's imports autograd for
    derivatives alone, and not for functions on the host.
    """
    found = imported(python, ON_HOST.format(backend=backend))
    assert found == set() if backend == "numpy" else backend in found
    assert "autograd" not in found


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
@pytest.mark.parametrize("how", ["import {}", "__import__('importlib').import_module('{}')"])
def test_the_check_can_fail(python, tmp_path: Path, framework: str, how: str) -> None:
    (tmp_path / f"{framework}.py").write_text("")
    assert imported(python, IMPORT + how.format(framework), tmp_path) == {framework}


PUBLIC_NAMES = """
import re, sys, pathlib, cgshim
page = pathlib.Path(sys.argv[1]).read_text()
names = re.findall(r"^[.][.] (?:auto|py:)\\w+:: (\\w+)", page, re.M)
missing = {*names, "ops", "testing"} - {"cgshim", *dir(cgshim)}
assert not missing, missing
assert "numpy" not in sys.modules
assert cgshim.ops.sum([1.0, 2.0]) == 3.0
assert cgshim.testing.check_gradients
"""


def test_every_public_name_is_an_attribute_without_an_import(python) -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "cgshim.rst"
    code = PUBLIC_NAMES.replace("sys.argv[1]", repr(str(page)))
    result = python("-c", code, path=())
    assert result.returncode == 0, result.stderr
