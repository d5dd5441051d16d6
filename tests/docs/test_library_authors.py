"""The library of the page for library authors: its files are written as they stand there, and its
tests run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import blocks
import pytest

from cgshim._registry import entry_points

PAGE = Path(__file__).parents[2] / "docs" / "library-authors.md"
FILES = {
    block.code.partition("\n")[0].removeprefix("# "): block.code
    for block in blocks.blocks(PAGE.read_text())
}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    return tmp_path


def run(library: Path, *options: str, asked: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "CGSHIM_BACKEND"}
    if asked is not None:
        environment["CGSHIM_BACKEND"] = asked
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    return subprocess.run(
        command, cwd=library, env=environment, capture_output=True, text=True, check=False
    )


def test_the_tests_of_the_page_run_on_a_backend(library: Path, backend: str) -> None:
    result = run(library, "--backend", backend)
    assert f"backends: {backend} (not in this run: " in result.stdout
    assert "4 passed" in result.stdout, result.stdout


def test_a_wrong_factor_in_the_rule_is_noticed(library: Path) -> None:
    (library / "softplus.py").write_text(
        FILES["softplus.py"].replace("upstream * sigmoid", "7 * upstream * sigmoid")
    )
    result = run(library, "--backend", "numpy")
    # far below zero the gradient is zero
    assert "3 failed, 1 passed" in result.stdout, result.stdout


def test_cgshim_backend_asks_as_the_option_does(library: Path) -> None:
    assert (
        "backends: numpy (not in this run: " in run(library, "--collect-only", asked="numpy").stdout
    )
    result = run(library, asked="nonesuch")
    assert result.returncode == 4
    assert (
        "ERROR: --backend nonesuch: cgshim: a backend is named by its framework's import root"
        in result.stderr
    )


def test_a_backend_is_chosen_for_the_length_of_a_test(library: Path) -> None:
    (library / "test_softplus.py").write_text(
        "import cgshim\n"
        "def test_in_use(backend): assert cgshim.config_backend() == backend\n"
        "def test_without(): assert cgshim.config_backend() is None\n"
    )
    assert "2 passed" in run(library, "--backend", "numpy").stdout


def test_the_noxfile_of_the_page_names_backends() -> None:
    code = FILES["noxfile.py"]
    names = next(line for line in code.splitlines() if line.startswith("FRAMEWORKS"))
    compile(code, "noxfile.py", "exec")
    assert set(eval(names.partition("= ")[2])) <= set(entry_points())


OWN = """
import pytest

import cgshim


@pytest.mark.parametrize(("n", "backend"), [(1, "qiskit")])
def test_by_parametrize(n, backend):
    assert backend == "qiskit" and cgshim.config_backend() is None


@pytest.mark.parametrize(argnames="backend", argvalues=["qiskit"])
@pytest.mark.parametrize(argnames="n", argvalues=[1])
def test_by_keywords(n, backend):
    assert backend == "qiskit" and cgshim.config_backend() is None


class TestByFixture:
    @pytest.fixture(params=["qiskit", "cirq"])
    def backend(self, request):
        return request.param

    def test_it(self, backend):
        assert backend in ("qiskit", "cirq") and cgshim.config_backend() is None


def test_by_the_plug_in(backend):
    assert backend == cgshim.config_backend() == "numpy"
"""


def test_a_backend_that_tests_have_themselves_is_theirs(library: Path) -> None:
    """By the names of other libraries' backends, which cgshim does not know."""
    (library / "test_own.py").write_text(OWN)
    result = run(library, "--backend", "numpy", "--strict-markers", "test_own.py")
    assert "5 passed" in result.stdout, result.stdout
