"""NumPy: the run of f on values, of which there is one per call.

Most calls have few arrays, one level of derivatives, and nothing captured. What these cost is the number of Python
functions that run. So this path, here and in `_rule.py`, looks at the types and kinds of all arrays at once, by
functions that are written in C, and calls a Python function only if one of the arrays needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cgshim.backend import Residuals
from cgshim_numpy._arrays import KINDS_OF_FLOATS, Array, as_object_of_its_own, is_float, is_tensor, kind_of
from cgshim_numpy._boxes import has_box
from cgshim_numpy._private import getval, isbox
from cgshim_numpy._refusals import BOXABLE, boxable
from cgshim_numpy._trees import tree_flatten

if TYPE_CHECKING:
    from cgshim.backend import Call, Rule
    from cgshim_numpy._captured import Captured


class Run:
    """A run of f while something is being differentiated: the rule that f returned, and what this rule keeps."""

    __slots__ = (
        "are_floats", "call", "captured", "changed", "count", "hidden", "is_nested", "kinds", "residuals", "rule",
    )  # fmt: skip

    rule: Rule
    """the rule, around what it keeps of the run"""
    kinds: Sequence[str]
    """the kind of each output's dtype, which tells if it has a gradient"""
    are_floats: bool
    """whether all outputs have one"""
    residuals: Residuals | None
    """what the rule keeps, if there are outer derivatives, which see it as a function of the values"""
    hidden: Any
    """what the rule keeps where nobody can put another tensor, if there are outer derivatives"""
    changed: bool
    """whether f wrote into its arguments, if there are outer derivatives"""

    def __init__(self, call: Call, count: int, captured: Captured | None, *, is_nested: bool) -> None:
        """Prepare the run of a call with `count` inputs; it is nested if there are outer derivatives."""
        self.call = call
        self.count = count
        self.captured = captured
        self.is_nested = is_nested
        self.residuals = self.hidden = None
        self.changed = False

    def run_f(self, values: Sequence[Array]) -> Sequence[Array]:
        """Return the outputs of f if its inputs and variables have these values."""
        call = self.call
        if self.is_nested:
            values = [*map(as_object_of_its_own, values)]
        before = [x.copy() for x in values] if self.is_nested else ()
        if self.captured is None:
            outputs, self.rule = call(values)
        else:
            outputs, self.rule = call(values[: self.count], self.captured.f_around(values[self.count :]))
            call.require_variables(self.rule, self.captured.variables)
        are_boxable = BOXABLE.issuperset(map(type, outputs))
        if not are_boxable:
            refuse_boxes(call, outputs)
        if self.is_nested:
            self._search_rule(values, before, outputs)
        self.kinds = [*map(kind_of, outputs)]
        self.are_floats = KINDS_OF_FLOATS.issuperset(self.kinds)
        return outputs if are_boxable else boxable(call, [y if is_float(y) else np.asarray(y) for y in outputs])

    def _search_rule(self, values: Sequence[Array], before: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Find what the rule keeps: outer derivatives will see it as a function of the values."""
        self.residuals = Residuals(self.call, self.rule, is_tensor, values, outputs)
        refuse_boxes(self.call, self.residuals.others)
        self.hidden = next(iter(self.residuals.hidden()), None)
        self.changed = any(x.tobytes() != was.tobytes() for x, was in zip(values, before, strict=True))

    def per_output(self, of_outputs: Any) -> list[Array]:
        """Return the outputs, or their upstream gradients, one by one: autograd has one value, a tuple of several."""
        return [of_outputs] if len(self.kinds) == 1 else [of_outputs[i] for i in range(len(self.kinds))]

    def outputs_in(self, ans: Any) -> list[Array]:
        """Return the outputs; those that have no gradient as values, even out of a tuple that is in a box."""
        outputs = self.per_output(ans)
        if self.are_floats:
            return outputs
        return [y if kind in KINDS_OF_FLOATS else getval(y) for y, kind in zip(outputs, self.kinds, strict=True)]


def refuse_boxes(call: Call, arrays: Sequence[Array]) -> None:
    """Raise if f or its rule was given values, and reached a box in a way that a search of f's closure does not see."""
    if has_box(arrays):
        box = next(filter(isbox, arrays))
        options = call.options.values()
        call.refuse_captured(next(filter(isbox, [*options, *tree_flatten([*options])[0]]), box))
