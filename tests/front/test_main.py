"""python -m cgshim: what it prints, and its exit status."""

from cgshim.__main__ import main


def test_the_table_names_every_backend_and_the_choice(capsys, monkeypatch):
    monkeypatch.setenv("CGSHIM_BACKEND", "numpy")
    assert main([]) == 0
    printed = capsys.readouterr().out
    for name in ("numpy", "jax", "torch", "tensorflow"):
        assert f"\n{name} " in printed
    assert printed.endswith("chosen: numpy, by CGSHIM_BACKEND\n")


def test_without_a_choice_the_types_decide(capsys, monkeypatch):
    monkeypatch.delenv("CGSHIM_BACKEND", raising=False)
    assert main([]) == 0
    assert capsys.readouterr().out.endswith("chosen: by call, by the inputs' types\n")


def test_what_is_required_and_works(backend):
    assert main(["--require", f"numpy,{backend}"]) == 0


def test_what_is_required_and_missing(capsys):
    assert main(["--require", "numpy,nonesuch"]) == 1
    assert capsys.readouterr().err == "required, and not working here: nonesuch\n"


def test_conformance(capsys):
    assert main(["conformance", "numpy"]) == 0
    table, _, summary = capsys.readouterr().out.rpartition("numpy: ")
    assert table.startswith("case ")
    assert "same_tensor_twice" in table
    passed, of, total, *_ = summary.split()
    assert (passed, of) == (total, "of")


def test_conformance_of_an_unknown_backend(capsys):
    assert main(["conformance", "nonesuch"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("cgshim: a backend is named by its framework's import root, got 'nonesuch'; installed: ")
