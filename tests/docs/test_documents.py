"""What the documents show is what happens: every example in the docstrings and in docs/ is run."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import cgshim

ROOT = Path(__file__).parents[2]
MODULES = [
    m.name
    for m in pkgutil.walk_packages(cgshim.__path__, "cgshim.")
    if not m.name.endswith("__main__")
]
DOCUMENTS = sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "learn.md"})
"""the pages that are read from their top to their end, README.md and learn.md, are in test_blocks.py"""


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
def test_documents(path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "published")
    # where a block ends, its output does
    text = re.sub(r"^```.*$", "", path.read_text(), flags=re.MULTILINE)
    run(doctest.DocTestParser().get_doctest(text, {}, path.name, str(path), 0))


def test_every_public_function_has_an_example():
    names = [
        name
        for name in vars(cgshim)
        if name.startswith(("op_", "set_", "use_", "config_", "available_"))
    ]
    assert len(names) >= 8
    for name in names:
        assert ">>>" in getattr(cgshim, name).__doc__, name


def test_the_quickstart_prints_what_the_readme_says(capsys):
    import runpy

    import numpy as np

    with np.errstate(all="ignore"):
        runpy.run_path(str(ROOT / "examples" / "log1pexp.py"), run_name="__main__")
    assert capsys.readouterr().out in (ROOT / "README.md").read_text()
