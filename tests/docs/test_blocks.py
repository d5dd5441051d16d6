"""Run the code of the pages on every backend that it names, and compare it with the pages."""

import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import blocks
import numpy as np
import pytest

import cgshim
from cgshim import op_convert_to_numpy, op_convert_to_tensor, op_grad, op_vjp, ops

ROOT = Path(__file__).parents[2]
README, LEARN = ROOT / "README.md", ROOT / "docs" / "learn.md"
ELSEWHERE = {
    "library-authors.md": "tests/docs/test_library_authors.py",
    "porting.md": "tests/docs/test_porting.py",
    "cookbook.md": "tests/backends/torch/test_torch_mixed_precision.py",
    "writing-a-backend.md": "tests/front/test_writing_a_backend.py",
}
"""the pages whose blocks of Python other tests run"""


@contextmanager
def as_a_reader(backend, monkeypatch):
    """Nothing is chosen, and afterwards nothing is; NumPy may warn of an overflow."""
    monkeypatch.delenv("CGSHIM_BACKEND", raising=False)
    if backend == "tensorflow" and "keras" not in sys.modules:
        monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        cgshim.set_backend(None)


IN_DYNAMO = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*", "ignore:.*should not be instantiated"
)


@IN_DYNAMO
def test_the_tutorial(backend, monkeypatch):
    with as_a_reader(backend, monkeypatch):
        names = blocks.run(LEARN, backend)
        gradient, learned = (
            np.ravel(op_convert_to_numpy(names[name])) for name in ("gradient", "learned")
        )
    # as the page says before it compiles
    np.testing.assert_allclose(gradient, [22.0, 20.0, 14.0], rtol=1e-6)
    np.testing.assert_array_equal(learned, [3.0, -2.0])


NOT_TO_WRITE = {
    "x.sum()": {"tensorflow"},
    "x.reshape((2, 1))": {"tensorflow"},
    "x[None, :].T": {"tensorflow"},
    "x[None, :] @ x": {"tensorflow"},
    "x.__setitem__(0, 1.0)": {"jax", "tensorflow"},
    "x[::-1]": {"torch"},
}
"""what the tutorial says not to write, and where it fails"""


@pytest.mark.parametrize("code", NOT_TO_WRITE)
def test_what_the_tutorial_says_not_to_write(backend, code):
    with cgshim.use_backend(backend):
        x = op_convert_to_tensor([1.0, 2.0])
    if backend not in NOT_TO_WRITE[code]:
        eval(code, {"x": x})
        return
    with pytest.raises(Exception, match=r"."):
        eval(code, {"x": x})


def test_the_front_page(backend, monkeypatch):
    """Its blocks run, and the op is stable and has a stable second derivative on every backend."""
    with as_a_reader(backend, monkeypatch):
        log1pexp = blocks.run(README, backend)["log1pexp"]
        with cgshim.use_backend(backend):
            x = op_convert_to_tensor([100.0, 0.0, -100.0], "float32")
            found = [log1pexp(x), op_vjp(log1pexp, x)[1](2.0 * ops.ones_like(x))[0]]
            second = op_grad(op_grad(log1pexp))(op_convert_to_tensor(0.0, "float32"))
    assert float(op_convert_to_numpy(second)) == pytest.approx(0.25)
    expected = [[100.0, np.log(2.0), 0.0], [2.0, 1.0, 0.0]]
    np.testing.assert_allclose([*map(op_convert_to_numpy, found)], expected, rtol=1e-6, atol=1e-30)


def test_the_front_page_shows_the_op_in_two_frameworks():
    shown = [blocks.backend_of(block) for block in blocks.blocks(README.read_text())]
    assert shown[:3] == [None, "torch", "jax"]
    assert "```python" in README.read_text().splitlines()[:15]


def test_the_op_of_the_front_page_is_that_of_the_first_command():
    example = (ROOT / "examples" / "log1pexp.py").read_text()
    op = next(blocks.blocks(README.read_text())).code
    # the front page has no blank lines around the rule
    assert op.partition("@")[2] in example.replace("\n\n", "\n")


@pytest.mark.parametrize(
    "path", [README, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_every_block_is_run(path):
    """What is no doctest is run by these tests, or by those of its page."""
    plain = [block for block in blocks.blocks(path.read_text()) if not block.code.startswith(">>>")]
    assert not plain or path in (README, LEARN) or (ROOT / ELSEWHERE[path.name]).exists()
    assert {block.label for block in plain if block.label} <= set(blocks.BACKENDS)


def test_the_command_that_runs_a_page():
    command = [sys.executable, blocks.__file__, str(LEARN), "numpy"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == f"{LEARN}: every block runs on numpy\n"


def test_a_wrong_page_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("**NumPy**\n\n```python\n>>> 1 + 1\n3\n```\n")
    with pytest.raises(AssertionError, match="Expected:\n    3\nGot:\n    2"):
        blocks.run(page, "numpy")
    blocks.run(page, "torch")


def included():
    """The files, and the marks in them, that the pages show."""
    for page in (ROOT / "docs").glob("*.md"):
        for file, options in re.findall(
            r"^```{literalinclude} (\S+)\n(.*?)^```", page.read_text(), re.M | re.S
        ):
            yield (
                page.parent / file,
                re.findall(r"^:(?:start-at|end-at|pyobject): (.*)$", options, re.M),
            )


def test_what_the_pages_include_is_in_the_files():
    found = list(included())
    assert len(found) > 20
    for path, marks in found:
        for mark in marks:
            assert mark.strip("\"'") in path.read_text(), (path, mark)


def test_every_example_is_shown():
    shown = {path.resolve() for path, _ in included()}
    examples = {
        path
        for folder in ("examples", "examples/minimal", "examples/published")
        for path in (ROOT / folder).glob("[!_]*.py")
    }
    assert examples == shown
