"""All that the backend uses of JAX beyond its documentation, each with its reason and versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

try:
    from jax.extend.core import take_current_trace
except ImportError:  # before JAX 0.9.2
    from jax.core import take_current_trace


def is_mapped_now(tensors: Sequence[Any]) -> bool:
    """Return True if vmap is the innermost transformation of these tensors.

    Then a rule for batches may call an op whose derivative is taken outside of vmap. JAX does not
    tell which transformation is the innermost: `take_current_trace`, the name `BatchTrace` and
    `Tracer._trace` are seen in 0.4.38 to 0.12.
    """
    with take_current_trace() as trace:
        return type(trace).__name__ == "BatchTrace" and any(
            getattr(x, "_trace", None) is trace for x in tensors
        )


def primal_of(x: Any) -> Any:
    """Return x below the innermost derivatives, as the rules of a `jax.custom_vjp` get it.

    `jax.lax.stop_gradient` takes longer, because JAX linearizes it. `Tracer.primal` of a derivative
    is seen in 0.4.38 to 0.12.
    """
    while hasattr(x, "primal"):
        x = x.primal
    return x
