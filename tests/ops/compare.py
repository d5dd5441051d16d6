"""Compare calls of cgshim.ops with NumPy on a backend, and read docs/ops.md."""

from __future__ import annotations

import contextlib
import functools
import re
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import scipy.linalg
import scipy.special
from calls import ARRAYS

import cgshim
from cgshim import BackendError, CustomGradientError, ops


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


def documented(page: str, title: str) -> dict[str, list[str]]:
    """Return the items of each paragraph `{title} NAMES: items` of the page, by its names."""
    found = re.findall(rf"^{title} ([\w, ]+): (.*?)\n\n", page + "\n", re.MULTILINE | re.DOTALL)
    return {names: re.findall(r"`([^`]*)`", items) for names, items in found}
