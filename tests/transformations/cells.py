"""The table of transformations: a row each, and for each backend the code that shows what its cell says.

A cell is a function in `cells_<backend>.py`, put in a row by `@cell(row)`. It returns `(found, by_rule)`: what the
transformation gives, and what the rule says it must. It may raise instead: a cgshim error is a refusal.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import cgshim

ROWS = [
    "gradient",
    "derivatives of order 2, 3 and 4",
    "mixed partial derivatives",
    "Hessian, reverse over reverse",
    "Hessian, forward over reverse",
    "second order, rule keeps the output",
    "second order, f is opaque",
    "second order, f draws random numbers",
    "second order of an op inside a rule",
    "gradient of a gradient penalty",
    "Jacobian",
    "vmap",
    "gradient of vmap",
    "vmap of gradient",
    "nested vmap, over one of two arguments",
    "vmap over batches of 0 and 1",
    "forward mode, promised",
    "forward mode, not promised",
    "compiled gradient",
    "compiled gradient of the gradient",
    "compiled vmap of gradient",
    "compiled forward mode, promised",
    "loops and conditions of the framework",
    "checkpointing",
    "mixed precision",
    "export",
    "several devices or processes",
    "another library's model",
]

Cell = Callable[[], tuple[Any, Any]]
_cells: dict[tuple[str, str], Cell] = {}


def cell(row: str) -> Callable[[Cell], Cell]:
    """Put a function in a row of its backend's column: the backend is in the name of the function's module."""
    assert row in ROWS, row

    def put(function: Cell) -> Cell:
        _cells[row, function.__module__.rpartition("cells_")[2]] = function
        return function

    return put


class Result(NamedTuple):
    """What a cell says: ok, refused (with the sentence), none (the framework has nothing of the kind), or wrong."""

    outcome: str
    detail: str


def of_backend(name: str) -> dict[str, Cell]:
    """The cells of one backend, by row."""
    importlib.import_module(f"cells_{name}")
    return {row: _cells[row, name] for row in ROWS if (row, name) in _cells}


def run(cell: Cell) -> Result:
    """What comes of a cell."""
    try:
        found, by_rule = cell()
    except cgshim.CustomGradientError as error:
        return Result("refused", str(error))
    found, by_rule = np.asarray(found, float), np.asarray(by_rule, float)
    if found.shape == by_rule.shape and np.allclose(found, by_rule, rtol=1e-4):
        return Result("ok", "")
    return Result("wrong", f"{found} where the rule says {by_rule}")
