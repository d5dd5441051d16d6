"""Marks that foreign tools read in cgshim's functions, and foreign classes that are known by name.

This is the one file of the front end that knows of a framework: of torch.compile's tracer, of TensorFlow's AutoGraph,
and of Keras, whose Variables hold tensors of three frameworks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

KERAS = "keras"
"""the import root of Keras, which is no framework: its Variables stand for the tensors that they hold"""


def constant_when_traced(function: F) -> F:
    """Mark a function that torch.compile shall call as it traces, and whose result it shall take for a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what torch.compiler reads
    return not_converted(function)


def not_converted(function: F) -> F:
    """Mark a function that TensorFlow's AutoGraph shall call as it is."""
    function.autograph_info__ = {}  # type: ignore[attr-defined]
    return function


@constant_when_traced
def is_traced() -> bool:
    """Return True while torch.compile traces the caller: it can follow a computation, and not what was found before."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def is_keras_variable(kind: type) -> bool:
    """Return True if a class is that of Keras's variables."""
    return kind.__module__.partition(".")[0] == KERAS and kind.__name__ in ("Variable", "KerasVariable")
