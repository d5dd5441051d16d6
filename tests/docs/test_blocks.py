"""The code that the pages show runs, on every backend that it names, and finds what the pages say."""

import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import blocks
import numpy as np
import pytest

import cgshim
from cgshim import op_convert_to_numpy, op_convert_to_tensor, op_grad

ROOT = Path(__file__).parents[2]
README, LEARN = ROOT / "README.md", ROOT / "docs" / "learn.md"
ELSEWHERE = {
    "library-authors.md": "tests/docs/test_library_authors.py",
    "porting.md": "tests/docs/test_porting.py",
    "cookbook.md": "tests/torch/test_torch_mixed_precision.py",
    "writing-a-backend.md": "tests/front/test_writing_a_backend.py",
}
"""the pages whose blocks of Python other tests run"""

IMAGES = np.array([[1.0, 2.0], [0.5, -1.0], [-2.0, 0.25]], "float32")
LABELS = np.array([1.0, -1.0, 1.0], "float32")


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


STEPS = {
    "torch": lambda names, *data: names["step"](*data) or names["weights"].detach(),
    "tensorflow": lambda names, *data: names["step"](*data) or names["weights"].read_value(),
    "jax": lambda names, *data: names["step"](0.0 * data[0][0], *data),
    "numpy": lambda names, *data: names["step"](0.0 * data[0][0], *data),
}
"""the weights after a step of each tab of the front page"""


@pytest.mark.filterwarnings("ignore:AutoGraph")
def test_the_front_page(backend, monkeypatch):
    with as_a_reader(backend, monkeypatch):
        names = blocks.run(README, backend)
        with cgshim.use_backend(backend):
            data = [op_convert_to_tensor(array) for array in (IMAGES, LABELS)]
            weights = op_convert_to_numpy(STEPS[backend](names, *data))
    np.testing.assert_allclose(weights, 0.1 * 0.5 * (LABELS[:, None] * IMAGES).mean(0), rtol=1e-6)


def test_the_op_of_the_front_page_is_that_of_the_first_command():
    """And its value and derivatives are right where exp overflows."""
    example = (ROOT / "examples" / "log1pexp.py").read_text()
    [op, *_] = [block.code for block in blocks.blocks(README.read_text())]
    assert op.partition("@")[2] in example
    names = {}
    exec(op, names)
    x = np.float32(100.0)
    assert [float(fn(x)) for fn in (names["log1pexp"], op_grad(names["log1pexp"]))] == [100.0, 1.0]


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
        for folder in ("examples", "examples/published")
        for path in (ROOT / folder).glob("[!_]*.py")
    }
    assert examples == shown
