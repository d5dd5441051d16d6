"""The test run itself: a backend that was asked for is tested or fails the run, and a gap is
strict.
"""

from __future__ import annotations

import re
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
        f"ERROR: --backend {OTHERS[0]}: cgshim: the backend {OTHERS[0]!r} needs its framework, "
        f"got ModuleNotFoundError: No module named {OTHERS[0]!r}; pip install 'cgshim[{OTHERS[0]}]'"
    )


def test_without_asking_every_framework_that_is_here(python, site_without) -> None:
    """The tests of the other backends are not collected."""
    tests = str(TESTS / "backends")
    result = python("-S", *PYTEST, tests, "--collect-only", path=site_without(*OTHERS))
    assert f"backends: numpy (not in this run: {', '.join(OTHERS)})" in result.stdout
    folders = set(re.findall(r"<Dir (\w+)>", result.stdout))
    assert "numpy" in folders
    assert not folders & set(OTHERS)


def test_a_gap_that_is_closed_fails_the_run(python, tmp_path: Path) -> None:
    (tmp_path / "one_more_gap.py").write_text(
        "import sys\n"
        "def pytest_configure(config):\n"
        "    sys.modules['gaps'].GAPS['numpy', 'same_tensor_twice'] = 'some issue'\n"
    )
    cases = str(TESTS / "conformance" / "test_conformance.py")
    select = ("--backend", "numpy", "-k", "same_tensor_twice or product_asked_twice")
    result = python(*PYTEST, "-p", "one_more_gap", cases, *select, path=(tmp_path,))
    assert result.returncode == 1
    assert "[XPASS(strict)] some issue" in result.stdout
    assert "1 failed, 1 passed" in result.stdout
