"""NumPy: autograd, which gradients need and values do not: it is imported when somebody
differentiates.

Boxes exist, and derivatives are taken, only where somebody has imported it. `_derivatives.py` and
what that imports are the half of the backend which needs it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
from collections.abc import Callable
from sys import modules
from typing import Any

from cgshim.backend import BackendError, refusal


def is_differentiating() -> bool:
    """Return True if autograd takes a derivative."""
    traces = getattr(modules.get("autograd.tracer"), "trace_stack", None)
    return traces is not None and traces.top >= 0


def isbox(x: Any) -> bool:
    """Return True if x is one of autograd's boxes."""
    return isinstance(x, getattr(modules.get("autograd.tracer"), "Box", ()))


import_derivatives: Callable[[], Any] = lambda: None
"""imports `_derivatives.py`; the package puts it here, for that file imports this one"""

_waiting: list[Callable[[], None]] = []
"""what to do when the derivatives are imported"""


def when_derivatives_exist(act: Callable[[], None]) -> None:
    """Act as soon as autograd is imported for derivatives; at once if it is."""
    if derivatives.cache_info().currsize:
        act()
    else:
        _waiting.append(act)


@functools.cache
def derivatives() -> Any:
    """Return the half of the backend that needs autograd, which is imported with it."""
    from importlib.metadata import version

    installed = "no autograd"
    # there are no metadata, or its import is barred
    with contextlib.suppress(ImportError, ValueError):
        if importlib.util.find_spec("autograd"):
            installed = f"autograd {version('autograd')}"
    if [*map(int, re.findall(r"\d+", installed)[:2])] < [1, 7]:
        raise refusal(BackendError, "cgshim", must="derivatives on NumPy need autograd 1.7 or later",
                      got=installed, do="pip install 'autograd>=1.7'")  # fmt: skip
    imported = import_derivatives()
    for act in _waiting:
        act()
    return imported


def version_limits() -> list[str]:
    """Return what only other versions of autograd can."""
    try:
        return [*derivatives().LIMITS]
    except BackendError as error:
        return [str(error)]
