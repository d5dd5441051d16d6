"""The architecture: imports go one way, and a backend imports cgshim.backend alone."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import cgshim

ROOT = Path(cgshim.__file__).parent
FILES = sorted(ROOT.glob("*.py"))
BACKENDS = sorted((Path(__file__).parents[2] / "backends").rglob("*.py"))
LONGEST = 350


def imported_by(file: Path) -> set[str]:
    """Return the modules of cgshim that a file imports anywhere: in functions, and for its types, too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.partition(".")[0] == "cgshim"}


def in_order(graph: dict[str, set[str]]) -> list[str]:
    return list(TopologicalSorter(graph).static_order())


def test_no_file_imports_one_that_imports_it():
    modules = {f"cgshim.{file.stem}": file for file in FILES if file.stem not in ("__init__", "__main__")}
    graph = {name: imported_by(file) & set(modules) for name, file in modules.items()}
    order = in_order(graph)
    assert order.index("cgshim._protocol") < order.index("cgshim._registry") < order.index("cgshim._choice")
    assert order.index("cgshim._trees") < order.index("cgshim._rule") < order.index("cgshim._call")
    assert order.index("cgshim._call") < order.index("cgshim._custom_gradient") < order.index("cgshim.backend")


def test_a_circle_would_be_seen(tmp_path):
    (tmp_path / "a.py").write_text("def f():\n    from cgshim.b import x\n")
    (tmp_path / "b.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import cgshim.a\n")
    with pytest.raises(CycleError):
        in_order({f"cgshim.{name}": imported_by(tmp_path / f"{name}.py") for name in "ab"})


@pytest.mark.parametrize("file", BACKENDS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_backend_imports_what_any_backend_may(file):
    allowed = {"cgshim.backend", "cgshim.ops._axes"}
    assert imported_by(file) <= allowed


def test_files_are_short():
    files = [file for file in (*ROOT.rglob("*.py"), *BACKENDS) if "conformance" not in file.parts]
    assert len(files) > len(BACKENDS)
    assert not [file for file in files if len(file.read_text().splitlines()) > LONGEST]
