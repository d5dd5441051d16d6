"""What became of each mutant: kept in a file as it is found, and printed for each file of the
package.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import tomllib
from sample import Mutant

HERE = Path(__file__).parent
OF_ALL, OF_A_FILE = 0.9, 0.8


class Verdicts:
    """The verdicts of all runs so far; one holds as long as the mutant's file is as it was."""

    def __init__(self, stored: Path, root: Path) -> None:
        self.stored, self.root = stored, root
        self._lock = threading.Lock()
        lines = stored.read_text().splitlines() if stored.exists() else []
        self._found: dict[str, dict[str, Any]] = {}
        for line in lines:
            verdict = json.loads(line)
            self._found[verdict["key"]] = verdict

    def of(self, mutant: Mutant) -> dict[str, Any] | None:
        return self._found.get(self._key(mutant))

    def add(self, mutant: Mutant, verdict: dict[str, Any]) -> None:
        verdict = {"key": self._key(mutant), "name": mutant.name, **verdict}
        with self._lock, self.stored.open("a") as file:
            self._found[verdict["key"]] = verdict
            file.write(json.dumps(verdict) + "\n")

    def _key(self, mutant: Mutant) -> str:
        source = (self.root / mutant.file).read_text()
        return hashlib.sha256(f"{mutant.name}\n{source}".encode()).hexdigest()[:24]


def equivalent() -> dict[str, str]:
    """The mutants that no test can tell from the package, and why."""
    rows = tomllib.loads((HERE / "equivalent.toml").read_text()).get("mutant", [])
    return {_name(row): row["reason"] for row in rows}


def _name(row: dict[str, Any]) -> str:
    return "\n".join(
        [row["file"], f"- {row['before']}", f"+ {row['after']}", str(row.get("number", 0))]
    )


def report(mutants: list[Mutant], verdicts: Verdicts) -> bool:
    """Print the table and the survivors; whether enough were killed."""
    reasons = equivalent()
    counts: dict[str, Counter[str]] = {}
    survivors = []
    for mutant in mutants:
        found = verdicts.of(mutant)
        verdict = "not run" if found is None else found["verdict"]
        if verdict == "survived":
            verdict = "equivalent" if mutant.name in reasons else verdict
            survivors += [mutant] if verdict == "survived" else []
        counts.setdefault(mutant.file, Counter())[verdict] += 1
    for mutant in survivors:
        print(
            f"\n{mutant.file}:{mutant.line} ({mutant.number})\n- {mutant.before}\n+ {mutant.after}"
        )
    print(f"\n{'':42} killed  survived  equivalent  not run")
    enough = [_row(file, found, OF_A_FILE) for file, found in counts.items()]
    enough.append(_row("all", sum(counts.values(), Counter()), OF_ALL))
    killed = {
        mutant.name for mutant in mutants if (verdicts.of(mutant) or {}).get("verdict") == "killed"
    }
    for name in sorted(killed & set(reasons)):
        print(f"\nno equivalent mutant, a test kills it:\n{name}")
    return all(enough)


def _row(name: str, found: Counter[str], least: float) -> bool:
    judged = found["killed"] + found["survived"]
    share = found["killed"] / judged if judged else 1.0
    enough = share >= least and not found["not run"]
    cells = (
        f"{found['killed']:7} {found['survived']:9} {found['equivalent']:11} {found['not run']:8}"
    )
    print(f"{name:42}{cells}  {share:7.1%}{'' if enough else '  not enough'}")
    return enough
