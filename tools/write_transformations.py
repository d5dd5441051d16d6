"""Run every transformation on every backend, and write docs/transformations.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "transformations"))
import cells
from gaps import gaps_of

ROOT = Path(__file__).parents[1]
BACKENDS = ("numpy", "jax", "torch", "tensorflow")
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_ENABLE_X64": "1"}

HEAD = """\
# Transformations

`nox -s pages` runs every cell and writes this page. The op is `x**3` with a rule that is wrong on
purpose, five times the true one. A cell is *ok* if the number is the rule's. *error (n)* is the error below the tables.
A cell is empty if the framework has no such transformation.
"""

ON_HOST = """\
## Functions on the host

The same op, with NumPy code for `f`: `op_host` within `op_custom_gradient`, `op_custom_gradient(host_outputs=)`, and
`op_host(backend=)`. "Compiled" is `jit`, `torch.compile`, and `tf.function` without XLA. A pipeline is a `DataLoader`
with workers, or `tf.data`. A saved `torch.export` program calls the host by name: another process finds only an
`op_host` of a module. A rule may close over arguments and the op's output; the derivative of another result of the
host is an error.
"""


def main() -> int:
    """Run each backend in a process of its own, and write the page; the number of wrong cells."""
    with TemporaryDirectory() as results:
        for backend in BACKENDS:
            command = [sys.executable, __file__, backend, results]
            subprocess.run(command, env={**os.environ, **DEVICES}, check=True)
        return write(Path(results), ROOT / "docs" / "transformations.md")


def run(backend: str, folder: Path) -> None:
    """Write the results of one backend as JSON."""
    tables = {"": cells.of_backend(backend), **cells.on_host(backend)}
    results = {
        table: {row: cells.run(cell) for row, cell in of_table.items()}
        for table, of_table in tables.items()
    }
    (folder / f"{backend}.json").write_text(json.dumps(results, indent=1))


def write(folder: Path, document: Path) -> int:
    """Write the tables; the number of cells that are wrong."""
    columns = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    notes: list[str] = []
    lines = [HEAD, *_table("", cells.ROWS, columns, notes), "", ON_HOST]
    for table in cells.ON_HOST:
        lines += [f"### {table}", "", *_table(table, cells.HOST_ROWS, columns, notes), ""]
    lines += ["## Errors", "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    lines += [
        "",
        "## Known gaps",
        "",
        "Each is a test that fails until its reason is gone:",
        "",
    ]
    gaps: dict[tuple[str, str], list[str]] = {}
    for backend in columns:
        for test, reason in gaps_of(backend).items():
            gaps.setdefault((backend, reason), []).append(test)
    for (backend, reason), names in gaps.items():
        tests = "1 test" if len(names) == 1 else f"{len(names)} tests"
        lines.append(f"- {backend}: {reason} ({tests})")
    document.write_text("\n".join(lines).rstrip() + "\n")
    results = [
        result
        for tables in columns.values()
        for column in tables.values()
        for result in column.values()
    ]
    return sum(outcome == "wrong" for outcome, _ in results)


def _table(table: str, rows: list[str], columns: dict[str, Any], notes: list[str]) -> list[str]:
    """Return the lines of one table, and add its errors to the notes."""
    backends = {name: tables[table] for name, tables in columns.items() if table in tables}
    lines = [f"| transformation | {' | '.join(backends)} |", f"|---|{'---|' * len(backends)}"]
    for row in rows:
        words = [_word(column.get(row), notes) for column in backends.values()]
        lines.append(f"| {row} | {' | '.join(words)} |")
    return lines


def _word(result: list[str] | None, notes: list[str]) -> str:
    if result is None:
        return ""
    outcome, detail = result
    if outcome == "ok":
        return outcome
    if detail not in notes:
        notes.append(detail)
    word = "error" if outcome == "refused" else outcome
    return f"{word} ({notes.index(detail) + 1})"


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    run(sys.argv[1], Path(sys.argv[2]))
