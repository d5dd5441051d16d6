"""JAX, by `jax.custom_vjp`; in programs and forward mode, by primitives that carry the rule.

- A call that nothing differentiates is f.
- Otherwise f and its rule run as Python functions, on values or on tracers of jit (`_calls`).
- An f that captures tracers, and its rule, become jaxprs.

`_op` has both forms. vmap, jit, scan, shard_map and checkpoint are JAX's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.errors import JAXTypeError, UnexpectedTracerError
from jax.lax import stop_gradient as stop_gradient
from jax.numpy import asarray as convert_to_tensor  # noqa: F401  # a member of the backend
from jax.tree_util import tree_unflatten as tree_unflatten
from numpy import asarray as convert_to_numpy  # noqa: F401  # a member of the backend

from cgshim.backend import (
    Call,
    Mapped,
    WithBatches,
    imported_when_called,
    tensors_inside,
)
from cgshim_jax._calls import EagerOp, trace_with_captured
from cgshim_jax._linear import transpose
from cgshim_jax._op import op, output_in_both_modes
from cgshim_jax._private import is_mapped_now
from cgshim_jax._tensors import (
    Array,
    conjugate,
    is_differentiable,
    is_tensor as is_tensor,
    is_tracer,
    typeof,
    value_of,
)

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
    held = [*call.variables, *tensors_inside([call.f, *call.static], is_tracer)]
    # a tracer that is no tensor is a reference
    held = [*{id(x): x for x in held if is_tracer(x) and is_tensor(x)}.values()]
    if not held:
        try:
            return _applied(call, inputs)
        except UnexpectedTracerError:
            pass  # f captures a tracer in an object, or in a global
    try:
        traced, args = trace_with_captured(call, inputs, held)
    except JAXTypeError:  # f branches on values, and may read none of the tracers that it holds
        return _applied(call, inputs)
    return output_in_both_modes(traced, args)


def _applied(call: Call, inputs: Sequence[Array]) -> Any:
    """Return the output of an op whose f captures no tracer.

    Outside a program a `jax.custom_vjp` is enough, and quicker. There JAX raises its own error for
    forward mode. A program may be differentiated later.
    """
    if not any(map(is_tracer, inputs)):
        output = call.output_of(inputs)
        if any(map(is_tracer, jax.tree.leaves(output))):
            raise UnexpectedTracerError("f captures a tracer")
        return output
    f, args = EagerOp(call), list(inputs)
    # below derivatives and vmap an operation on constants returns an array
    is_traced = any(value_of(x) is None for x in args) and is_tracer(jax.lax.full((), False))
    if call.forward_mode or is_traced:
        return output_in_both_modes(f, args)
    try:
        outputs = op(f, args)
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
        return tuple(map(list, function.run(size, batched, *whole)))

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
    types, vectors = [*map(typeof, inputs)], [*map(conjugate, upstreams)]
    return [*map(conjugate, transpose(lambda *xs: list(fn(*xs)), types, vectors, refuse))]


# --- Versions -------------------------------------------------------------------------------------

LIMITS = {
    (0, 6): [
        "shard_map refuses an op, in JAX's own words",
        "jax.experimental.checkify does not look into an op whose derivative is taken around checkify",
        "the second derivative of vmap of a jax.custom_vjp around an op fails",
    ],
    (0, 7): [
        "the second derivative of vmap of an op fails if its rule keeps a pullback of jax.vjp"
    ],
    (0, 9): ["Pallas kernels for TPU and GPU do not take the gradient of an op"],
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
