"""NumPy: the record of what f and its rule compute, for the derivatives that somebody may ask for
later.

Where outer derivatives look on, f runs once, on its arguments' values in boxes of a level below all
of autograd's. An operation on such a box computes its value, and keeps itself as a `Step` in the
place of a node: so whatever f keeps, wherever it keeps it, tells how it was made. When the rule
runs in backward, its steps go on where those of f end. At the level that asks, `in_boxes` makes of
each step what autograd would have recorded, had it looked on: nodes around the values that are
there already. Nothing is computed twice, and f and its rule never see it.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import types
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NoReturn, cast

import numpy as np
from autograd.extend import VJPNode, defjvp_argnums, defvjp_argnums

from cgshim.backend import SIMPLE, Call, FunctionHolder, RuleScope, reached, replace_held
from cgshim_numpy._arrays import Array, is_float, is_tensor
from cgshim_numpy._private import (
    ArrayBox,
    box_types,
    find_top_boxed_args,
    isbox,
    new_box,
    notrace_primitives,
)

# the level of recorded values: autograd's begin at 0, and -1 is its word for none
RECORDED = -0.5

now = itertools.count(1).__next__


class Step:
    """An operation on recorded values: the node of its result. A leaf is a step without an
    operation.
    """

    __slots__ = (
        "args", "first_read", "fun", "kwargs", "made_of", "parents", "places", "record", "time", "value",
    )  # fmt: skip

    def __init__(
        self, value: Any, fun: Any = None, args: Sequence[Any] = (), kwargs: Any = None,
        parent_argnums: Sequence[int] = (), parents: Sequence[Step] = (), record: Record | None = None,
        made_of: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        self.value, self.fun, self.args, self.kwargs = value, fun, args, kwargs
        self.places, self.parents = parent_argnums, parents
        self.record, self.made_of = record, made_of  # of a leaf; made_of are nodes of other levels
        self.time = now()
        self.first_read = math.inf
        for parent in parents:
            if parent.first_read > self.time:
                parent.first_read = self.time


def in_boxes(value: Any, fun: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Return value as autograd would have returned it from the primitive fun of these arguments."""
    boxes, level, node_type = cast(Any, find_top_boxed_args)(args)[:3]  # autograd 1.9 has a fourth
    if not boxes:
        return value
    values = [*args]
    for at, box in boxes:
        values[at] = box._value
    argvals = tuple(values)  # as of autograd's own primitives: its derivative of einsum adds one
    result = value
    if not box_types.isdisjoint(map(type, argvals)):
        result = in_boxes(value, fun, argvals, kwargs)  # which outer derivatives see
    places, nodes = tuple([at for at, _ in boxes]), tuple([box._node for _, box in boxes])
    return new_box(result, level, node_type(result, fun, argvals, kwargs, places, nodes))


# What has no derivative for autograd (a comparison, the shape) gives a plain value, and is no step.
notrace_primitives[Step] = notrace_primitives[VJPNode]


class Record:
    """What one run of f, and the runs of its rule, do with recorded values; each runs within it."""

    def __init__(self, call: Call, args: Sequence[Any] = ()) -> None:
        """Prepare the record of a run of f on these; of its rule alone if there are none."""
        self._sources = call.f, (call.options, call.arguments.specs, args)
        # by identity, the floats that were there when f first read a number
        self._constants: Any = None
        self._read_at, self.returned_at = 0, 0 if args else now()
        # what the rule may read, or Python has read in it; None if all is known
        self.unrecorded: Any = None
        self.running = 0  # how many functions run on recorded values

    def __enter__(self) -> None:
        self.running += 1
        _running.add(self)

    def __exit__(self, *of_error: object) -> None:
        self.running -= 1
        if not self.running:
            _running.discard(self)

    def leaf(self, value: Any, made_of: Sequence[Any] = ()) -> Leaf:
        """Return a recorded value that was made nobody knows how, of what has these nodes."""
        return Leaf(value, RECORDED, Step(value, record=self, made_of=made_of))

    def note_read(self, x: Any) -> None:
        """Note that Python reads x, as its math and compiled code do: what is made of it is no
        step.
        """
        if self.returned_at:
            self.unrecorded = x
        elif self._constants is None:
            function, arguments = self._sources
            # which a rule may name that f has not made yet
            named = getattr(function, "__globals__", {}).values()
            tables = [x for x in named if is_tensor(x) or type(x) in (list, tuple, dict)]
            floats = floats_within((function, arguments, tables))
            self._constants = {id(x): (x, x.tobytes()) for x in floats if x.size <= _MOST}
            self._read_at = now()

    def f_has_returned(self, grad_fn: Callable[..., Any]) -> None:
        """Look for floats in grad_fn that f has made off the record: a second order reads nothing
        else.
        """
        self.returned_at = now()
        if self._constants is not None and self.unrecorded is None:
            self.unrecorded = next((x for x in floats_within(grad_fn) if self._is_made(x)), None)

    def is_lost(self, step: Step) -> bool:
        """Return True if a step of f has an argument that f has made off the record."""
        if self._constants is None or not self._read_at < step.time < self.returned_at:
            return False
        constants = [x for at, x in enumerate(step.args) if at not in step.places]
        return any(is_tensor(x) and is_float(x) and self._is_made(x) for x in constants)

    def _is_made(self, x: Array) -> bool:
        """Return True if a float was not there when f first read a number, or somebody has written
        to it.
        """
        return id(x) not in self._constants or x.tobytes() != self._constants[id(x)][1]


_running = set[Record]()
"""the records on which a function runs now, in any thread"""

_MOST = 1_000_000  # numbers in an array that is looked at


