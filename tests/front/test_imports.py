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
# `python -X importtime` would not do: it does not see what importlib.import_module imports, as loading a plug-in does.
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


def test_a_call_on_numpy_arrays_imports_no_other_framework(python) -> None:
    assert imported(python, CALL) == {"autograd"}


def test_loading_a_backend_imports_its_framework(python, backend: str) -> None:
    """And whatever its framework imports in turn: the check sees it."""
    found = imported(python, f"import cgshim; cgshim.set_backend({backend!r})")
    assert (backend if backend != "numpy" else "autograd") in found


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
@pytest.mark.parametrize("how", ["import {}", "__import__('importlib').import_module('{}')"])
def test_the_check_can_fail(python, tmp_path: Path, framework: str, how: str) -> None:
    (tmp_path / f"{framework}.py").write_text("")
    assert imported(python, IMPORT + how.format(framework), tmp_path) == {framework}
