"""PyTorch: Functions that are applied outside of torch.func alone; Function.apply would ask for that, at length."""

from __future__ import annotations

from typing import Any

from cgshim_torch._private import SingleLevelFunction as Undocumented


class SingleLevelFunction(Undocumented):  # type: ignore[misc]
    """A Function without the look at torch.func in its apply."""

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int]:
        """What compiled autograd knows such a node by, as that of any Function."""
        return (ctx._autograd_function_id,)
