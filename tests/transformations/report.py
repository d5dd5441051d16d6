"""Run one backend's cells and keep the results, or write docs/transformations.md from all that were kept.

python report.py run torch results/     python report.py write results/ docs/transformations.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cells

sys.path.append(str(Path(__file__).parents[1]))
from gaps import GAPS

HEAD = """\
# Transformations

Written by `nox -s transformations`, which runs every cell. The op is `x**3` with a rule that is wrong on purpose,
five times the true one: a cell is ok when the number is the rule's, and not autodiff's. A refusal is one sentence, and
stands below the table. A cell is empty where the framework has nothing of the kind.
"""


def run(name: str, folder: Path) -> None:
    """Keep what each cell of a backend says, as JSON."""
    results = {row: cells.run(cell) for row, cell in cells.of_backend(name).items()}
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1))


def write(folder: Path, document: Path) -> int:
    """Write the table; the number of cells that are wrong."""
    columns = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    lines = [HEAD, f"| transformation | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    notes: list[str] = []
    for row in cells.ROWS:
        words = [_word(column.get(row), notes) for column in columns.values()]
        lines.append(f"| {row} | {' | '.join(words)} |")
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    lines += ["", "Known gaps, each a test that fails as long as its reason stands:", ""]
    lines += [f"- {backend}, `{test}`: {reason}" for (backend, test), reason in GAPS.items()]
    document.write_text("\n".join(lines).rstrip() + "\n")
    return sum(outcome == "wrong" for column in columns.values() for outcome, _ in column.values())


def _word(result: list[str] | None, notes: list[str]) -> str:
    if result is None:
        return ""
    outcome, detail = result
    if outcome == "ok":
        return outcome
    if detail not in notes:
        notes.append(detail)
    return f"{outcome} ({notes.index(detail) + 1})"


if __name__ == "__main__":
    command, first, second = sys.argv[1:]
    sys.exit(run(first, Path(second)) if command == "run" else write(Path(first), Path(second)))
