"""JAX, in three ways, by what surrounds the call.

- nothing, or vmap alone: an op is f.
- derivatives around values, and vmap perhaps: f runs below the innermost derivative, on values or
  on what the others differentiate (_written). Under one derivative in reverse mode its rule runs as
  it was written, and nothing is traced; else the rule is traced when f has run.
- jit, scan, ...: f and its rule are traced, each once; what they close over becomes an argument
  (_staged).

Either way JAX sees one operation of our own, whose derivative is the rule (_primitives).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.errors import UnexpectedTracerError
from jax.lax import stop_gradient as stop_gradient
from jax.numpy import asarray as convert_to_tensor  # noqa: F401  # a member of the backend
from jax.tree_util import tree_unflatten as tree_unflatten

from cgshim.backend import Call, Mapped, WithBatches, imported_when_called
from cgshim_jax._linearity import transposed_if_linear
from cgshim_jax._rules import (
    as_tensor,
    conjugate,
    is_differentiable,
    is_tensor as is_tensor,
    type_of_upstream,
)
from cgshim_jax._staged import run_staged
from cgshim_jax._tracing import (
    Array,
    Surroundings,
    as_read,
    is_differentiated,
    is_known,
    reads_a_value,
    surroundings,
    value_below_derivatives,
)
from cgshim_jax._written import NotAsWrittenError, Written, closes_over_differentiated, note_read

# --- Tensors and trees ----------------------------------------------------------------------------


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    return jax.tree_util.tree_flatten(  # type: ignore[no-any-return]
        tree,
        is_leaf=lambda x: x is None or hasattr(x, "__next__"),  # JAX warns of iterators
    )


def convert_to_numpy(x: Array, /) -> Any:
    note_read(x)
    return np.asarray(stop_gradient(x))


# --- The gradient of a rule -----------------------------------------------------------------------

numpy_function = imported_when_called("cgshim_jax._ops", "numpy_function")
numpy_function_of = imported_when_called("cgshim_jax._ops", "numpy_function_of")
host_function = imported_when_called("cgshim_jax._host", "host_function")


def custom_gradient(call: Call, inputs: Sequence[Array], /) -> Any:
    around, inputs = surroundings(), as_read(inputs)
    if isinstance(call.f, WithBatches) and any(value_below_derivatives(x) is None for x in inputs):
        # something maps it, or may do so if it is staged
        return call.f.mapped(call, inputs)
    if around is Surroundings.NOTHING and all(map(is_known, inputs)):
        return call.output_of(inputs)
    call = call.with_needs_input_grad(
        [is_differentiated(x) is not False and is_differentiable(x) for x in inputs]
    )
    if around is Surroundings.STAGING or around is Surroundings.NOTHING:
        return run_staged(call, inputs)
    if closes_over_differentiated(call, inputs):
        try:
            return run_staged(call, inputs, values_elsewhere=True)
        except Exception as error:  # an object may hold what f does not read
            if not reads_a_value(error):
                raise
    with contextlib.suppress(NotAsWrittenError, UnexpectedTracerError):
        return Written(call, inputs, around).output()
    return run_staged(call, inputs)


def mapped(function: Mapped, inputs: Sequence[Array], /) -> Sequence[Array]:
    constants = [*map(stop_gradient, inputs)]
    return list(Written(function.call, constants, Surroundings.DERIVATIVES).output())


# --- Any function's gradient ----------------------------------------------------------------------


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


def vjp_of_rules(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], /
) -> tuple[Sequence[Array], Callable[[Sequence[Array]], Sequence[Array]]]:
    """Do as vjp does, with conjugates as rules have them."""
    outputs, pullback = vjp(fn, inputs)
    return outputs, lambda upstreams: [*map(conjugate, pullback([*map(conjugate, upstreams)]))]


def transposed(
    fn: Callable[..., Sequence[Array]],
    inputs: Sequence[Array],
    upstreams: Sequence[Array],
    refuse: Callable[[str], NoReturn],
) -> list[Array]:
    """Return the transpose of a linear function at upstreams, conjugates as rules have them."""
    types = [type_of_upstream(x.aval) for x in map(as_tensor, inputs)]
    gradients = transposed_if_linear(
        fn, types, [*map(conjugate, upstreams)], lambda what, is_seen: refuse(what)
    )
    return [*map(conjugate, gradients)]


# --- Versions -------------------------------------------------------------------------------------

LIMITS = {
    (0, 6): [
        "shard_map refuses an op, in JAX's own words",
        "jax.experimental.checkify does not look into an op whose derivative is taken around checkify",
        "the second derivative of vmap of a jax.custom_vjp around an op fails",
    ],
}
"""what versions before this one cannot do, and later ones can"""


def version_limits() -> list[str]:
    """Return what the installed JAX cannot do, and a newer one can: a sentence for each limit."""
    return [
        f"{limit} (from JAX {'.'.join(map(str, newer))} on it is as documented)"
        for newer, limits in LIMITS.items()
        for limit in limits
        if jax.__version_info__ < newer
    ]


def jvp(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], tangents: Sequence[Array], /
) -> tuple[Sequence[Array], Sequence[Array]]:
    return jax.jvp(lambda *xs: list(fn(*xs)), list(inputs), list(tangents))  # type: ignore[no-any-return]
