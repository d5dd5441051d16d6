"""PyTorch: derivatives by variables in a function that Dynamo traces; they leave its graph.

Dynamo cannot trace a derivative by a tensor that a function reads without being given it.
"""

from __future__ import annotations

from typing import Any

from cgshim_torch._dynamo import disabled
from cgshim_torch._vjp import Vjp, vjp_with_variables

_REASON = "cgshim: torch.compile cannot trace a derivative by variables; pass them as arguments"


def _outside(*args: Any) -> Vjp:
    outputs, pullback = vjp_with_variables(*args)
    return outputs, disabled(pullback, reason=_REASON)


outside_of_the_graph = disabled(_outside, reason=_REASON)
