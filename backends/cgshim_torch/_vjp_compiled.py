"""PyTorch: derivatives by variables in a function that Dynamo traces; they leave its graph.

Dynamo cannot trace a derivative by a tensor that a function reads without being given it.
"""

from __future__ import annotations

from typing import Any

import torch._dynamo

from cgshim_torch._vjp import Vjp, vjp_with_variables

_REASON = "cgshim: torch.compile cannot trace a derivative by variables; pass them as arguments"


def _outside(*args: Any) -> Vjp:
    outputs, pullback = vjp_with_variables(*args)
    return outputs, torch._dynamo.disable(pullback, reason=_REASON)


outside_of_the_graph = torch._dynamo.disable(_outside, reason=_REASON)
