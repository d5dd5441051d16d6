"""JAX: what the installed version cannot do. `_private` finds out what it has by asking for the names."""

from __future__ import annotations

import jax

LIMITS = {
    (0, 6): [
        "within jit, grad_fn runs when the op is called, and not when a derivative is taken",
        "shard_map refuses an op, in JAX's own words",
        "jax.experimental.checkify does not look into an op whose derivative is taken around checkify",
        "the second derivative of vmap of a jax.custom_vjp around an op fails",
    ],
    (0, 9): ["an op with forward_mode=True is staged under jax.grad too, so that its f cannot branch on values"],
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
