"""Compare calls of cgshim.ops with NumPy on every backend, and write docs/ops.md."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "ops"))
from calls import CALLS, name_of
from compare import outcome
from stub import stub

ROOT = Path(__file__).parents[1]
BACKENDS = ("numpy", "jax", "torch", "tensorflow")
HEAD = """\
# NumPy's functions

`cgshim.ops` has these functions by NumPy's names. `nox -s pages` compares {calls} calls with NumPy 2 and writes
this page; a test of each backend checks it. On the backends of its list a function returns NumPy's numbers, for NumPy's
parameters and defaults. Elsewhere it raises a `BackendError`. `ops.special` has SciPy's functions.

- Dtypes are the framework's. Floats made without a dtype (`ops.ones(2)`, `ops.eye(3)`, `ops.linspace(0, 1, 5)`) have
  its default: `torch.get_default_dtype()`, float32 on TensorFlow, float32 on JAX, or float64 if it is enabled.
- NumPy has no `softmax`, `log_softmax`, `logsumexp`, `relu`, `sigmoid`, `softplus`, `one_hot` and `top_k`. They have
  the parameters of `jax.nn` and `jax.lax`: `ops.softmax` sums over the last axis, SciPy's `ops.special.softmax` over
  all. `ops.linalg.solve_triangular` is SciPy's.
- A function that is not listed raises an error on PyTorch and TensorFlow. On NumPy and JAX it is NumPy's, SciPy's or
  `jax.numpy`'s own.
- On NumPy the derivative of a function or parameter that autograd lacks (`initial`, `method`, `prepend`) raises an
  error.

For rules, `cgshim.ops` also has `op_sum_to_shape`, the transpose of broadcasting, and `op_index_add`, the transpose of
a gather. It has `op_tree_map`, and `op_scan`, `op_while_loop` and `op_cond` with the signatures of `jax.lax`.
`cgshim.op_<name>` is `cgshim.ops.<name>`.

## Functions
"""


def rows(backend: str) -> dict[str, tuple[str, list[str]]]:
    """For each function, in the order of the calls: ok or refused, and the calls that are refused
    all the same.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for call in CALLS:
        found.setdefault(name_of(call), []).append((call, outcome(call, backend)))
    return {name: _summary(outcomes) for name, outcomes in found.items()}


def _summary(outcomes: list[tuple[str, str]]) -> tuple[str, list[str]]:
    words = {word for _, word in outcomes}
    if not words <= {"ok", "refused"}:
        return "wrong", [
            f"{call}: {word}" for call, word in outcomes if word not in ("ok", "refused")
        ]
    if words == {"refused"}:
        return "refused", []
    return "ok", [call for call, word in outcomes if word == "refused"]


def table(columns: dict[str, dict[str, tuple[str, list[str]]]]) -> Iterator[str]:
    yield HEAD.format(calls=len(CALLS))
    groups: dict[str, list[str]] = {}
    for name in next(iter(columns.values())):
        words = {backend: column[name][0] for backend, column in columns.items()}
        wrong = {*words.values()} - {"ok", "refused"}
        found_on = [backend for backend, word in words.items() if word == "ok"]
        groups.setdefault("wrong" if wrong else ", ".join(found_on), []).append(name)
    for found_on, names in groups.items():
        yield from _paragraph(f"On {found_on}:", names)
    yield "## Calls that are not supported\n\nOn these backends the function is supported, and this parameter is not.\n"
    for backend, column in columns.items():
        calls = [call for _, refused in column.values() for call in refused]
        yield from _paragraph(f"Not on {backend}:", calls)


def _paragraph(title: str, items: list[str]) -> list[str]:
    words = f"{title} {', '.join(f'`{item}`' for item in items)}"
    breakable = re.sub(r"`[^`]*`", lambda item: item[0].replace(" ", "\0"), words)
    lines = textwrap.wrap(breakable, 120, break_long_words=False, break_on_hyphens=False)
    return ["\n".join(lines).replace("\0", " "), ""]


if __name__ == "__main__":
    columns = {backend: rows(backend) for backend in BACKENDS}
    page = "\n".join(table(columns)).rstrip() + "\n"
    (ROOT / "docs" / "ops.md").write_text(page)
    (ROOT / "cgshim" / "ops" / "__init__.pyi").write_text(stub(page))
