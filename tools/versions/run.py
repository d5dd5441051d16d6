"""Run the conformance cases on every version of every framework, and write docs/versions.md from
what was found.

python run.py CACHE [CELL ...] [--jobs N] [--again] [--list]

A cell is a version of a framework on a Python: an environment of its own, which is deleted
afterwards. Its result is a file in CACHE. A cell that has run with these sources does not run
again, so this may be stopped and started anew.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from page import write_page
from table import Cell, cells

ROOT = Path(__file__).parents[2]
TESTS = ["pytest", "pytest-xdist", "hypothesis", "attrs", "ml_dtypes"]
GIB_OF_A_CELL = 6
"""what pip, and then the cases, take at most"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cache", type=Path)
    parser.add_argument(
        "cells", nargs="*", help="how their names begin: torch-2.6, jax; by default all"
    )
    parser.add_argument(
        "--jobs", type=int, default=_jobs(), help="cells side by side (default: %(default)s)"
    )
    parser.add_argument("--again", action="store_true", help="run cells that have run too")
    parser.add_argument(
        "--list", action="store_true", help="tell which cells have run with these sources"
    )
    asked = parser.parse_args()
    asked.cache = asked.cache.resolve()
    asked.cache.mkdir(parents=True, exist_ok=True)
    chosen = cells(asked.cells)
    if asked.list:
        print(
            "\n".join(
                f"{cell.name}: {'has run' if _has_run(cell, asked.cache) else 'to run'}"
                for cell in chosen
            )
        )
        return 0
    all_passed = True
    with ThreadPoolExecutor(asked.jobs) as pool:
        for passed in pool.map(lambda cell: run(cell, asked.cache, asked.again), chosen):
            write_page(asked.cache, ROOT / "docs" / "versions.md")
            all_passed &= passed
    return 0 if all_passed else 1


def run(cell: Cell, cache: Path, again: bool = False) -> bool:
    """Keep what the cases say on this cell; True if they said what they should."""
    if not again and _has_run(cell, cache):
        print(f"{cell.name}: has run", flush=True)
        return True
    print(f"{cell.name}: begins", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix=cell.name, dir=cache) as folder,
        (cache / f"{cell.name}.log").open("w") as log,
    ):
        try:
            result = _run_in(Path(folder), cell, log)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{cell.name}: did not run: {error}; see {log.name}", flush=True)
            return False
    (cache / f"{cell.name}.json").write_text(json.dumps(result, indent=1))
    gaps, failed = len(result["gaps"]), len(result["failed"])
    print(f"{cell.name}: {result['passed']} passed, {gaps} gaps, {failed} failed", flush=True)
    return not failed


def _run_in(folder: Path, cell: Cell, log: Any) -> dict[str, Any]:
    """Make the environment, run the cases in it, and return what is to be kept."""
    sources = digest(cell)
    subprocess.run(
        [_interpreter(cell.python), "-m", "venv", folder], check=True, stdout=log, stderr=log
    )
    install = [
        "-m",
        "pip",
        "install",
        "--quiet",
        *_cached(cell),
        str(ROOT),
        *TESTS,
        *cell.requirements,
    ]
    subprocess.run([folder / "bin" / "python", *install], check=True, stdout=log, stderr=log)
    report = folder / "report.xml"
    options = [
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        "--backend",
        cell.tested,
        "--junitxml",
        report,
    ]
    subprocess.run(
        [folder / "bin" / "pytest", *options, "tests/conformance"], cwd=ROOT, stdout=log, stderr=log
    )
    if not report.exists():
        raise subprocess.CalledProcessError(1, "pytest")
    told = subprocess.run(
        [folder / "bin" / "python", Path(__file__).with_name("tell.py"), cell.backend, cell.tested],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return {
        "cell": cell._asdict(),
        "sources": sources,
        "date": datetime.date.today().isoformat(),
        **json.loads(told.stdout),
        **outcomes_of(report),
    }


def outcomes_of(report: Path) -> dict[str, Any]:
    """Return how many cases passed, and the reason of each other one, by pytest's report in JUnit's
    form.
    """
    outcomes: dict[str, Any] = {"passed": 0, "gaps": {}, "failed": {}}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["name"]
        told = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if told is None:
            outcomes["passed"] += 1
        elif told.get("type") == "pytest.xfail":
            outcomes["gaps"][name] = told.get("message")
        else:
            outcomes["failed"][name] = (told.get("message") or "").split("\n")[0]
    return outcomes


def digest(cell: Cell) -> str:
    """Return a number of the sources that a cell's result depends on; where a gap is mended, the
    cell has failed.
    """
    folders = ["cgshim", f"backends/cgshim_{cell.tested}", "tests/conformance"]
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    of_all = hashlib.sha256(repr(cell).encode())
    for path in files:
        of_all.update(path.read_bytes())
    return of_all.hexdigest()[:16]


def _has_run(cell: Cell, cache: Path) -> bool:
    result = cache / f"{cell.name}.json"
    if not result.exists():
        return False
    kept = json.loads(result.read_text())
    return kept["sources"] == digest(cell) and not kept["failed"]


def _interpreter(python: str) -> str:
    """Return this Python's path; pyenv does not run a version by its name unless it was told to
    offer it.
    """
    of_pyenv = sorted(
        Path(os.environ.get("PYENV_ROOT", "/")).glob(f"versions/{python}.*/bin/python")
    )
    found = str(of_pyenv[-1]) if of_pyenv else shutil.which(f"python{python}")
    if found is None:
        raise FileNotFoundError(f"there is no python{python} on this machine")
    return found


def _cached(cell: Cell) -> list[str]:
    """pip's cache would grow by gigabytes with each version of PyTorch."""
    return ["--no-cache-dir"] if cell.backend == "torch" else []


def _jobs() -> int:
    """Return how many cells fit side by side into the cores and the memory."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(os.cpu_count() or 1, int(gib / GIB_OF_A_CELL)))


if __name__ == "__main__":
    sys.exit(main())
