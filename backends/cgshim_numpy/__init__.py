"""NumPy, with the gradients of HIPS autograd.

A call that nothing differentiates is plain NumPy, and imports no autograd. Under autograd an op is
a primitive (`_primitive.py`), whose derivative is the rule that f returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from cgshim.backend import BackendError, Call, add_origin, imported_when_called, run_on
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

if TYPE_CHECKING:
    from cgshim.host.backend import HostCall, Spec

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
    arguments, backend = call.arguments, call.backend
    is_plain = arguments.are_tensors and not call.takes_needs_input_grad
    if not is_plain or not _ARRAYS.issuperset(types):
        return None
    checked: CodeType | None = None

    def output_of(
        f: Callable[..., Any], inputs: Sequence[Array], options: Mapping[str, Any]
    ) -> Any:
        nonlocal checked
        if innermost_level() >= 0:
            are_tensors = all(map(is_tensor, inputs))
            return (
                custom_gradient(call.with_f(f, options), inputs) if are_tensors else NotImplemented
            )
        try:
            result = run_on(backend, inputs, False, f, *inputs, **options)
        except Exception as error:
            add_origin(error, call.name, "f")
            raise
        rule = result[-1] if type(result) is tuple and len(result) == 2 else None
        code = rule.__code__ if type(rule) is FunctionType else None
        if code is not None and code is checked:
            output = result[0]
            if type(output) in _ARRAYS and output.dtype.kind in "biufc":
                return output
        output = call.with_f(f, options).read_output(result, inputs)
        # a decorated function has another signature than its code
        checked = None if code is None or rule.__dict__ else code
        return output

    return output_of


_ARRAYS = frozenset([np.ndarray, *[np.dtype(code).type for code in "?bhilqBHILQefdFD"]])


def host_function(
    call: HostCall, inputs: Sequence[Array], declared: Sequence[Spec], /
) -> list[Array]:
    return call.run([*map(convert_to_numpy, inputs)])


def vjp(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], /
) -> tuple[Sequence[Array], Callable[[Sequence[Array]], Sequence[Array]]]:
    return derivatives().vjp(fn, inputs)  # type: ignore[no-any-return]


def vjp_of_rules(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], /
) -> tuple[Sequence[Array], Callable[[Sequence[Array]], Sequence[Array]]]:
    return derivatives().vjp_of_rules(fn, inputs)  # type: ignore[no-any-return]


def transposed(*linear: Any) -> Sequence[Array]:
    return derivatives().transposed(*linear)  # type: ignore[no-any-return]


def version_limits() -> list[str]:
    """Return what only other versions of autograd can do."""
    try:
        derivatives()
    except BackendError as error:
        return [str(error)]
    return [] if installed_autograd() >= [1, 9] else [_BEFORE_1_9]


_BEFORE_1_9 = (
    "second derivatives and forward mode raise an error where f or its rule calls NumPy's own functions (np.sin), and not "
    "those of autograd.numpy or cgshim.ops (from autograd 1.9 on it is as documented)"
)
