"""JAX, by `jax.custom_vjp` and `jax.custom_jvp`.

- A call that nothing differentiates is f.
- Otherwise f and its rule run as Python functions (`_eager`), on values or on tracers of jit.
- An f that captures tracers, and its rule, become jaxprs (`_traced`).

A differentiated call is one `jax.custom_vjp` (`_op`). vmap, jit, scan, shard_map and checkpoint are
JAX's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.errors import JAXTypeError, UnexpectedTracerError
from jax.lax import stop_gradient as stop_gradient
from jax.numpy import asarray as convert_to_tensor  # noqa: F401  # a member of the backend
from jax.tree_util import tree_unflatten as tree_unflatten

from cgshim.backend import (
    Call,
    Mapped,
    WithBatches,
    closure_convert,
    imported_when_called,
    tensors_inside,
)
from cgshim_jax._eager import EagerOp
from cgshim_jax._linear import transpose
from cgshim_jax._op import op, op_in_both_modes
from cgshim_jax._private import is_mapped_now
from cgshim_jax._tensors import (
    Array,
    are_traced,
    conjugate,
    convert_to_numpy as convert_to_numpy,
    fresh_constant,
    is_connected,
    is_differentiable,
    is_tensor as is_tensor,
    is_tracer,
    typeof,
    value_of,
)
from cgshim_jax._traced import trace_with_captured

supports_variables = True
numpy_function = imported_when_called("cgshim_jax._ops", "numpy_function")
numpy_function_of = imported_when_called("cgshim_jax._ops", "numpy_function_of")
host_function = imported_when_called("cgshim_jax._host", "host_function")


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    return jax.tree_util.tree_flatten(  # type: ignore[no-any-return]
        tree,
        is_leaf=lambda x: x is None or hasattr(x, "__next__"),  # JAX warns of iterators
    )


# --- The gradient of a rule -----------------------------------------------------------------------


def custom_gradient(call: Call, inputs: Sequence[Array], /) -> Any:
    if isinstance(call.f, WithBatches) and any(value_of(x) is None for x in inputs):
        return call.f.mapped(call, inputs)  # vmap maps it, or may map it later
    if isinstance(call.f, Mapped) and is_mapped_now(inputs):
        return _map(call.f, inputs)
    held = _captured_tracers(call, inputs)
    if not held:
        try:
            return _without_captured(call, inputs)
        except UnexpectedTracerError:
            pass  # f captures a tracer in an object, or in a global
    try:
        return _applied(*trace_with_captured(call, inputs, held))
    except JAXTypeError:  # f branches on values
        if any(map(is_connected, call([*map(fresh_constant, inputs)])[0])):
            raise
    return _applied(EagerOp(call), list(inputs))  # f reads none of the tracers that it holds


def _captured_tracers(call: Call, inputs: Sequence[Array]) -> list[Array]:
    """Return the tracers among the variables, in f's closure and in objects that f holds."""
    function = partial(call.f, *call.static) if call.static else call.f
    converted = closure_convert(function, call.backend)
    held = [*call.variables, *converted.residuals, *tensors_inside(converted.opaque, is_tensor)]
    return [*{id(x): x for x in held if is_tracer(x)}.values()]


def _without_captured(call: Call, inputs: Sequence[Array]) -> Any:
    if any(map(is_tracer, inputs)):
        return _applied(EagerOp(call), list(inputs))
    output = call.output_of(inputs)
    if any(map(is_connected, jax.tree.leaves(output))):
        raise UnexpectedTracerError("f captures a tracer")
    return output


def _applied(f: Any, args: list[Array]) -> Any:
    """Return the output of an op; unpromised forward mode raises an error.

    Outside a program `op` is enough, and quicker: JAX raises its own error for forward mode here. A
    program may be differentiated later.
    """
    call: Call = f.call
    both = call.forward_mode or are_traced(args)
    try:
        outputs = (op_in_both_modes if both else op)(f, args)
    except (NotImplementedError, TypeError) as error:  # raised by JAX for any custom_vjp
        if "forward-mode" not in str(error) and "custom_lin" not in str(error):
            raise
        call.refuse_forward_mode("jvp, jacfwd or linearize")
    return f.spec.combine(outputs)


def mapped(function: Mapped, inputs: Sequence[Array], /) -> Sequence[Array]:
    return _map(function, [*map(stop_gradient, inputs)])


def _map(function: Mapped, inputs: Sequence[Array]) -> list[Array]:
    @custom_vmap  # type: ignore[untyped-decorator]
    def call(*tensors: Array) -> list[Array]:
        return list(function.run(None, [False] * len(tensors), *tensors)[0])

    @call.def_vmap  # type: ignore[untyped-decorator]
    def _(size: int, in_batched: Sequence[bool], *tensors: Array) -> Any:
        batched = [is_in or at in function.in_batch for at, is_in in enumerate(in_batched)]
        whole = [
            jnp.broadcast_to(x, (size, *x.shape)) if has and not is_in else x
            for x, has, is_in in zip(tensors, batched, in_batched, strict=True)
        ]
        outputs, have = function.run(size, batched, *whole)
        return list(outputs), list(have)

    return call(*inputs)  # type: ignore[no-any-return]


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


def jvp(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], tangents: Sequence[Array], /
) -> tuple[Sequence[Array], Sequence[Array]]:
    return jax.jvp(lambda *xs: list(fn(*xs)), list(inputs), list(tangents))  # type: ignore[no-any-return]


def vjp_of_rules(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], /
) -> tuple[Sequence[Array], Callable[[Sequence[Array]], Sequence[Array]]]:
    """Return what vjp returns, with conjugates as rules have them."""
    outputs, pullback = vjp(fn, inputs)
    return outputs, lambda upstreams: [*map(conjugate, pullback([*map(conjugate, upstreams)]))]


def transposed(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], upstreams: Sequence[Array],
    refuse: Callable[[str], NoReturn],
) -> list[Array]:  # fmt: skip
    """Return the transpose of a linear function at upstreams, conjugates as rules have them."""
    function = lambda *xs: list(fn(*xs))
    types, vectors = [*map(typeof, inputs)], [*map(conjugate, upstreams)]
    return [*map(conjugate, transpose(function, types, vectors, refuse))]


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
    """Return a sentence for each feature that the installed JAX lacks and a newer one has."""
    return [
        f"{limit} (from JAX {'.'.join(map(str, newer))} on it is as documented)"
        for newer, limits in LIMITS.items()
        for limit in limits
        if jax.__version_info__ < newer
    ]
