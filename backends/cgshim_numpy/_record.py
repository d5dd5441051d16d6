"""NumPy: the record of what f and its rule compute, for the derivatives that somebody may ask for later.

Where outer derivatives look on, f runs once, on its arguments' values in boxes of a level below all of autograd's. An
operation on such a box computes its value, and keeps itself as a `Step` in the place of a node: so whatever f keeps,
wherever it keeps it, tells how it was made. When the rule runs in backward, its steps go on where those of f end.
At the level that asks, a `Connection` makes of each step what autograd would have recorded, had it looked on: nodes
around the values that are there already. Nothing is computed twice, and f and its rule never see it.
"""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from autograd.extend import VJPNode, defjvp, defvjp, primitive

from cgshim_numpy._arrays import is_float, is_tensor
from cgshim_numpy._boxes import at_level, levels_of
from cgshim_numpy._floats import Constants
from cgshim_numpy._private import ArrayBox, isbox, new_box, notrace_primitives

BELOW_ALL = -0.5
"""the level of recorded values: autograd's begin at 0, and -1 is its word for none"""

_clock = itertools.count()


def now() -> int:
    """Return a time: that of all steps before is smaller, and that of all after greater."""
    return next(_clock)


class Step:
    """An operation on recorded values: the node of its result. A leaf is a step without an operation."""

    __slots__ = ("args", "fun", "kwargs", "parents", "places", "record", "time", "value")

    def __init__(
        self, value: Any, fun: Any, args: Sequence[Any], kwargs: Any, parent_argnums: Sequence[int],
        parents: Sequence[Step], record: Record | None = None,
    ) -> None:  # fmt: skip
        self.value = value
        self.fun, self.args, self.kwargs = fun, args, kwargs
        self.places, self.parents = parent_argnums, parents
        self.record = record
        """the record that a leaf belongs to"""
        self.time = now()
        for parent in parents:
            if parent.record is not None:
                parent.record.first_read.setdefault(id(parent), self.time)

    def connected(self, parents: Sequence[Any]) -> Any:
        """Return the result with these functions in the place of the parents: a box at each of their levels."""
        args = [*self.args]
        for place, parent in zip(self.places, parents, strict=True):
            args[place] = parent
        result = self.value
        for level in sorted(levels_of(args)):  # as autograd, whose outer levels see what inner ones have computed
            seen = [at_level(x, level) for x in args]
            places = tuple(at for at, x in enumerate(seen) if isbox(x) and x._trace == level)
            nodes = tuple(seen[at]._node for at in places)
            values = tuple([x._value if at in places else x for at, x in enumerate(seen)])
            node = type(nodes[0])(result, self.fun, values, self.kwargs, places, nodes)
            result = new_box(result, level, node)
        return result


# What has no derivative for autograd (a comparison, the shape) gives a plain value, and is no step.
notrace_primitives[Step] = notrace_primitives[VJPNode]


class Record:
    """The record of one run of f, and of the runs of its rule."""

    __slots__ = ("constants", "first_read", "read_at", "running", "sources")

    def __init__(self, sources: Any = None) -> None:
        self.sources = sources
        """f, and what it was given besides recorded values: a pair, until it has returned"""
        self.constants: Constants | None = None
        """the floats that were there before f made others of values that are not on record; None if it made none"""
        self.first_read: dict[int, int] = {}
        """when an operation was given a leaf for the first time, by the leaf's identity"""
        self.running = 0
        """how many functions run on recorded values at the moment"""

    def leaf(self, value: Any, made_of: Sequence[Step] = ()) -> Leaf:
        """Return a recorded value that is made of others, nobody knows how."""
        return Leaf(value, BELOW_ALL, Step(value, None, (), {}, (), made_of, self))

    def note_read(self) -> None:
        """Prepare for Python's reading a value: what f makes of it will not be on record."""
        if self.sources is not None and self.constants is None:
            self.constants = Constants(*self.sources)
            self.read_at = now()

    def is_lost(self, step: Step) -> bool:
        """Return True if a step of f has an argument that f has made of values that Python read."""
        if self.constants is None or step.time < self.read_at:
            return False
        others = [x for at, x in enumerate(step.args) if at not in step.places]
        return any(is_tensor(x) and is_float(x) and not self.constants.has(x) for x in others)


class Leaf(ArrayBox):  # type: ignore[misc]  # autograd has no types
    """The box of an argument of f. Unlike autograd's own it becomes an array or a number where one is asked for."""

    __slots__ = ()

    def _read(self) -> Any:
        self._node.record.note_read()
        return self._value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self._read(), dtype) if copy else np.asarray(self._read(), dtype)

    def __float__(self) -> float:
        return float(self._read())


Leaf.register(Leaf)


def is_recorded(x: Any) -> bool:
    """Return True if x is a recorded value (in no box of autograd's)."""
    return bool(isbox(x) and x._trace == BELOW_ALL)


@primitive  # type: ignore[untyped-decorator]  # autograd has no types
def stopped(x: Any) -> Any:
    """Return x, of which a derivative is zero: a step like any other, so that f's output is known wherever it is."""
    return x


defvjp(stopped, None)
defjvp(stopped, None)


def is_over(x: Any) -> bool:
    """Return True if x is a recorded value that an earlier call has left somewhere."""
    return is_recorded(x) and not any(record.running for record in records_of(x))


def records_of(x: Any) -> list[Record]:
    """Return the records of the leaves that a recorded value was computed from."""
    steps = _steps([x._node], lambda step: step.parents)
    return [step.record for step in steps if step.record is not None]


def _steps(last: Iterable[Step], parents_of: Callable[[Step], Iterable[Step]]) -> set[Step]:
    steps, todo = set[Step](), [*last]
    while todo:
        step = todo.pop()
        if step not in steps:
            steps.add(step)
            todo += parents_of(step)
    return steps


class Connection:
    """What recorded values are at one level of derivatives: functions of what is in the boxes there."""

    def __init__(
        self, record: Record, arguments: dict[Step, Any], outputs: Mapping[Step, Any], f_returned: int
    ) -> None:
        """Begin with what the leaves and the outputs of f are at this level.

        The rule reads an output as the op's own, whose derivative is the rule's. To f it was a value that f computed.
        """
        self._record = record
        self._of_f = arguments
        self._outputs = outputs
        self._f_returned = f_returned

    def connect(self, results: Sequence[Any], given: Mapping[Step, Any], unknown: Callable[[Step], Any]) -> list[Any]:
        """Return recorded results of the rule as functions of the arguments and of what else the rule was given.

        unknown returns what stands for a leaf of another record, and for a step of which nobody knows all.
        """
        of_rule = ChainMap[Step, Any]({}, dict(given), dict(self._outputs), self._of_f)

        def known(step: Step) -> dict[Step, Any] | ChainMap[Step, Any]:
            return self._of_f if step.time < self._f_returned else of_rule

        last = [x._node for x in results if is_recorded(x) and x._node not in of_rule]
        steps = _steps(last, lambda step: [p for p in step.parents if p not in known(step)])
        for step in sorted(steps, key=lambda step: step.time):
            values = known(step)
            if step.record is not None or (values is self._of_f and self._record.is_lost(step)):
                values[step] = unknown(step)
            else:
                values[step] = step.connected([values[parent] for parent in step.parents])
        return [of_rule[x._node] if is_recorded(x) else x for x in results]
