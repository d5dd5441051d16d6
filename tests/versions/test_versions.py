"""Which cells are chosen, what is read from pytest's report, and what the page says of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from page import write_page
from run import outcomes_of
from table import CELLS, cells


def test_cells_are_chosen_by_how_their_names_begin() -> None:
    assert [cell.name for cell in cells(["torch-2.6", "jax-0.10-py3.13"])] == [
        "jax-0.10-py3.13", "torch-2.6-py3.10", "torch-2.6-py3.12",
    ]  # fmt: skip
    assert cells([]) == CELLS
    with pytest.raises(
        SystemExit, match=r"^no such cells: jax-0\.1; there are numpy-1\.26-py3\.10, "
    ):
        cells(["jax-0.1"])


def test_a_cell_installs_the_newest_patches() -> None:
    [cell] = cells(["tensorflow-2.18-py3.10"])
    assert cell.requirements == ["numpy==1.26.*", "tensorflow-cpu==2.18.*"]
    assert cells(["numpy-1.26-py3.10"])[0].requirements == ["numpy==1.26.*"]
    assert cells(["autograd-1.7-py3.10"])[0].requirements == ["autograd==1.7.*", "numpy==1.26.*"]


REPORTED = """
import pytest
def test_a(): pass
@pytest.mark.xfail(reason="a known issue")
def test_b(): assert False
def test_c(): assert 1 == 2, "wrong"
def test_d(): pytest.skip("nobody looked")
"""


@pytest.fixture
def outcomes(tmp_path: Path) -> dict[str, object]:
    """What a run says in which one test passes, one is a gap, one fails and one is skipped."""
    (tmp_path / "test_it.py").write_text(REPORTED)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--junitxml",
        "report.xml",
        "test_it.py",
    ]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    return outcomes_of(tmp_path / "report.xml")


def test_what_is_neither_passed_nor_a_gap_has_failed(outcomes: dict[str, dict[str, str]]) -> None:
    assert outcomes["passed"] == 1
    assert outcomes["gaps"] == {"test_b": "a known issue"}
    assert list(outcomes["failed"]) == ["test_c", "test_d"]
    assert "wrong" in outcomes["failed"]["test_c"]


def test_the_page_has_what_ran(tmp_path: Path, outcomes: dict[str, object]) -> None:
    told = {
        "framework": "0.6.2",
        "numpy": "2.2.6",
        "python": "3.10.13",
        "limits": ["no maps"],
        "date": "2026-11-22",
    }
    (tmp_path / "jax-0.6-py3.10.json").write_text(json.dumps({**told, **outcomes}))
    write_page(tmp_path, tmp_path / "versions.md")
    page = (tmp_path / "versions.md").read_text()
    assert "| 0.6.2 | 3.10.13 | 2.2.6 | 1 | 1 | 2 | 2026-11-22 |\n" in page
    assert "- 0.6.2, `test_b`: a known issue\n" in page
    assert "- 0.6.2, `test_d`: nobody looked" in page
    assert "| 0.6.2 | no maps |" in page
    assert "PyTorch" not in page
