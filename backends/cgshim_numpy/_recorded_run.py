"""NumPy: the run of f on recorded values, where outer derivatives may ask how it made what the rule reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cgshim.backend import replace_held
from cgshim_numpy._arrays import Array, as_arrays, as_object_of_its_own, is_float, is_tensor
from cgshim_numpy._boxes import nodes_of
from cgshim_numpy._floats import floats_within
from cgshim_numpy._private import isbox
from cgshim_numpy._record import Record, now
from cgshim_numpy._run import Run, values_of

if TYPE_CHECKING:
    from cgshim.backend import Call, Rule
    from cgshim_numpy._closed_over import ClosedOver


class RecordedRun(Run):
    """A run of f on recorded values; what f closes over is recorded too."""

    __slots__ = (
        "closed_over", "f_returned", "given", "hidden", "leaves", "outputs", "record", "variables", "was_asked",
    )  # fmt: skip

    record: Record
    leaves: Sequence[Any]
    """the arguments of f and what it closes over, recorded; as they are if nobody differentiates them"""
    given: Sequence[Sequence[Any]]
    """the nodes of what the op was given for these"""
    outputs: Sequence[Any]
    """the outputs of f, recorded; None for those without a gradient"""
    f_returned: int
    """when f returned: all steps after that are the rule's"""
    hidden: Any
    """what the rule may read, and f has made off the record; None if all is known"""

    def __init__(self, call: Call, count: int, closed_over: ClosedOver | None, given: Sequence[Any]) -> None:
        """Prepare the run of a call that was given these inputs, and after them what it closes over."""
        super().__init__(call, count)
        self.closed_over = closed_over
        self.record = Record((call.f, (call.options, call.arguments.specs, given)))
        self.given = [*map(nodes_of, given)]
        self.was_asked = False
        self.variables: Sequence[int] = ()
        """the places of variables among what f closes over, in the order in which f has read them"""

    def run_f(self, values: Sequence[Array]) -> Sequence[Array]:
        """Return the values of f's outputs."""
        call, count, record = self.call, self.count, self.record
        pairs = zip(as_arrays(values), self.given, strict=True)
        self.leaves = [record.leaf(x) if nodes else x for x, nodes in pairs]
        inputs = self.leaves[:count]
        unseen: dict[int, Any] = {}
        try:
            outputs, rule = self.on_record(call, inputs)
        except (TypeError, ValueError, AttributeError, NotImplementedError, AssertionError):
            # f may take values alone, as compiled code does. If they are not what is wrong, it raises that again.
            record.note_read()
            pairs = zip(as_arrays(values)[:count], inputs, strict=True)
            own = [as_object_of_its_own(x) if isbox(leaf) else x for x, leaf in pairs]
            unseen = {id(x): leaf for x, leaf in zip(own, inputs, strict=True) if isbox(leaf)}
            outputs, rule = self.on_record(call, own)
        self.f_returned = now()
        if self.closed_over is not None:
            self.variables = sorted(self.closed_over.variables, key=self._first_read)
            call.require_variables(rule, [self.closed_over.boxes[at] for at in self.variables])
        self.outputs = [self._recorded(y, unseen) for y in outputs]
        rule = self._with_known(rule, unseen)
        return self._read((values_of(call, outputs, record), rule), inputs)

    def on_record(self, function: Callable[..., tuple[Any, Any]], *args: Any) -> tuple[Any, Any]:
        """Return the pair function(*args) of f or its rule, run on recorded values."""
        self.record.running += 1
        try:
            if self.closed_over is None:
                return function(*args)
            with self.closed_over.replaced_by(self.leaves[self.count :]) as stand_ins:
                first, second = function(*args)
                return stand_ins(first), stand_ins(second) if type(second) is list else second
        finally:
            self.record.running -= 1

    def _first_read(self, at: int) -> float:
        """Return when f has first read a box that it closes over; those that it has not read come last."""
        return self.record.first_read.get(id(self.leaves[self.count + at]._node), math.inf)

    def _recorded(self, y: Any, unseen: dict[int, Any]) -> Any:
        """Return an output as a recorded value; if f has computed it off the record, that is its derivative's end."""
        if isbox(y) or not is_float(y):
            return y if isbox(y) else None
        if id(y) not in unseen:
            unseen[id(y)] = self.record.leaf(y, [leaf._node for leaf in self.leaves if isbox(leaf)])
        return unseen[id(y)]

    def _with_known(self, rule: Rule, unseen: dict[int, Any]) -> Rule:
        """Return the rule with what is known in the places of values that it keeps; find what is not known."""
        constants, self.record.sources = self.record.constants, None
        self.hidden = None
        if unseen:
            grad_fn, self.hidden = replace_held(rule.grad_fn, unseen, is_tensor)
            rule = rule.with_grad_fn(grad_fn)
        if constants is not None and self.hidden is None:
            self.hidden = next((x for x in floats_within(rule.grad_fn) if not constants.has(x)), None)
        return rule
