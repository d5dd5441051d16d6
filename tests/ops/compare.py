"""Whether a call of a NumPy function gives NumPy's numbers on a backend, or is refused; and
docs/ops.md of it.

python compare.py docs/ops.md     writes the table, where all four frameworks are installed
"""

from __future__ import annotations

import contextlib
import functools
import sys
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

What `cgshim.ops` gives on each backend, compared with NumPy 2 by {calls} calls (`nox -s ops` writes this page, and a
test of each backend says whether it is true). **ok**: NumPy's numbers, for NumPy's parameters and defaults; dtypes are
the framework's own. **refused**: one sentence, and never another number. The calls below the table are refused where
the function itself is ok. `ops.special` has SciPy's functions. What stands in no row is refused on PyTorch and
TensorFlow, and is NumPy's, SciPy's or `jax.numpy`'s own elsewhere; on NumPy the derivative of one that autograd does
not know is refused. On NumPy too, a parameter that autograd does not know (`initial`, `method`, `prepend`) has NumPy's
number for arrays, and is refused where a derivative is taken.

In one place NumPy's number does not rule: floats that are made without a dtype (`ops.ones(2)`, `ops.eye(3)`,
`ops.linspace(0, 1, 5)`, `ops.full(2, 0.5)`, `ops.asarray([1.0])`) have the framework's default: that of
`torch.get_default_dtype()` on PyTorch, float32 on TensorFlow, and on JAX float32, or float64 if it is enabled.

NumPy has no `softmax`, `log_softmax`, `logsumexp`, `relu`, `sigmoid`, `softplus`, `one_hot` and `top_k`. They have the
parameters and defaults of `jax.nn` and `jax.lax`: `ops.softmax` goes along the last axis, `ops.special.softmax`, which
is SciPy's, over all. `ops.linalg.solve_triangular` is SciPy's too.
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
    yield f"| function | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for name in next(iter(columns.values())):
        yield f"| `{name}` | {' | '.join(column[name][0] for column in columns.values())} |"
    for backend, column in columns.items():
        yield f"\nRefused on {backend}: " + ", ".join(
            f"`{call}`" for _, calls in column.values() for call in calls
        )


if __name__ == "__main__":
    columns = {backend: rows(backend) for backend in BACKENDS}
    Path(sys.argv[1]).write_text("\n".join(table(columns)) + "\n")
