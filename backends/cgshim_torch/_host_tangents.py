"""PyTorch: forward mode within an op. There a result of the host is a constant, because the op's rule has the tangent.

torch computes all tangents as f runs, and nobody may use them. So only those are refused that can be used: outside of
an op at once, and within one if the rule's own derivative needs what f made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from cgshim.backend import refuse_host_derivative
from cgshim_torch._private import forward_ad, functorch


class Constants:
    """The results of the host that are constants while an op's f runs."""

    def __init__(self) -> None:
        self.level = _level()
        """the innermost level of torch.func around f"""
        self.ops: dict[int, str] = {}
        """an op on the host for each level that has a tangent of its arguments"""


_constants: ContextVar[Constants | None] = ContextVar("cgshim_torch_constants", default=None)


@contextlib.contextmanager
def constants_of_host() -> Iterator[dict[int, str]]:
    """Let results of the host be constants in forward mode, while an op's f runs; yield the ops that they come from."""
    constants = Constants() if forward_ad._current_level >= 0 else None
    token = _constants.set(constants)
    try:
        yield constants.ops if constants else {}
    finally:
        _constants.reset(token)


def take_as_constant(op: str) -> None:
    """Note that what an op on the host returns is a constant at this level; raise an error if it may not be one."""
    constants = _constants.get()
    if constants is None or _level() > constants.level:
        refuse_host_derivative(op)
    constants.ops[_level()] = op


def _level() -> int:
    return functorch.maybe_current_level() or 0
