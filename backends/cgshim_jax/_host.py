"""A host function as one operation: run at once where values are known, called by the compiled
program where not.

jax.pure_callback does the second as well. Called eagerly it compiles a program for each function,
and waits for ever if the function uses JAX itself (seen in 0.10); and it gives the function JAX's
arrays, which costs more than a small one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, mlir
from jax.sharding import NamedSharding, PartitionSpec

from cgshim.backend import (
    CustomGradientTypeError,
    TransformationError,
    describe,
    refusal,
)
from cgshim.host.backend import HostCall, Spec, refuse_host_derivative
from cgshim_jax._axes import mesh_axis
from cgshim_jax._private import callback_sharding, is_exported, lowered_each_time, type_made_of
from cgshim_jax._tracing import primitive

Array = Any
Types = tuple[tuple[tuple[int, ...], Any], ...]
"""shapes and dtypes of the results: without 64 bits if JAX has none"""


def host_function(
    call: HostCall, inputs: Sequence[Array], declared: Sequence[Spec], /
) -> Sequence[Array]:
    for x in inputs:
        if not isinstance(x.dtype, np.dtype):
            raise refusal(CustomGradientTypeError, call.name,
                          must="a function on the host is given arrays of numbers", got=describe(x),
                          do="give it jax.random.key_data(key)")  # fmt: skip
    types = tuple(
        [(tuple(spec.shape), jax.dtypes.canonicalize_dtype(spec.dtype)) for spec in declared]
    )
    # As the call is callable, no cache of JAX keeps it alive. JAX lowers equal operations once, and
    # then XLA runs them once.
    return _host.bind(*inputs, call=call, types=types)  # type: ignore[no-any-return]


# --- The operation --------------------------------------------------------------------------------


def _types(*operands: Any, call: HostCall, types: Types) -> list[Any]:
    return [type_made_of(operands, shape, dtype) for shape, dtype in types]


def _run_now(*operands: Array, call: HostCall, types: Types) -> list[Array]:
    results = _run(call, types, list(map(_value_of, operands)))
    place = _place_of(operands)
    return [jax.device_put(y, place) for y in results]


def _value_of(x: Any) -> Any:
    """Return a NumPy array. x may be a number that stands in a jaxpr, with a dtype of its own or
    JAX's default.
    """
    return np.asarray(x, x.dtype if hasattr(x, "dtype") else jnp.asarray(x).dtype)


def _run(call: HostCall, types: Types, arrays: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        [y.astype(dtype, copy=False) for y, (_, dtype) in zip(call.run(arrays), types, strict=True)]
    )


def _place_of(operands: Sequence[Array]) -> Any:
    """Return where results belong: where an operand was put by its owner; None if JAX may choose."""
    for x in operands:
        if getattr(x, "committed", False):
            if len(x.sharding.device_set) == 1:
                return x.sharding
            if isinstance(x.sharding, NamedSharding):
                return NamedSharding(x.sharding.mesh, PartitionSpec())
    return None


def _batch(
    axis: Any, operands: Sequence[Array], at: Sequence[int | None], *, call: HostCall, types: Types
) -> Any:
    batched = [i is not None for i in at]
    if not any(batched):  # JAX asks even where nothing is
        return _host.bind(*operands, call=call, types=types), [None] * len(types)
    over = tuple([((axis.size, *shape), dtype) for shape, dtype in types])
    first = [x if i is None else jnp.moveaxis(x, i, 0) for x, i in zip(operands, at, strict=True)]
    results = _host.bind(*first, call=call.over(batched), types=over)
    if mesh_axis(axis) is not None:  # a part of their types, where shardings are one
        results = [jax.sharding.reshard(y, PartitionSpec(mesh_axis(axis))) for y in results]
    return results, [0] * len(types)


def _refuse(*operands: Any, call: HostCall, types: Types) -> NoReturn:
    refuse_host_derivative(call.name)


def _lower(context: Any, *operands: Any, call: HostCall, types: Types) -> Any:
    if is_exported(context):
        raise refusal(TransformationError, call.name,
                      must="what runs on the host is a part of this process", got="jax.export",
                      do="export what comes before it and what comes after it")  # fmt: skip

    def run(*arrays: Any) -> tuple[Any, ...]:
        return _run(call, types, arrays)

    results, _, _ = mlir.emit_python_callback(
        context, run, None, list(operands), context.avals_in, context.avals_out,
        has_side_effect=False, sharding=callback_sharding(context),
    )  # fmt: skip
    return results


_host = primitive("cgshim_host", _run_now, _types, _refuse, _batch, _lower)
ad.primitive_transposes[_host] = _refuse
if jax.default_backend() == "tpu":  # where each call has a channel of its own
    mlir.register_lowering(_host, _lower, **lowered_each_time)
