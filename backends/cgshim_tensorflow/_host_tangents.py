"""Forward mode within an op: there a result of the host is a constant, because the op's rule has the tangent.

An accumulator asks for all tangents as f runs, and nobody may use them. So only those are refused that can be used:
outside of an op at once, and within one if the rule's own derivative needs what f made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from cgshim.backend import refuse_host_derivative
from cgshim_tensorflow._private import pack_tangents
from cgshim_tensorflow._values import is_differentiable

Tensor = Any


class Constants:
    """The results of the host that are constants while an op's f runs."""

    def __init__(self) -> None:
        self.accumulators = _accumulators()
        """how many there are around f"""
        self.ops: list[str] = []
        """the ops on the host with arguments that have a tangent"""


_constants: ContextVar[Constants | None] = ContextVar("cgshim_tensorflow_constants", default=None)


@contextlib.contextmanager
def constants_of_host() -> Iterator[list[str]]:
    """Let results of the host be constants in forward mode, while an op's f runs; yield the ops that they come from."""
    constants = Constants()
    token = _constants.set(constants)
    try:
        yield constants.ops
    finally:
        _constants.reset(token)


def tangents_of_constants(op: str, results: Sequence[Tensor]) -> list[Tensor | None]:
    """Return tangents of zero for what an op on the host returns; raise an error if it may not be a constant.

    A zero is a tangent too: what f makes of such a result can be told by it.
    """
    constants = _constants.get()
    if constants is None or _accumulators() > constants.accumulators:
        refuse_host_derivative(op)
    constants.ops.append(op)
    return [tf.zeros_like(y) if is_differentiable(y) else None for y in results]


def _accumulators() -> int:
    return len(pack_tangents([]).indices)
