"""NumPy, with the gradients of HIPS autograd.

A call that is not differentiated is plain NumPy, and imports no autograd. Under autograd an op is a
primitive (`_primitive.py`), whose derivative is the rule that f returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import FunctionType
from typing import Any, cast

import numpy as np

from cgshim.backend import BackendError, Call, imported_when_called
from cgshim_numpy import _arrays
from cgshim_numpy._arrays import (
    Array,
    convert_to_numpy as convert_to_numpy,
    convert_to_tensor as convert_to_tensor,
    derivatives,
    installed_autograd,
    is_box,
    is_tensor as is_tensor,
    stop_gradient as stop_gradient,
    tree_flatten as tree_flatten,
    tree_unflatten as tree_unflatten,
)
from cgshim_numpy._private import innermost_level

_arrays.import_derivatives = partial(import_module, "cgshim_numpy._primitive")
supports_variables = True
numpy_function = imported_when_called("cgshim_numpy._ops", "numpy_function")
numpy_function_of = imported_when_called("cgshim_numpy._ops", "numpy_function_of")
mapped = None  # NumPy has no vmap, so a batching rule is never called


def custom_gradient(call: Call, inputs: Sequence[Array], /) -> Any:
    if innermost_level() < 0 and not any(map(is_box, inputs)):
        return call.output_of(inputs)
    return derivatives().custom_gradient(call, inputs)


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
        of_f = call.with_f(f, options)
        if innermost_level() >= 0:
            are_tensors = all(map(is_tensor, inputs))
            return custom_gradient(of_f, inputs) if are_tensors else NotImplemented
        result = of_f.run(inputs)
        is_pair = type(result) is tuple and len(result) == 2
        output, rule = cast(Any, result if is_pair else (None, None))
        code = rule.__code__ if type(rule) is FunctionType else of_f
        if code is checked and type(output) in _ARRAYS and output.dtype.kind in "biufc":
            return output
        output = of_f.read_output(result, [*filter(is_tensor, inputs)])
        # a decorated function has another signature than its code
        checked = None if getattr(rule, "__dict__", True) else code
        return output

    return output_of


_ARRAYS = frozenset([np.ndarray, *[np.dtype(code).type for code in "?bhilqBHILQefdFD"]])


def host_function(call: Any, inputs: Sequence[Array], declared: Sequence[Any], /) -> list[Array]:
    return call.run([*map(convert_to_numpy, inputs)])  # type: ignore[no-any-return]


def _with_autograd(name: str) -> Callable[..., Any]:
    return lambda *args: getattr(derivatives(), name)(*args)


_OF_AUTOGRAD = ("vjp", "jvp", "vjp_of_rules", "transposed")
vjp, jvp, vjp_of_rules, transposed = map(_with_autograd, _OF_AUTOGRAD)


def version_limits() -> list[str]:
    """Return the limits that newer versions of autograd lift."""
    try:
        derivatives()
    except BackendError as error:
        return [str(error)]
    return [] if installed_autograd() >= "1.9" else [_BEFORE_1_9]


_BEFORE_1_9 = (
    "second derivatives and forward mode raise an error where f or its rule calls NumPy's own functions (np.sin), not "
    "those of autograd.numpy or cgshim.ops, and where a Python float is differentiated (use np.float64 or an array)"
)
