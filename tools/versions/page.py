"""Write docs/versions.md from the results that are in the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from table import CELLS, TABLE

HEAD = """\
# Versions

cgshim supports NumPy from 1.26 on, autograd from 1.7, JAX from 0.4.38, PyTorch from 2.6 and TensorFlow from 2.18.
`python tools/versions/run.py` writes this page. It runs every conformance case on a version of a framework, on the
oldest or the newest Python with wheels of it. A gap is a case that the version cannot pass; the reason is listed.
"""

NAMES = {
    "numpy": "NumPy, with the newest autograd", "autograd": "autograd, for NumPy", "jax": "JAX", "torch": "PyTorch",
    "tensorflow": "TensorFlow",
}  # fmt: skip


def write_page(cache: Path, document: Path) -> None:
    """Write the page of all results that are in the cache."""
    lines = [HEAD]
    for backend in TABLE:
        results = _results(cache, backend)
        if results:
            lines += [f"## {NAMES[backend]}", "", *_table(results), ""]
            lines += (
                _reasons("Gaps", results, "gaps")
                + _reasons("Failures", results, "failed")
                + _limits(results)
            )
    document.write_text("\n".join(lines).rstrip() + "\n")


def _results(cache: Path, backend: str) -> list[dict[str, Any]]:
    """Return what has run of a backend, in the order of the table of cells."""
    files = [cache / f"{cell.name}.json" for cell in CELLS if cell.backend == backend]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def _table(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| version | Python | NumPy | passed | gaps | failed | run on |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        told = [result[key] for key in ("framework", "python", "numpy", "passed")]
        told += [len(result["gaps"]), len(result["failed"]), result["date"]]
        lines.append(f"| {' | '.join(str(word) for word in told)} |")
    return lines


def _reasons(title: str, results: list[dict[str, Any]], key: str) -> list[str]:
    """Return a list of the cases with this outcome, each with its reason and the versions that have
    it.
    """
    versions: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for case, reason in result[key].items():
            versions.setdefault((case, reason), []).append(result["framework"])
    if not versions:
        return []
    lines = [
        f"- {_joined(where)}, `{case}`: {reason}" for (case, reason), where in versions.items()
    ]
    return [f"{title}:", "", *lines, ""]


def _limits(results: list[dict[str, Any]]) -> list[str]:
    """Return a table of what only newer versions can, by `version_limits()` of the backend."""
    versions: dict[str, list[str]] = {}
    for result in results:
        for limit in result["limits"]:
            versions.setdefault(limit, []).append(result["framework"])
    if not versions:
        return []
    lines = [f"| {_joined(where)} | {limit} |" for limit, where in versions.items()]
    return ["| in | what only newer versions can |", "|---|---|", *lines, ""]


def _joined(versions: list[str]) -> str:
    return ", ".join(dict.fromkeys(versions))
