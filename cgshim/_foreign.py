"""Mark cgshim's functions for foreign tools, and know foreign classes by name.

This is the only file of the front end that knows any framework: torch.compile's tracer,
TensorFlow's AutoGraph, and Keras, whose Variables hold tensors of three frameworks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from cgshim._protocol import Backend

F = TypeVar("F", bound=Callable[..., Any])

TRACER = "torch"
"""the backend of code that torch.compile traces"""
KERAS = "keras"
"""the import root of Keras, which is not a framework: its Variables stand for the tensors that they hold"""


def constant_when_traced(function: F) -> F:
    """Mark a function so that torch.compile calls it while tracing, and takes its result as a
    constant.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what torch.compiler reads
    return not_converted(function)


def not_converted(function: F) -> F:
    """Mark a function so that TensorFlow's AutoGraph calls it as it is."""
    function.autograph_info__ = {}  # type: ignore[attr-defined]
    return function


def converted_as_caller(backend: Backend, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the user's as AutoGraph would call it here, with ``if`` and ``while``
    on tensors.

    What calls it is not converted, for AutoGraph would convert all that it calls, which takes
    seconds (TensorFlow 2.21).
    """
    convert: Callable[..., Any] | None = getattr(backend, "converted_as_caller", None)
    return convert(function) if convert else function


@constant_when_traced
def is_traced() -> bool:
    """Return True while torch.compile traces the caller: it can follow a computation, but not read
    stored results.
    """
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def is_keras_variable(kind: type) -> bool:
    """Return True if a class is that of Keras's Variables."""
    return kind.__module__.partition(".")[0] == KERAS and kind.__name__ in (
        "Variable",
        "KerasVariable",
    )


def is_keras_symbol(kind: type) -> bool:
    """Return True if a class is that of keras.Input, which stands for tensors and belongs to no
    framework.
    """
    return kind.__module__.partition(".")[0] == KERAS and kind.__name__ == "KerasTensor"
