"""NumPy: the floats that functions can reach: those that were there before, and those that f has made off the record.

An f that asks for a number, as Python's math and compiled code do, makes plain arrays of recorded values. A second
order is right only if the rule reads none of these, but for f's outputs.
"""

from __future__ import annotations

import types
from typing import Any

from cgshim.backend import replace_held
from cgshim_numpy._arrays import Array, is_float, is_tensor
from cgshim_numpy._private import isbox

_MOST = 1_000_000
"""numbers in an array that is looked at"""


def floats_within(x: Any) -> list[Array]:
    """Return the float arrays and numbers of NumPy that x reaches, wherever a function may keep one."""
    floats: list[Array] = []

    def note(x: Any) -> bool:
        inside = vars(x).values() if isinstance(x, types.ModuleType) else (x,)
        floats.extend(each for each in inside if is_tensor(each) and not isbox(each) and is_float(each))
        return is_tensor(x)

    replace_held(x, {}, note)  # which asks of all that it reaches if it is a tensor
    return floats


class Constants:
    """The floats that a function and its arguments reach now, and what they are."""

    def __init__(self, function: Any, arguments: Any) -> None:
        named = getattr(function, "__globals__", {}).values()  # which a rule may name that f has not made yet
        tables = [x for x in named if is_tensor(x) or type(x) in (list, tuple, dict)]
        floats = floats_within((function, arguments, tables))
        self._floats = {id(x): (x, x.tobytes()) for x in floats if x.size <= _MOST}

    def has(self, x: Array) -> bool:
        """Return True if x was there, and nobody has written to it."""
        return id(x) in self._floats and x.tobytes() == self._floats[id(x)][1]
