"""python -m cgshim: what it prints, and its exit status; and cgshim's version."""

import re
import sys
from pathlib import Path

import cgshim
from cgshim.__main__ import main
from cgshim._registry import entry_points

OTHERS = [name for name in entry_points() if name != "numpy"]


def test_the_table_names_every_backend_and_the_choice(capsys, monkeypatch):
    monkeypatch.setattr("cgshim._dispatch._of_environment", "numpy")
    assert main([]) == 0
    printed = capsys.readouterr().out
    for name in ("numpy", "jax", "torch", "tensorflow"):
        assert row_of(name, printed)
    assert printed.endswith("chosen: numpy, by CGSHIM_BACKEND\n")


def test_without_a_choice_the_types_decide(capsys, monkeypatch):
    monkeypatch.setattr("cgshim._dispatch._of_environment", None)
    assert main([]) == 0
    assert capsys.readouterr().out.endswith("chosen: by call, by the inputs' types\n")


def test_a_named_backend_that_works(capsys, backend):
    assert main(["numpy", backend]) == 0
    module = sys.modules[backend]
    printed = f"ok: cgshim_{backend} of cgshim, with {backend} {module.__version__}"
    assert row_of(backend, capsys.readouterr().out) == printed


def test_a_named_backend_that_does_not_exist(capsys):
    assert main(["numpy", "nonesuch"]) == 1
    printed = row_of("nonesuch", capsys.readouterr().out)
    assert printed.startswith("cgshim: a backend is named by its framework's import root, got ")


def row_of(name: str, printed: str) -> str:
    return re.search(f"^{name} +(.*)$", printed, re.MULTILINE).group(1)


def test_a_framework_that_is_missing(python, site_without):
    path = site_without(*OTHERS)
    result = python("-S", "-m", "cgshim", path=path)
    assert row_of("numpy", result.stdout).startswith("ok: ")
    for name in OTHERS:
        row = row_of(name, result.stdout)
        assert row.startswith(f"cgshim: the backend {name!r} of cgshim must import, got ")
        assert row.endswith(f"; pip install 'cgshim[{name}]'")


def test_the_version_is_that_of_pyproject():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'\nversion = "{cgshim.__version__}"\n' in project


def test_the_version_where_nothing_tells_it(python, site_without):
    program = "import cgshim\nprint(getattr(cgshim, '__version__', None))\ncgshim.__version__"
    result = python("-S", "-c", program, path=site_without("cgshim*.dist-info"))
    assert result.stdout == "None\n"
    assert result.stderr.endswith(
        "AttributeError: cgshim.__version__: the version is read from the metadata of the installed distribution, "
        "got none; run pip install -e . (or pip install cgshim) in this environment\n"
    )


def test_conformance(capsys):
    assert main(["conformance", "numpy", "-k", "same_tensor"]) == 0
    table, _, summary = capsys.readouterr().out.rpartition("numpy: ")
    assert table.startswith("case ")
    assert "same_tensor_twice" in table
    passed, of, total, *_ = summary.split()
    assert (passed, of) == (total, "of")


def test_conformance_of_an_unknown_backend(capsys):
    assert main(["conformance", "nonesuch"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "cgshim: a backend is named by its framework's import root, got 'nonesuch'; installed: "
    )
