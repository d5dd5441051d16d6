"""NumPy: the boxes that f holds in its closure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cgshim.backend import convert_closure
from cgshim_numpy._ancestry import Ancestry, rule_scope
from cgshim_numpy._arrays import Array, as_arrays, as_object_of_its_own
from cgshim_numpy._boxes import at_level
from cgshim_numpy._private import ArrayBox, getval, isbox

if TYPE_CHECKING:
    from cgshim.backend import Call


class Captured:
    """The boxes that f holds in its closure, and how to make f around what is in them.

    They are variables: the rule gives their gradients. There is one exception: while another rule runs, a box that was
    computed from this call's own inputs alone is a constant, for f's rule already speaks for these inputs.
    """

    def __init__(
        self, call: Call, inputs: Sequence[Array], boxes: Sequence[Any], rebuild: Callable[[Sequence[Any]], Any]
    ) -> None:
        links = rule_scope.current
        is_constant = _never if links is None else Ancestry(inputs, links).covers
        self._rebuild = rebuild
        self._constants = [as_object_of_its_own(*as_arrays([getval(x)])) if is_constant(x) else None for x in boxes]
        self._boxes = boxes
        self.variables = [x for x, constant in zip(boxes, self._constants, strict=True) if constant is None]
        for x in self.variables:
            if not isinstance(x, ArrayBox):
                call.refuse_captured(x)

    def f_around(self, variables: Sequence[Array]) -> Callable[..., Any]:
        """Return f around the constants and these values of its variables."""
        values = iter(variables)
        f: Callable[..., Any] = self._rebuild([next(values) if c is None else c for c in self._constants])
        return f

    def constants_at(self, level: int) -> dict[int, Any]:
        """Return what each constant is at this level, by the identity of its value in f."""
        pairs = zip(self._boxes, self._constants, strict=True)
        return {id(constant): at_level(x, level) for x, constant in pairs if constant is not None}


def captured_by(call: Call, inputs: Sequence[Array]) -> Captured | None:
    """Return the boxes that f holds; None if it holds none."""
    boxes, rebuild = convert_closure(call.f, isbox)
    return Captured(call, inputs, boxes, rebuild) if boxes else None


def _never(box: Any) -> bool:
    return False
