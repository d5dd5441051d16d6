"""python -m cgshim: what it prints, and its exit status; and cgshim's version."""

import re
from importlib.metadata import version
from pathlib import Path

import cgshim
from cgshim.__main__ import main
from cgshim._registry import entry_points, load

OTHERS = [name for name in entry_points() if name != "numpy"]


def test_the_table_names_every_backend_and_the_choice(capsys, monkeypatch):
    monkeypatch.setattr("cgshim._dispatch._of_environment", "numpy")
    assert main([]) == 0
    printed = capsys.readouterr().out
    for name in ("numpy", "jax", "torch", "tensorflow"):
        assert f"\n{name} " in printed
    assert printed.endswith("chosen: numpy, by CGSHIM_BACKEND\n")


def test_without_a_choice_the_types_decide(capsys, monkeypatch):
    monkeypatch.setattr("cgshim._dispatch._of_environment", None)
    assert main([]) == 0
    assert capsys.readouterr().out.endswith("chosen: by call, by the inputs' types\n")


def test_what_is_required_and_works(backend):
    assert main(["--require", f"numpy,{backend}"]) == 0


def test_what_is_required_and_missing(capsys):
    assert main(["--require", "numpy,nonesuch"]) == 1
    assert capsys.readouterr().err == "required, and not working here: nonesuch\n"


def rows_of(printed: str) -> dict[str, list[str]]:
    return {row.split()[0]: re.split(r"  +", row) for row in printed.splitlines() if "  " in row}


def test_a_framework_is_not_imported_to_say_that_it_is_found(python, backend):
    program = (
        "import sys\nfrom cgshim.__main__ import main\nassert not main([])\nprint(*sys.modules)"
    )
    printed, _, modules = python("-c", program).stdout.rstrip().rpartition("\n")
    assert rows_of(printed)[backend][-1] == "found"
    assert not {"autograd", "jax", "tensorflow", "torch"} & set(modules.split())


def test_the_version_that_is_found(capsys, backend):
    main([])
    name, plug_in, framework, state = rows_of(capsys.readouterr().out)[backend]
    assert (name, plug_in, state) == (
        backend,
        f"cgshim_{backend} (cgshim {cgshim.__version__})",
        "found",
    )
    assert framework.split()[1] == version(framework.split()[0])


def test_the_version_of_autograd(capsys):
    main([])
    versions = f"numpy {version('numpy')} with autograd {version('autograd')}"
    assert rows_of(capsys.readouterr().out)["numpy"][2] == versions


def test_autograd_is_missing(python, site_without):
    printed = python(
        "-S", "-m", "cgshim", "--require", "numpy", path=site_without("autograd*")
    ).stdout
    assert rows_of(printed)["numpy"][2:] == [
        f"numpy {version('numpy')} with no autograd",
        "ok",
    ]
    assert (
        "\nnumpy: cgshim: derivatives on NumPy need autograd 1.7 or later, got no autograd; "
        "pip install 'autograd>=1.7'\n"
    ) in printed


def test_what_is_missing_and_what_to_install(python, site_without):
    path = site_without(*OTHERS)
    result = python("-S", "-m", "cgshim", path=path)
    rows = rows_of(result.stdout)
    assert rows["numpy"][-1] == "found"
    for name in OTHERS:
        assert rows[name][2] == "-"
        assert rows[name][-1] == f"missing: pip install 'cgshim[{name}]'"
    loaded = rows_of(python("-S", "-m", "cgshim", "--load", path=path).stdout)
    assert loaded["numpy"][-1] == "ok"
    assert loaded[OTHERS[0]][-1].startswith(
        f"cgshim: the backend {OTHERS[0]!r} needs its framework, got "
    )


def test_what_is_loaded_and_works_is_ok(capsys, backend):
    """What is required is loaded; --load loads all."""
    assert main(["--require", backend]) == 0
    assert rows_of(capsys.readouterr().out)[backend][-1] == "ok"


def test_what_only_other_versions_can(capsys, monkeypatch, backend):
    monkeypatch.setattr(
        load(backend), "version_limits", lambda: ["no maps before 9.1"], raising=False
    )
    assert main(["--require", backend]) == 0
    assert f"\n{backend}: no maps before 9.1\n" in capsys.readouterr().out
    monkeypatch.setattr(load(backend), "version_limits", lambda: 1 / 0)
    assert main(["--require", backend]) == 0
    failed = "version_limits of cgshim failed, ZeroDivisionError: division by zero"
    assert f"\n{backend}: {failed}\n" in capsys.readouterr().out


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
