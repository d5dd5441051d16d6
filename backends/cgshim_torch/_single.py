"""PyTorch: Functions that are applied only outside of torch.func, without the slow check in Function.apply."""

from __future__ import annotations

from typing import Any

from cgshim_torch._private import SingleLevelFunction as Undocumented


class SingleLevelFunction(Undocumented):  # type: ignore[misc]
    """A Function whose apply does not look at torch.func."""

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int]:
        """Return the key of such a node for compiled autograd, as for any Function."""
        return (ctx._autograd_function_id,)
