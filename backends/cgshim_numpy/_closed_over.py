"""NumPy: the boxes that f closes over."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cgshim.backend import SIMPLE, FunctionHolder, RuleScope
from cgshim_numpy._boxes import nodes_of
from cgshim_numpy._private import ArrayBox, isbox
from cgshim_numpy._record import is_over

if TYPE_CHECKING:
    from cgshim.backend import Call
    from cgshim_numpy._run import Run

Scope = tuple["Run", "Scope | None"]
"""a run whose rule is running, and the same of the rule around that"""

rule_scope: RuleScope[Scope] = RuleScope("cgshim_numpy_rule")


class ClosedOver:
    """The boxes in the closure of f.

    They are variables: the rule gives their gradients. There is one exception: while another rule runs, a box that was
    computed from this call's own inputs alone is a constant, for f's rule already speaks for these inputs.
    """

    def __init__(self, call: Call, inputs: Sequence[Any], boxes: Sequence[Any]) -> None:
        self.boxes = boxes
        is_constant = _made_of(inputs) if rule_scope.current else lambda box: False
        self.variables = [at for at, box in enumerate(boxes) if not is_constant(box)]
        """the places of the variables among the boxes"""
        for at in self.variables:
            if not isinstance(boxes[at], ArrayBox):
                call.refuse_captured(boxes[at])

    @contextlib.contextmanager
    def replaced_by(self, others: Sequence[Any]) -> Iterator[Callable[[list[Any]], list[Any]]]:
        """Let each box be what another one is: while f or its rule runs, wherever they read it.

        What these return may be such a box: yield what has the other ones for them.
        """
        before = [(box.__class__, box._value, box._trace, box._node) for box in self.boxes]
        stand_ins = {id(box): other for box, other in zip(self.boxes, others, strict=True)}
        try:
            for box, other in zip(self.boxes, others, strict=True):
                box.__class__, box._value, box._trace, box._node = type(other), other._value, other._trace, other._node
            yield lambda found: [stand_ins.get(id(x), x) for x in found]
        finally:
            for box, was in zip(self.boxes, before, strict=True):
                box.__class__, box._value, box._trace, box._node = was


_HOLDS_NOTHING = SIMPLE | {types.ModuleType, types.BuiltinFunctionType, type, np.ndarray, np.ufunc}


def closed_over_by(call: Call, inputs: Sequence[Any]) -> ClosedOver | None:
    """Return the boxes in f's variables, in functions and containers there; None if there are none.

    What is in attributes of objects is not searched: f may never read it.
    """
    f: Any = call.f
    if type(f) is types.MethodType:
        f = f.__func__
    if type(f) is types.FunctionType and not (f.__closure__ or f.__defaults__ or f.__kwdefaults__):
        return None
    boxes: dict[int, Any] = {}
    seen, todo = set[int](), [f]
    for x in todo:  # to which more is added
        if type(x) in _HOLDS_NOTHING or id(x) in seen:
            continue
        seen.add(id(x))
        if isbox(x):
            if not is_over(x):
                boxes[id(x)] = x
        elif isinstance(x, types.FunctionType):
            todo += [cell.cell_contents for cell in x.__closure__ or () if cell != _EMPTY]
            todo += [x.__defaults__, x.__kwdefaults__]
        elif isinstance(x, (list, tuple)):
            todo += x
        elif type(x) is dict:
            todo += x.values()
        elif isinstance(x, functools.partial):
            todo += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, types.MethodType):
            todo += [x.__func__, x.__self__]
        elif isinstance(x, FunctionHolder):
            todo.append(x.held_function)
    return ClosedOver(call, inputs, [*boxes.values()]) if boxes else None


_EMPTY = types.CellType()


def _made_of(inputs: Sequence[Any]) -> Callable[[Any], bool]:
    """Return what tells if a box is a function of these alone. A node of forward mode does not know its parents."""
    stands_for: dict[int, Sequence[Any]] = {}
    scope = rule_scope.current
    while scope:  # what a rule has of its arguments stands for what its op was given
        run, scope = scope
        pairs = zip(run.leaves, run.given, strict=True)
        stands_for |= {id(leaf._node): nodes for leaf, nodes in pairs if isbox(leaf)}
    known = {id(node) for x in inputs for node in nodes_of(x)}
    known |= {id(node) for leaf, nodes in stands_for.items() if leaf in known for node in nodes}

    def is_made(box: Any) -> bool:
        todo, seen = nodes_of(box), set[int]()
        while todo:
            node = todo.pop()
            if id(node) not in known and id(node) not in seen:
                seen.add(id(node))
                parents = stands_for.get(id(node)) or getattr(node, "parents", None)
                if not parents:
                    return False
                todo += parents
        return True

    return is_made
