"""Forward mode by each framework's own mechanism."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cgshim._protocol import Backend, Tensor
from cgshim._transforms import jvp_of as _jvp_of

Function = Callable[..., Sequence[Tensor]]
Jvp = Callable[[Function, Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
"""`jvp(fn, inputs, tangents)` returns the tangents of fn's outputs; all are float or complex."""


def jvp_of(backend: Backend) -> Jvp:
    """Return the backend's forward mode, which returns only tangents."""
    jvp = _jvp_of(backend)
    return lambda fn, inputs, tangents: list(jvp(fn, inputs, tangents)[1])
