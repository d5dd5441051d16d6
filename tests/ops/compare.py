"""Compare calls of cgshim.ops with NumPy on a backend, and write docs/ops.md.

python compare.py docs/ops.md     needs all four frameworks
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optree
import scipy.linalg
import scipy.special
from calls import ARRAYS, CALLS, name_of

import cgshim
from cgshim import BackendError, CustomGradientError, ops

BACKENDS = ("numpy", "jax", "torch", "tensorflow")
HEAD = """\
# NumPy's functions

`cgshim.ops` has these functions by NumPy's names. `nox -s ops` compares {calls} calls with NumPy 2 and writes this
page; a test of each backend checks it. On the backends of its list a function returns NumPy's numbers, for NumPy's
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


class Reference:
    """NumPy itself, SciPy's special functions, and what networks are made of."""

    special = scipy.special
    linalg = types.SimpleNamespace(
        **vars(np.linalg), solve_triangular=scipy.linalg.solve_triangular
    )

    def __getattr__(self, name: str) -> Any:
        return _OF_NETWORKS[name] if name in _OF_NETWORKS else getattr(np, name)


def _one_hot(x: Any, num_classes: int, *, dtype: Any = float, axis: int = -1) -> Any:
    return np.moveaxis((x[..., None] == np.arange(num_classes)).astype(dtype), -1, axis)


def _top_k(operand: Any, k: int) -> tuple[Any, Any]:
    indices = np.argsort(-operand, -1, kind="stable")[..., :k]
    return np.take_along_axis(operand, indices, -1), indices


_OF_NETWORKS: dict[str, Callable[..., Any]] = {
    "softmax": lambda x, axis=-1: scipy.special.softmax(x, axis),
    "log_softmax": lambda x, axis=-1: scipy.special.log_softmax(x, axis),
    "logsumexp": scipy.special.logsumexp,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": scipy.special.expit,
    "softplus": lambda x: np.logaddexp(x, 0),
    "one_hot": _one_hot,
    "top_k": _top_k,
}


class _Names(dict[str, Any]):
    """The names in a call: the arrays, and else functions."""

    def __init__(self, functions: Any, arrays: dict[str, Any]) -> None:
        super().__init__(arrays, inf=np.inf)
        self._functions = functions

    def __missing__(self, name: str) -> Any:
        return getattr(self._functions, name)


def run(call: str, functions: Any, arrays: dict[str, Any]) -> list[Any]:
    """The arrays that a call returns."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found = eval(call, _Names(functions, arrays))  # our own text
    return optree.tree_leaves(found)


def outcome(call: str, backend: str) -> str:
    """ "ok", "refused", or what is wrong."""
    wanted = run(call, Reference(), ARRAYS)
    try:
        with wide(backend), cgshim.use_backend(backend):
            found = run(call, ops, tensors(backend))
    except CustomGradientError as error:
        return (
            "refused"
            if isinstance(error, BackendError) and str(error).startswith("op_")
            else repr(error)
        )
    except (TypeError, NotImplementedError):  # the framework's own: not for these arguments
        return "refused"
    except Exception as error:  # noqa: BLE001  # whatever it is stands in the table
        return repr(error)
    if len(wanted) != len(found):
        return f"{len(found)} arrays for {len(wanted)}"
    return next(filter(None, map(_difference, wanted, found)), "ok")


def wide(backend: str) -> contextlib.AbstractContextManager[Any]:
    """With float64, which JAX has only when it is asked for."""
    if backend != "jax":
        return contextlib.nullcontext()
    import jax

    return jax.enable_x64(True)


@functools.cache
def tensors(backend: str) -> dict[str, Any]:
    make: Callable[[Any], Any] = ops.convert_to_tensor
    with cgshim.use_backend(backend):
        return {name: make(array) for name, array in ARRAYS.items()}


def _difference(wanted: Any, found: Any) -> str:
    wanted, found = np.asarray(wanted), ops.convert_to_numpy(found)
    if wanted.shape != found.shape:
        return f"{found.shape} for {wanted.shape}"
    if wanted.dtype.kind.replace("u", "i") != found.dtype.kind.replace("u", "i"):
        return f"{found.dtype} for {wanted.dtype}"
    tolerance = 1e-5 if np.float32 in (wanted.dtype, found.dtype) else 1e-10
    if not np.allclose(
        wanted, found, rtol=tolerance, atol=tolerance, equal_nan=wanted.dtype.kind in "fc"
    ):
        return f"{found} for {wanted}"
    return ""


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


def documented(page: str, title: str) -> dict[str, list[str]]:
    """Return the items of each paragraph `{title} NAMES: items` of the page, by its names."""
    found = re.findall(rf"^{title} ([\w, ]+): (.*?)\n\n", page + "\n", re.MULTILINE | re.DOTALL)
    return {names: re.findall(r"`([^`]*)`", items) for names, items in found}


if __name__ == "__main__":
    columns = {backend: rows(backend) for backend in BACKENDS}
    Path(sys.argv[1]).write_text("\n".join(table(columns)).rstrip() + "\n")
