"""The test run itself: a backend that was asked for is tested or fails the run."""

from __future__ import annotations

import subprocess
from pathlib import Path

from cgshim._registry import entry_points

TESTS = Path(__file__).parents[1]
OTHERS = [name for name in entry_points() if name != "numpy"]
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider")


def last_error(result: subprocess.CompletedProcess[str]) -> str:
    return next(line for line in reversed(result.stderr.splitlines()) if line.startswith("ERROR"))


def test_a_backend_that_is_unknown_fails_the_run(python) -> None:
    result = python(*PYTEST, str(TESTS / "front"), "--backend", "numpy", "--backend", "nonesuch")
    assert result.returncode == 4
    assert last_error(result).startswith(
        "ERROR: --backend nonesuch: cgshim: a backend is named by its framework's"
    )


def test_a_backend_that_does_not_import_fails_the_run(python, site_without) -> None:
    path = site_without(*OTHERS)
    result = python("-S", *PYTEST, str(TESTS / "front"), "--backend", OTHERS[0], path=path)
    assert result.returncode == 4
    assert last_error(result) == (
        f"ERROR: --backend {OTHERS[0]}: cgshim: the backend {OTHERS[0]!r} of cgshim must import, "
        f"got ModuleNotFoundError: No module named {OTHERS[0]!r}; pip install 'cgshim[{OTHERS[0]}]'"
    )
