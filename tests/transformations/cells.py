"""The table of transformations: a row each, and for each backend the code that shows what its cell
says.

A cell is a function in `cells_<backend>.py`, put in a row by `@cell(row)`. It returns `(found,
by_rule)`: what the transformation gives, and what the rule says it must. It may raise instead: a
cgshim error is a refusal.

The tables of ops on the host have rows of their own. A cell of these is a function of the op in
`cells_host_<backend>.py`, put in a row by `@host_cell(row)`, and is run with the op of each table.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from ops import FOREIGN, ON_HOST

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
    "vmap, by a rule for batches",
    "gradient of vmap, by a rule for batches",
    "vmap of gradient, by a rule for batches",
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

HOST_ROWS = [
    "gradient",
    "Jacobian",
    "second order",
    "second order, compiled",
    "vmap",
    "gradient of vmap",
    "vmap of gradient",
    "forward mode, promised",
    "Hessian, forward over reverse, promised",
    "compiled",
    "compiled gradient",
    "compiled vmap",
    "compiled vmap of gradient",
    "compiled forward mode, promised",
    "loops and conditions of the framework",
    "checkpointing",
    "mixed precision",
    "export",
    "several devices or processes",
    "a pipeline of data",
    "compiled by XLA",
]

Cell = Callable[[], tuple[Any, Any]]
HostCell = Callable[[Any], tuple[Any, Any]]
C = TypeVar("C", Cell, HostCell)
_cells: dict[tuple[str, str], Cell] = {}
_host_cells: dict[tuple[str, str], HostCell] = {}


def cell(row: str) -> Callable[[Cell], Cell]:
    """Put a function in a row of its backend's column."""
    return _placed(row, ROWS, _cells, "cells_")


def host_cell(row: str) -> Callable[[HostCell], HostCell]:
    """Put a function of the op in a row of its backend's columns."""
    return _placed(row, HOST_ROWS, _host_cells, "cells_host_")


def _placed(
    row: str, rows: list[str], cells: dict[tuple[str, str], C], prefix: str
) -> Callable[[C], C]:
    """Return what places a cell: its backend is in the name of its module."""
    assert row in rows, row

    def put(function: C) -> C:
        cells[row, function.__module__.rpartition(prefix)[2]] = function
        return function

    return put


class Result(NamedTuple):
    """What a cell says: ok, refused (with the sentence), none (the framework has nothing of the
    kind), or wrong.
    """

    outcome: str
    detail: str


def of_backend(name: str) -> dict[str, Cell]:
    """The cells of one backend, by row."""
    importlib.import_module(f"cells_{name}")
    return {row: _cells[row, name] for row in ROWS if (row, name) in _cells}


def on_host(name: str) -> dict[str, dict[str, Cell]]:
    """The cells of one backend by row, for the op of each table."""
    importlib.import_module(f"cells_host_{name}")
    cells = {row: _host_cells[row, name] for row in HOST_ROWS if (row, name) in _host_cells}
    return {
        table: {row: functools.partial(cell, op) for row, cell in cells.items()}
        for table, op in ON_HOST.items()
        if (table, name) != (FOREIGN, "numpy")
    }


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