def floats_within(x: Any) -> list[Array]:
    """Return the float arrays and numbers of NumPy that x reaches, wherever a function may keep
    one.
    """
    floats: list[Array] = []

    def note(x: Any) -> bool:
        inside = vars(x).values() if isinstance(x, types.ModuleType) else (x,)
        floats.extend(
            each for each in inside if is_tensor(each) and not isbox(each) and is_float(each)
        )
        return is_tensor(x)

    replace_held(x, {}, note)  # which asks of all that it reaches if it is a tensor
    return floats


class Leaf(ArrayBox):  # type: ignore[misc]  # autograd has no types
    """The box of an argument of f. Unlike autograd's own it becomes an array or a number where one
    is asked for.
    """

    __slots__ = ()
    __module__ = ArrayBox.__module__  # which tells whose tensor it is

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self._node.record.note_read(self)
        return np.array(self._value, dtype) if copy else np.asarray(self._value, dtype)

    def __float__(self) -> float:
        return float(self.__array__())


Leaf.register(Leaf)


def is_recorded(x: Any) -> bool:
    """Return True if x is a recorded value (in no box of autograd's)."""
    return bool(isbox(x) and x._trace == RECORDED)


def steps_to(last: Iterable[Any], known: Any = ()) -> list[Step]:
    """Return the steps that lead to these, from what is known, in the order in which they were
    made.
    """
    return sorted(reached(last, attrgetter("parents"), known), key=attrgetter("time"))


def records_of(x: Any) -> list[Record]:
    """Return the records that a recorded value belongs to; none for what is not recorded."""
    steps = steps_to([x._node] if is_recorded(x) else [])
    return [step.record for step in steps if step.record is not None]


def is_live(x: Any, own: Record | None = None) -> bool:
    """Return True if a box is not only what runs have left that are over, or are one's own."""
    if not is_recorded(x) or _running <= {own}:
        return not is_recorded(x)
    return any(record.running for record in records_of(x) if record is not own)


def values_of(call: Call, arrays: Sequence[Array], own: Record | None = None) -> list[Array]:
    """Return the values of what f or its rule returned; refuse those that are made of boxes that it
    closes over.
    """
    for box in filter(isbox, arrays):
        if is_live(box, own):
            call.refuse_captured(box)
    return [x._value if isbox(x) else x for x in arrays]


def without_derivative(
    call: Call, boxes: Sequence[Any], value: Any, refuse: Callable[[], NoReturn]
) -> Any:
    """Return value, connected with boxes: whoever differentiates it is refused."""
    return in_boxes(value, _unconnected, boxes, {"call": call, "refuse": refuse})


def _unconnected(*boxes: Any, call: Call, refuse: Callable[[], NoReturn]) -> NoReturn:
    """Name the primitive that has no derivative."""
    refuse_replay(call)


defvjp_argnums(_unconnected, lambda argnums, ans, args, kwargs: lambda upstream: kwargs["refuse"]())
defjvp_argnums(_unconnected, lambda argnums, tangents, ans, args, kwargs: kwargs["refuse"]())


def refuse_replay(call: Call) -> NoReturn:
    """Raise the error for a call of what stands for an op in autograd's graph, on other values."""
    call.refuse("autograd's graph of an op is there for derivatives",
                "const_graph, which runs it on other values", "call the function itself")  # fmt: skip


# --- Boxes that f closes over ---------------------------------------------------------------------


def closed_over_by(call: Call) -> list[Any]:
    """Return the boxes in f's variables and options, and in functions and containers there.

    What is in attributes of objects is not searched: f may never read it.
    """
    f: Any = getattr(call.f, "__func__", call.f)
    if type(f) is types.FunctionType and not (
        f.__closure__ or f.__defaults__ or f.__kwdefaults__ or call.options
    ):
        return []
    boxes, seen, todo = list[Any](), set[int](), [f, call.options]
    for x in todo:  # to which more is added
        if type(x) in SIMPLE or id(x) in seen:
            continue
        seen.add(id(x))
        if type(x) in box_types:
            if not isinstance(x, ArrayBox):
                call.refuse_captured(x)
            if is_live(x):
                boxes.append(x)
        elif isinstance(x, FunctionHolder):
            todo.append(x.held_function)
        elif isinstance(x, types.FunctionType):
            todo += [x.__closure__, x.__defaults__, x.__kwdefaults__]
        elif isinstance(x, _SEARCHED):
            todo += gc.get_referents(x)
    return boxes


_SEARCHED = (tuple, list, dict, types.CellType, functools.partial, types.MethodType)


def variables_among(boxes: Sequence[Any], inputs: Sequence[Any]) -> list[int]:
    """Return which of the boxes that f closes over are variables, whose gradients the rule gives:
    nearly all.

    While another rule runs, a box that was computed from this call's own inputs alone is a
    constant, for f's rule already covers these inputs.
    """
    if not rule_scope.current:
        return [*range(len(boxes))]
    # what a running rule has of its inputs stands for what its op got
    made_of: Callable[[Any], Sequence[Any]] = lambda node: getattr(node, "made_of", ())
    known = {*reached([node for x in inputs for node in nodes_of(x)], made_of)}
    # a node of forward mode has neither
    before: Callable[[Any], Sequence[Any]] = lambda node: (
        made_of(node) or getattr(node, "parents", ())
    )
    ways = [reached(nodes_of(box), before, known) for box in boxes]
    return [at for at, nodes in enumerate(ways) if not all(map(before, nodes))]


rule_scope: RuleScope[bool] = RuleScope("cgshim_numpy_rule")


def nodes_of(x: Any) -> list[Any]:
    """Return the node of a box, of the box in it, and so on."""
    nodes = []
    while type(x) in box_types:
        nodes.append(x._node)
        x = x._value
    return nodes
