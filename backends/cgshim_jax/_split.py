"""f's jaxpr in two parts: operations that an outer derivative goes through, and operations that it need not know.

The derivative of the outputs is the rule's. So only the other residuals have a derivative through f's own operations.
All other operations of f may be opaque: a callback, a while loop.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from cgshim_jax._tracing import Jaxpr, equations_for, is_tracer, part_of

Array = Any


class Split:
    """A jaxpr that is evaluated in two parts. Each operation is in one of them."""

    def __init__(self, whole: Jaxpr, connected: Collection[int]) -> None:
        """Split a jaxpr; `connected` are the places of the results that keep their derivatives."""
        jaxpr = whole.jaxpr
        self.whole = whole
        self.connected = sorted(connected)
        self.others = [at for at in range(len(jaxpr.outvars)) if at not in connected]
        first, second = equations_for([jaxpr.outvars[at] for at in self.connected], jaxpr.eqns)
        needed = {v for eqn in second for v in eqn.invars if not isinstance(v, Literal)}
        needed.update(v for at in self.others if not isinstance(v := jaxpr.outvars[at], Literal))
        between = [v for eqn in first for v in eqn.outvars if v in needed]
        self.results = len(self.connected)
        outer = [jaxpr.outvars[at] for at in self.connected]
        self.first = part_of(jaxpr, whole.constvars, whole.invars, [*outer, *between], first)
        self.second = part_of(
            jaxpr, [*whole.constvars, *whole.invars, *between], [], [jaxpr.outvars[at] for at in self.others], second
        )

    def __call__(self, captured: Sequence[Array], arguments: Sequence[Array]) -> list[Array]:
        """Return the results. Only the connected ones have derivatives."""
        constants = self.whole.constants_with(captured)
        known = jax.core.eval_jaxpr(self.first, constants, *arguments)
        between = known[self.results :]
        stopped = [jax.lax.stop_gradient(x) if is_tracer(x) else x for x in (*constants, *arguments, *between)]
        rest = jax.core.eval_jaxpr(self.second, stopped)
        found = dict(zip((*self.connected, *self.others), (*known[: self.results], *rest), strict=True))
        return [found[at] for at in range(len(found))]
