"""PyTorch: what the installed version cannot do; the one place that knows versions.

`private` finds most names that have moved by asking for them, because a name may move in any
release.
"""

from __future__ import annotations

import torch

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
"""the installed version, without its patch"""

STAYS_IN_GRAPH = VERSION >= (2, 13)
"""Dynamo can trace an op; older versions hide attributes of nested functions, and give op_grad a silent zero"""

GIVES_AWAY_CALLBACK = VERSION < (2, 8)
"""who asks for Dynamo's callback gets a reference to it that Dynamo still counts as its own"""

LIMITS = {
    (2, 8): [
        "torch.compile fails if the first op that a process calls is a method, and is called in compiled code; call "
        "an op before",
        "a checkpoint that is not reentrant, and other hooks on saved tensors, free nothing that a rule holds; the "
        "numbers are right",
    ],
    (2, 10): ["forward mode of an op whose rule returns a sparse gradient fails in torch"],
    (2, 13): [
        "torch.compile leaves the graph at every op, and at every function of cgshim that it meets: they run as in "
        "eager mode; with fullgraph=True, and in torch.export with strict=True, torch refuses them",
    ],
}
"""what versions before this one cannot do, and later ones can"""


def version_limits() -> list[str]:
    """Return what the installed PyTorch cannot do, and a newer one can: a sentence for each limit."""
    return [limit for newer, limits in LIMITS.items() for limit in limits if newer > VERSION]
