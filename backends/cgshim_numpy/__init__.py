"""NumPy, with the gradients of HIPS autograd.

A call that is not differentiated is plain NumPy, and imports no autograd. Under autograd an op is a
primitive (`_primitive.py`), whose derivative is the rule that f returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import FunctionType
from typing import Any, cast

import numpy as np

from cgshim.backend import BackendError, Call, imported_when_called, refusal
from cgshim_numpy._arrays import (
    Array,
    has_autograd,
    installed_autograd,
    is_box,
    is_tensor as is_tensor,
    tree_flatten as tree_flatten,
    tree_unflatten as tree_unflatten,
)
from cgshim_numpy._private import innermost_level

supports_variables = True
mapped = None  # NumPy has no vmap, so a batching rule is never called
numpy_function = imported_when_called("cgshim_numpy._ops", "numpy_function")
numpy_function_of = imported_when_called("cgshim_numpy._ops", "numpy_function_of")


@functools.cache
def _derivatives() -> Any:
    """Import autograd, and return the half of the backend that uses it."""
    if not has_autograd(1, 7):
        raise refusal(BackendError, "cgshim", must="derivatives on NumPy need autograd 1.7 or later",
                      got=installed_autograd(), do="pip install 'autograd>=1.7'")  # fmt: skip
    return import_module("cgshim_numpy._primitive")


def _with_autograd(name: str) -> Callable[..., Any]:
    return lambda *args: getattr(_derivatives(), name)(*args)


vjp, jvp, vjp_of_rules, transposed = map(
    _with_autograd, ("vjp", "jvp", "vjp_of_rules", "transposed")
)


def convert_to_tensor(x: Any, /, dtype: Any = None) -> Array:
    if any(map(is_box, tree_flatten(x)[0])):
        return _derivatives().convert_to_tensor(x, dtype)
    return np.asarray(x, dtype=dtype)


def convert_to_numpy(x: Array, /) -> Any:
    return np.asarray(_derivatives().read(x) if is_box(x) else x)


def stop_gradient(x: Array, /) -> Array:
    return np.asarray(_derivatives().value_of(x) if is_box(x) else x)


def host_function(call: Any, inputs: Sequence[Array], /) -> list[Array]:
    return call.run([*map(convert_to_numpy, inputs)])  # type: ignore[no-any-return]


def custom_gradient(call: Call, inputs: Sequence[Array], /) -> Any:
    if innermost_level() < 0 and not any(map(is_box, inputs)):
        return call.output_of(inputs)
    return _derivatives().custom_gradient(call, inputs)


def plan(call: Call, types: Sequence[type], /) -> Callable[..., Any] | None:
    """Return the fast path for the calls of an op whose tensors have these types.

    Nearly all rules of an op have one code object. Its signature is checked in the first call.
    """
    is_plain = call.arguments.are_tensors and not call.takes_needs_input_grad
    if not is_plain or not _ARRAYS.issuperset(types):
        return None
    checked: Any = None

    def output_of(
        f: Callable[..., Any], inputs: Sequence[Array], options: Mapping[str, Any]
    ) -> Any:
        nonlocal checked
        if innermost_level() >= 0:
            return NotImplemented
        of_f = call.with_f(f, options)
        result = of_f.run(inputs)
        output, rule = cast(
            Any, result if type(result) is tuple and len(result) == 2 else (None, None)
        )
        code = rule.__code__ if type(rule) is FunctionType else of_f
        if code is checked and type(output) in _ARRAYS and output.dtype.kind in "biufc":
            return output
        output = of_f.read_output(result, [*filter(is_tensor, inputs)])
        # a decorated function has another signature than its code
        checked = None if getattr(rule, "__dict__", True) else code
        return output

    return output_of


_ARRAYS = frozenset([np.ndarray, *[np.dtype(code).type for code in "?bhilqBHILQefdFD"]])


def version_limits() -> list[str]:
    """Return the limits that newer versions of autograd lift."""
    try:
        _derivatives()
    except BackendError as error:
        return [str(error)]
    return [] if has_autograd(1, 9) else [_BEFORE_1_9]


_BEFORE_1_9 = (
    "second derivatives and forward mode raise an error where f or its rule calls NumPy's own functions (np.sin), not "
    "those of autograd.numpy or cgshim.ops, and where a Python float is differentiated (use np.float64 or an array); "
    "np.array(x) hides x from autograd, by hand too"
)
