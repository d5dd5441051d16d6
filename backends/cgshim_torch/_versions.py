"""Limits of older versions of PyTorch."""

from __future__ import annotations

import torch

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

STAYS_IN_GRAPH = VERSION >= (2, 13)
"""True if Dynamo can trace an op; in older versions the graph breaks at each op"""

LIMITS = {
    (2, 10): ["forward mode of an op whose rule returns a sparse gradient fails in torch"],
    (2, 13): [
        "torch.compile breaks the graph at every op and every function of cgshim, which run as in "
        "eager mode; with fullgraph=True, and in torch.export with strict=True, torch raises an error",
    ],
}
"""the limits that end with this version"""


def version_limits() -> list[str]:
    """Return the limits of the installed PyTorch that newer versions do not have."""
    return [limit for newer, limits in LIMITS.items() for limit in limits if newer > VERSION]
