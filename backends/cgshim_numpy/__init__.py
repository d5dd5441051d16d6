"""NumPy, with the gradients of HIPS autograd.

A call that nothing differentiates is plain NumPy (`_plain.py`), without autograd: that is imported
when somebody differentiates (`_autograd.py`), and `_derivatives.py` with it. Under autograd a call
is one primitive (`_run.py`): f runs on values, and the derivative calls its rule on values. If
outer derivatives look on, f runs once all the same, on values that record what is made of them
(`_record.py`): whatever the rule reads is a function of the arguments at each level that asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import optree

from cgshim.backend import Call, imported_when_called
from cgshim_numpy import _autograd
from cgshim_numpy._arrays import (
    BOXES,
    Array,
    is_tensor as is_tensor,
    tree_flatten as tree_flatten,
    tree_unflatten as tree_unflatten,
)
from cgshim_numpy._autograd import (
    derivatives,
    is_differentiating,
    isbox,
    version_limits as version_limits,
)
from cgshim_numpy._plain import plan as plan

if TYPE_CHECKING:
    from cgshim.host.backend import HostCall, Spec


def _import_derivatives() -> Any:
    from cgshim_numpy import _derivatives

    return _derivatives


_autograd.import_derivatives = _import_derivatives


def convert_to_tensor(x: Any, /, dtype: Any = None) -> Array:
    if any(map(isbox, optree.tree_leaves(x))):
        return derivatives().convert_to_tensor(x, dtype)
    return np.asarray(x, dtype=dtype)


def convert_to_numpy(x: Array, /) -> Any:
    return derivatives().convert_to_numpy(x) if isbox(x) else np.asarray(x)


def stop_gradient(x: Array, /) -> Array:
    return derivatives().stop_gradient(x) if isbox(x) else np.asarray(x)


numpy_function = imported_when_called("cgshim_numpy._ops", "numpy_function")
numpy_function_of = imported_when_called("cgshim_numpy._ops", "numpy_function_of")


def host_function(
    call: HostCall, inputs: Sequence[Array], declared: Sequence[Spec], /
) -> list[Array]:
    return call.run([*map(convert_to_numpy, inputs)])


def custom_gradient(call: Call, inputs: Sequence[Array], /) -> Any:
    if is_differentiating() or not BOXES.isdisjoint(map(type, inputs)):
        return derivatives().output_under_autograd(call, inputs)
    return call.output_of(inputs)


mapped = None  # nothing maps an op in NumPy, so that a rule for batches is never called


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
