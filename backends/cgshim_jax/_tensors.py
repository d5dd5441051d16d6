"""Questions about JAX's tensors, and the small functions that the other modules share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

from cgshim_jax._private import primal_of

Array = Any

# before 0.6 jax.core.get_aval does the same
typeof: Any = getattr(jax, "typeof", None) or jax.core.get_aval


def is_tensor(x: object) -> bool:
    """Return True if x is an array, or a tracer that stands for one."""
    return isinstance(x, jax.Array)


def is_tracer(x: object) -> bool:
    """Return True if x stands for a value that is differentiated, mapped or not known yet."""
    return isinstance(x, jax.core.Tracer)


def is_differentiable(x: Any) -> bool:
    """Return True if x has a gradient."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def as_tensor(x: Any) -> Array:
    """Return x as a tensor: JAX passes on the numbers and NumPy arrays that it was given."""
    return x if is_tensor(x) else jax.device_put(x)  # jnp.asarray may return a tracer


def fresh_constant(x: Array) -> Array:
    """Return x without a derivative, as an object of its own if x is a tracer."""
    if not is_tracer(x):
        return x
    x = primal_of(x)
    return as_tensor(stop_gradient(x) if is_tracer(x) else jnp.copy(x))


def value_of(x: Array) -> Array | None:
    """Return the value below all derivatives of x; None if x is traced by jit, or a batch."""
    return x.to_concrete_value() if is_tracer(x) else x


def zeros_of(like: Any) -> Array:
    """Return zeros like a tensor, or of a type; False for a type that has no zero."""
    kind = like if isinstance(like, jax.core.ShapedArray) else typeof(like)
    dtype = kind.dtype if isinstance(kind.dtype, np.dtype) else bool
    return matching(jnp.zeros(kind.shape, dtype), kind)


def conjugate(gradient: Array) -> Array:
    """Turn a gradient of JAX into a gradient of a rule, or back: complex ones are conjugates."""
    return jnp.conj(gradient) if jnp.iscomplexobj(gradient) else gradient


# --- The devices of a shard_map -------------------------------------------------------------------


def matching(gradient: Array, kind: Any) -> Array:
    """Return a gradient as the gradient of a tensor of this type.

    The devices of a shard_map that share a tensor sum their gradients. Where shardings are a part
    of types, the gradient is sharded as the tensor.
    """
    own, wanted = varies_over(typeof(gradient)), varies_over(kind)
    if own - wanted:
        gradient = jax.lax.psum(gradient, tuple(sorted(own - wanted)))
    if wanted - own:
        gradient = varied(gradient, tuple(sorted(wanted - own)))
    sharding = getattr(kind, "sharding", None)
    if sharding is not None and any(sharding.spec) and typeof(gradient).sharding != sharding:
        return jax.sharding.reshard(gradient, sharding)
    return gradient


def varies_over(kind: Any) -> frozenset[Any]:
    """Return the mesh axes of a shard_map over which tensors of this type differ."""
    return kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", frozenset())


def varied(x: Array, axes: tuple[Any, ...]) -> Array:
    """Return x as a tensor that may differ over these mesh axes of a shard_map."""
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axes, to="varying")
    return jax.lax.pvary(x, axes)  # before 0.9
