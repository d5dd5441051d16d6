"""JAX, in three ways, by what surrounds the call.

- nothing, or vmap alone: an op is f.
- reverse mode, with or without vmap: f runs on the values below the derivatives, and nothing is staged (_eager).
- jit, scan, forward mode, ...: f and its rule are staged, each once; what they captured becomes an argument (_staged).
  Within jit a call is one operation, and its rule is staged when a derivative is taken (_deferred, _late).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import ConcretizationTypeError, TracerArrayConversionError

from cgshim.backend import SIMPLE, search_closure, tensors_inside
from cgshim_jax._eager import NotEagerError, run_eagerly
from cgshim_jax._rules import is_differentiable, is_running_rule
from cgshim_jax._staged import run_in_rule, run_staged
from cgshim_jax._tracing import Surroundings, is_differentiated, is_known, is_tracer, surroundings
from cgshim_jax._versions import version_limits as version_limits

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
    captured, rebuild, _, objects, _ = search_closure(call.f, is_tracer)
    in_reverse_mode = around is Surroundings.GRADIENTS
    if around is Surroundings.LINEARIZATIONS:  # forward mode may be next, which takes a staged op
        in_reverse_mode = not call.forward_mode
    may_be_eager = in_reverse_mode and not captured
    if may_be_eager and _holds_differentiated(call, objects):  # f very likely reads it, and cannot run eagerly
        with contextlib.suppress(ConcretizationTypeError, TracerArrayConversionError):
            return run_staged(call, inputs)
    if may_be_eager:
        with contextlib.suppress(NotEagerError):
            return run_eagerly(call, inputs)
    return run_in_rule(call, inputs, captured, rebuild) if is_running_rule() else run_staged(call, inputs)


def _holds_differentiated(call: Call, objects: Sequence[Any]) -> bool:
    """Return True if f is given, or holds, an object with a tracer that is differentiated, such as a Flax module."""
    if is_running_rule():
        return False
    given = [leaf for spec in call.arguments.specs for leaf in spec.static_leaves()]
    holders = [x for x in (*objects, *given, *call.options.values()) if type(x) not in SIMPLE]
    return any(is_differentiated(x) for each in holders for x in tensors_inside(each, is_tracer, _DEPTH))


_DEPTH = 8
"""at which the parameters of a Flax module in a module lie"""


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
