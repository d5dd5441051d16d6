"""JAX, in four ways, by what surrounds the call.

- nothing, or vmap alone: an op is f.
- one derivative in reverse mode: f and its rule run as they were written, and nothing is traced (_written).
- several, or one and vmap: f runs once below the innermost, and its rule is traced there (_written).
- jit, scan, forward mode, ...: f and its rule are staged, each once; what they captured becomes an argument (_staged).
  Within jit a call is one operation, until a derivative or a batch of it is asked for (_deferred).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from cgshim_jax._rules import is_differentiable
from cgshim_jax._staged import run_staged
from cgshim_jax._tracing import (
    CONCRETIZATION_ERRORS,
    Surroundings,
    has_one_derivative,
    is_differentiated,
    is_known,
    surroundings,
)
from cgshim_jax._versions import version_limits as version_limits
from cgshim_jax._written import (
    NotAsWrittenError,
    closes_over_differentiated,
    note_read,
    run_as_written,
    run_on_levels,
)

if TYPE_CHECKING:
    from cgshim.backend import Call, HostCall, Spec

Array = Any


# --- Tensors and trees ------------------------------------------------------------------------------------------


def is_tensor(x: object, /) -> bool:
    return isinstance(x, jax.Array)


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    leaves, structure = jax.tree_util.tree_flatten(tree, is_leaf=_is_leaf)
    return leaves, structure


def _is_leaf(x: Any) -> bool:
    return x is None or hasattr(x, "__next__")  # JAX warns of iterators


def tree_unflatten(structure: Any, leaves: Sequence[Any], /) -> Any:
    return jax.tree_util.tree_unflatten(structure, leaves)


def convert_to_tensor(x: Any, /, dtype: Any = None) -> Array:
    return jnp.asarray(x, dtype=dtype)


def convert_to_numpy(x: Array, /) -> Any:
    if is_differentiated(x):
        note_read()
    return np.asarray(jax.lax.stop_gradient(x))


def stop_gradient(x: Array, /) -> Array:
    return jax.lax.stop_gradient(x)


# --- The gradient of a rule -------------------------------------------------------------------------------------


def numpy_function(name: str, /) -> Callable[..., Any] | None:
    from cgshim_jax._numpy import numpy_function

    return numpy_function(name)


def host_function(call: HostCall, inputs: Sequence[Array], declared: Sequence[Spec], /) -> Sequence[Array]:
    from cgshim_jax._host import host_function

    return host_function(call, inputs, declared)


def custom_gradient(call: Call, inputs: Sequence[Array], /) -> Any:
    around = surroundings()
    if around is Surroundings.NOTHING and all(map(is_known, inputs)):
        return call.output_of(inputs)
    call = call.with_needed([is_differentiated(x) is not False and is_differentiable(x) for x in inputs])
    in_reverse_mode = around is Surroundings.GRADIENTS
    if around is Surroundings.LINEARIZATIONS:  # forward mode may be next, which takes a staged op
        in_reverse_mode = not call.forward_mode
    if not in_reverse_mode:
        return run_staged(call, inputs)
    if closes_over_differentiated(call):
        with contextlib.suppress(*CONCRETIZATION_ERRORS):  # an object may hold what f does not read
            return run_staged(call, inputs, raised=CONCRETIZATION_ERRORS)
    with contextlib.suppress(NotAsWrittenError):
        return (run_as_written if has_one_derivative() else run_on_levels)(call, inputs)
    return run_staged(call, inputs)


# --- Any function's gradient ------------------------------------------------------------------------------------


def vjp(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], /
) -> tuple[Sequence[Array], Callable[[Sequence[Array]], Sequence[Array]]]:
    outputs, pullback = jax.vjp(lambda *xs: list(fn(*xs)), *inputs)

    def gradients(upstreams: Sequence[Array]) -> list[Array]:
        cotangents = [
            upstream if is_differentiable(y) else np.zeros(y.shape, jax.dtypes.float0)
            for upstream, y in zip(upstreams, outputs, strict=True)
        ]
        return list(pullback(cotangents))

    return outputs, gradients
