"""Names of autograd that its documentation does not promise.

All were seen in autograd 1.7.0, 1.8.0, 1.9.0 and 1.9.1. Nothing here imports autograd: a program
that differentiates nothing never does.
"""

from __future__ import annotations

import sys
from typing import Any


def innermost_level() -> int:
    """Return the number of the innermost derivative that is being taken; -1 if there is none.

    autograd counts them in `tracer.trace_stack.top`. It has no public function for that.
    """
    traces = getattr(sys.modules.get("autograd.tracer"), "trace_stack", None)
    return getattr(traces, "top", -1)


def level_of(box: Any) -> int:
    """Return the number of the derivative that a box belongs to.

    Two derivatives may be taken of one value, so boxes nest. Only `_trace` tells the two apart.
    """
    return box._trace  # type: ignore[no-any-return]
