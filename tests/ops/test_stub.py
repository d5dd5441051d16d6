"""The stub of cgshim.ops has the functions of docs/ops.md, with parameters for every documented call."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import stub
from calls import CALLS, name_of

import cgshim
from cgshim import ops

PAGE = (Path(__file__).parents[2] / "docs" / "ops.md").read_text()


def _parameters(function: ast.FunctionDef) -> inspect.Signature:
    namespace: dict[str, Any] = {"Any": Any, "Sequence": list}
    exec(ast.unparse(function), namespace)  # our own text
    return inspect.signature(namespace[function.name])


def _functions() -> dict[str, inspect.Signature]:
    """The functions of the stub by their names in docs/ops.md; methods have self first."""
    tree = ast.parse(Path(ops.__file__ or "").with_suffix(".pyi").read_text())
    found = {
        node.name: _parameters(node) for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            methods = [method for method in node.body if isinstance(method, ast.FunctionDef)]
            space = node.name.strip("_").lower()
            found |= {f"{space}.{method.name}": _parameters(method) for method in methods}
    return found


FUNCTIONS = _functions()


def test_the_stub_has_the_documented_functions() -> None:
    assert {*FUNCTIONS, *stub.OWN} == {*stub.names_of(PAGE)}
    for name in FUNCTIONS:
        space, _, own = name.rpartition(".")
        assert callable(getattr(getattr(ops, space) if space else ops, own))


def test_the_calls_fit_the_stub() -> None:
    for call in CALLS:
        name = name_of(call)
        nodes = [node for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Call)]
        for node in nodes:
            if ast.unparse(node.func) == name and name in FUNCTIONS:
                keywords = {str(keyword.arg): None for keyword in node.keywords}
                this = [None] if "." in name else []
                FUNCTIONS[name].bind(*this, *node.args, **keywords)


def test_a_misspelled_function_is_an_error() -> None:
    assert "sine" not in FUNCTIONS
    with pytest.raises(AttributeError, match="numpy has no function sine"):
        cgshim.ops.sine  # type: ignore[attr-defined]  # noqa: B018
