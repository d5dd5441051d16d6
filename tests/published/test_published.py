"""Each published function: its value by another formula, and its derivatives by differences, eager
and compiled.
"""

import ast
import importlib
import re
from pathlib import Path

import custom_root
import entmax
import numpy as np
import pytest
from published_cases import CASES

from cgshim import op_convert_to_numpy, op_convert_to_tensor, op_value_and_grad, ops
from cgshim._registry import load
from cgshim.testing import check_gradients
from cgshim.testing._functions import double_precision

EXAMPLES = Path(__file__).parents[2] / "examples" / "published"
PAGE = EXAMPLES.parents[1] / "docs" / "published.md"
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
# other cases compile the same code, of other shapes and numbers
SEEN_COMPILED = {"entmax of rows", "fake quantisation of channels", "matern 3/2",
                 "adjoint of a differential equation"}  # fmt: skip
TO_COMPILE = {name: case for name, case in CASES.items() if name not in SEEN_COMPILED}


@pytest.fixture(autouse=True)
def in_double_precision(backend, on_backend):
    with double_precision(load(backend)):
        yield


def tensors(args):
    return [op_convert_to_tensor(np.asarray(arg)) for arg in args]


def flat(tree):
    """The numbers of a tree of tensors."""
    if isinstance(tree, (tuple, list)):
        return np.concatenate([flat(each) for each in tree])
    return np.ravel(op_convert_to_numpy(tree))


def floats(outputs):
    """The outputs without those of integers, the indices of neighbours."""
    if not isinstance(outputs, tuple):
        return outputs
    found = tuple(y for y in outputs if ops.dtype(y).startswith("float"))
    return found if len(found) > 1 else found[0]


@EACH
def test_value(case):
    expected = case.value(*map(np.asarray, case.args))
    np.testing.assert_allclose(
        flat(case.op(*tensors(case.args))), flat(expected), rtol=1e-6, atol=1e-6
    )


@EACH
def test_derivatives(case):
    check_gradients(case.op, tensors(case.args), order=case.order, modes=["reverse"],
                    argnums=case.differentiated, against=case.surrogate)  # fmt: skip


def _by_torch(torch, fn, whole, at):
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=whole)

    def value_and_gradient(*args):
        inputs = [args[n].requires_grad_() for n in at]
        value = compiled(*args)
        return value.detach(), torch.autograd.grad(value, inputs)

    return value_and_gradient


COMPILERS = {
    "jax": lambda jax, fn, _, at: jax.jit(op_value_and_grad(fn, at)),
    # AutoGraph, to which the long loops here are many calls, sees the cookbook's functions
    "tensorflow": lambda tensorflow, fn, _, at: tensorflow.function(
        op_value_and_grad(fn, at), autograph=False
    ),
    "torch": _by_torch,
    "numpy": lambda _, fn, __, at: op_value_and_grad(fn, at),  # it compiles nothing
}
IN_DYNAMO = pytest.mark.filterwarnings(  # seen with torch 2.13, November 2026
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:The .grad attribute:UserWarning",
)


@pytest.fixture
def nothing_is_compiled(backend):
    """Let torch.compile forget what earlier tests compiled: it gives up after eight versions of a
    function.
    """
    if backend == "torch":
        importlib.import_module("torch").compiler.reset()


@pytest.fixture
def few_steps(monkeypatch):
    """Three steps of the solvers instead of 50 and 8: compiled code unrolls their loops."""
    for module in (entmax, custom_root):
        monkeypatch.setattr(module, "range", lambda count: range(count)[:3], raising=False)


@pytest.mark.parametrize("case", TO_COMPILE.values(), ids=TO_COMPILE.keys())
@IN_DYNAMO
@pytest.mark.usefixtures("nothing_is_compiled", "few_steps")
def test_in_compiled_code(backend, case):
    fn = sines_of(case.op)
    compiled = COMPILERS[backend](
        importlib.import_module(backend), fn, not case.breaks_graph, case.differentiated
    )
    expected = op_value_and_grad(fn, case.differentiated)(*tensors(case.args))
    np.testing.assert_allclose(
        flat(compiled(*tensors(case.args))), flat(expected), rtol=1e-6, atol=1e-9
    )


def sines_of(op):
    """A scalar, for which the upstream gradients of the op's outputs differ from 1 and from each
    other.
    """

    def total(*args):
        outputs = floats(op(*args))
        return sum(
            ops.sum(ops.sin(y + 0.3))
            for y in (outputs if isinstance(outputs, tuple) else [outputs])
        )

    return total


FILES = pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)


@FILES
def test_a_file_has_45_lines_at_most_and_names_its_source(path):
    source = path.read_text()
    assert len(source.splitlines()) <= 45
    assert re.search(
        r"Published as\s.+\sin\s[\w-]+/[\w-]+", ast.get_docstring(ast.parse(source)), re.DOTALL
    )


@FILES
def test_the_page_counts_the_lines_of_code(path):
    row = re.search(rf"\| \[`{path.name}`\]\(.*\) \| .* \| \d+ \| (\d+) \|", PAGE.read_text())
    assert int(row[1]) == lines_of_code(path.read_text())


def lines_of_code(source):
    """How many lines a file has without comments, docstrings and blank lines."""
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    texts = [node for node in statements if isinstance(node.value, ast.Constant)]
    documentation = {line for text in texts for line in range(text.lineno, text.end_lineno + 1)}
    numbered = enumerate(source.splitlines(), 1)
    return sum(at not in documentation and not re.match(r"\s*(#|$)", line) for at, line in numbered)
