"""The axes of batches and of devices: mapping over one, and what types and gradients owe them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import batching

from cgshim_jax import _private
from cgshim_jax._rules import as_tensor
from cgshim_jax._tracing import Array


def vmap_over(
    axis: Any, function: Callable[..., Any], in_axes: Any, out_axes: Any
) -> Callable[..., Any]:
    """Return the function over the batch that JAX is making now."""
    return jax.vmap(  # type: ignore[no-any-return]
        function, in_axes=in_axes, out_axes=out_axes,
        axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name or mesh_axis(axis),
    )  # fmt: skip


def batched_type(kind: Any, axis: Any, operands: Sequence[Array]) -> Any:
    """Return the type of a batch of what has this type, which is made of these operands."""
    if not hasattr(axis, "explicit_mesh_axis"):
        return kind.update(shape=(axis.size, *kind.shape))
    batch = _private.unmapped_aval(axis.size, 0, kind, mesh_axis(axis))
    arrays = [x for x in operands if isinstance(x, jax.Array)]  # NumPy's differ nowhere
    varying: set[Any] = set().union(*(_private.varies_over(x.aval) for x in arrays))
    own = varying.intersection(axis.spmd_name or ())  # the devices of a shard_map that share it
    return _private.varying_over(batch, _private.varies_over(batch) | own) if own else batch


def at_front(x: Array, at: int | None, axis: Any) -> Array:
    """Return an array with the batch that JAX is making now at its first axis, sharded as that is."""
    return batching.bdim_at_front(x, at, axis.size, *filter(None, [mesh_axis(axis)]))


def mesh_axis(axis: Any) -> Any:
    """Return the mesh axes over which a batch is sharded, if shardings are a part of types."""
    return getattr(axis, "explicit_mesh_axis", None)


def fit(gradient: Array, kind: Any) -> Array:
    """Return the gradient of an argument of this type, summed over the devices of a shard_map that
    share it.

    Where shardings are a part of types, it gets the argument's: what NumPy has made is not sharded.
    """
    gradient = spread(gradient, kind)
    same_on = _private.varies_over(gradient.aval) - _private.varies_over(kind)
    if same_on:
        gradient = jax.lax.psum(gradient, tuple(sorted(same_on)))
    sharding = getattr(kind, "sharding", None)
    if sharding is not None and any(sharding.spec) and gradient.aval.sharding.spec != sharding.spec:
        return jax.sharding.reshard(gradient, sharding)
    return gradient


def spread(x: Array, kind: Any) -> Array:
    """Return a tangent or a gradient as one that differs over the devices of a shard_map over which
    this type does: a constant is the same on all.
    """
    varying = _private.varies_over(kind)
    if not varying:  # x may be a Python number
        return x
    x = as_tensor(x)
    same_on = varying - _private.varies_over(x.aval)
    return _private.varied(x, tuple(sorted(same_on))) if same_on else x
