"""What the documents show is what happens: every example in the docstrings, the README and docs/ is run."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import cgshim

ROOT = Path(__file__).parents[2]
MODULES = [m.name for m in pkgutil.walk_packages(cgshim.__path__, "cgshim.") if not m.name.endswith("__main__")]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def run(test):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test)
    results = runner.summarize(verbose=False)
    assert results.failed == 0
    return results.attempted


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    for test in doctest.DocTestFinder().find(importlib.import_module(name), name):
        run(test)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents(path):
    run(doctest.DocTestParser().get_doctest(path.read_text(), {}, path.name, str(path), 0))


def test_every_public_function_has_an_example():
    names = [name for name in vars(cgshim) if name.startswith(("op_", "set_", "use_", "config_", "available_"))]
    assert len(names) >= 8
    for name in names:
        assert ">>>" in getattr(cgshim, name).__doc__, name


def test_the_quickstart_prints_what_the_readme_says(capsys):
    import runpy

    import numpy as np

    with np.errstate(all="ignore"):
        runpy.run_path(str(ROOT / "examples" / "log1pexp.py"), run_name="__main__")
    assert capsys.readouterr().out in (ROOT / "README.md").read_text()
