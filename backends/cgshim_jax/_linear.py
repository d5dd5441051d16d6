"""The transpose of a rule, which is its forward mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cgshim_jax._tensors import Array, is_tracer, typeof, zeros_of


def transpose(
    function: Callable[..., list[Array]],
    types: Sequence[Any],
    vectors: Sequence[Array],
    refuse: Callable[[str], Any],
) -> list[Array]:
    """Return the transpose of a linear function of tensors of these types, applied to vectors.

    JAX drops the constant term of a function that is not linear. Where that is not zero, eager code
    raises an error, and compiled code returns NaN.
    """
    constant = function(*map(zeros_of, types))
    is_linear = (
        jnp.all(jnp.stack([jnp.all((c == 0) | jnp.isnan(c)) for c in constant]))
        if constant
        else True
    )
    if not is_tracer(is_linear) and not is_linear:
        refuse("a constant one")
    try:
        transposed = jax.linear_transpose(function, *types)
        result = transposed(list(vectors))
    except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return refuse(f"one that JAX cannot transpose ({str(error) or 'not linear'})")  # type: ignore[no-any-return]
    kinds = [*map(typeof, vectors)]
    if not is_tracer(is_linear) and not _is_transpose(function, transposed, types, kinds):
        refuse("one that is not")
    return [jnp.where(is_linear, x, jnp.nan) if is_tracer(is_linear) else x for x in result]


def _is_transpose(
    function: Callable[..., list[Array]],
    transposed: Callable[[list[Array]], Sequence[Array]],
    types: Sequence[Any],
    types_out: Sequence[Any],
) -> bool:
    """Compare the transpose with the function at a point; return True where values are not known.

    JAX's transpose of a cast to integers is zero, and raises no error.
    """
    point, vectors = ([*map(_trial_vector, of)] for of in (types, types_out))
    pairs = (
        zip(function(*point), vectors, strict=True),
        zip(point, transposed(vectors), strict=True),
    )
    # real parts: the transpose of a map that is linear over the real numbers only
    sums = [[jnp.real(jnp.vdot(jnp.conj(a), b)) for a, b in pair] for pair in pairs]
    scale = sum(jnp.abs(x) for each in sums for x in each)
    is_off = jnp.abs(sum(sums[0]) - sum(sums[1])) > 1e-2 * scale
    return is_tracer(is_off) or not is_off


def _trial_vector(kind: Any) -> Array:
    return jnp.linspace(0.6, 1.7, kind.size, dtype=kind.dtype).reshape(kind.shape)
