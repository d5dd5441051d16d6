"""What f, or its rule, computes while tapes record it.

A tape knows how each tensor was made, but tells nobody; so TensorFlow's operations are listened to,
and noted by the numbers of their tensors, so that none is kept alive. This tells of a captured
tensor what it is made of, and of a tensor that a rule reads whether its derivative is known: tapes
record f, so most are connected with the arguments, wherever f saved them. What is left are tensors
that f made of values that Python read, as `tf.constant(np.exp(x))`: no tape follows them, and
nobody can tell them from constants but by their numbers. In a graph there are no values to read,
and its operations tell what a tensor was made of, and what it stands for in the graphs around.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from cgshim.backend import Call, RuleScope, Tensor, is_differentiable, reached
from cgshim_tensorflow._private import (
    autograph,
    context,
    execute,
    pack_tangents,
    record,
    shape_of_eager,
    uid,
)
from cgshim_tensorflow._values import is_eager

Listener = Callable[[str, Sequence[Tensor], Any, Sequence[Tensor]], None]
"""takes an operation: its type, inputs, attributes and outputs"""
OPEN = ("Placeholder", "PlaceholderWithDefault")
_CALL = "PartitionedCall"
"""how the type of each call of a function ends, of a stateful one too"""


def may_be_recorded() -> bool:
    """Return True if somebody may ask for a derivative of what is computed here."""
    return record.could_possibly_record() or not tf.executing_eagerly()


def is_watched(tensors: Sequence[Tensor]) -> bool:
    """Return True if a tape or an accumulator follows one of the tensors."""
    return bool(record.should_record_backprop(tensors) or pack_tangents(tensors).tangents)


def identity(upstream: Tensor) -> list[Tensor]:
    """Return the gradient of what is another tensor's value."""
    return [upstream]


def needed_among(tensors: Sequence[Tensor]) -> list[bool] | None:
    """Return for each tensor if somebody follows it; None in a graph: who runs it may follow any."""
    return [is_watched([tensor]) for tensor in tensors] if tf.executing_eagerly() else None


def is_of_accumulator(op_type: str, attributes: Any) -> bool:
    """Return True for the call of a function by which an accumulator derives another operation."""
    if op_type.endswith(_CALL):
        called = next((value for key, value in itertools.pairwise(attributes) if key == "f"), None)
        op_type = str(getattr(called, "name", op_type))
    return "__jvp_" in op_type


# --- One run --------------------------------------------------------------------------------------


class Record:
    """What one run of f, or of a rule, has computed of what. The record of a rule has that of its f
    around it.
    """

    def __init__(
        self, call: Call, around: Record | None = None, ends: Iterable[Tensor] = ()
    ) -> None:
        self.call = call
        self._around: tuple[Record, ...] = (around, *around._around) if around else ()
        self.ends = {x._id for x in ends}
        # before f may write there
        self._held = [] if around and around.call is call else _numbers_held_by(call.f)
        self.first, self._last = uid(), sys.maxsize
        self._made_of: dict[int, Sequence[int]] = {}
        self.read: dict[int, Tensor] = {}
        """what operations have read and not made: of f, until it returns"""
        self.reads: dict[int, int] = {}
        """how often operations have read each tensor"""
        self._watched: set[int] = set()
        self._of_values: set[int] = set()
        self.calls_functions = False
        """whether operations call a tf.function in eager mode"""
        self.may_hold_values = False
        """whether f may have made a tensor of values: one that neither operations nor constants explain"""

    def notice(
        self, op_type: str, inputs: Sequence[Tensor], attributes: Any, outputs: Sequence[Tensor]
    ) -> None:
        """Note an operation."""
        if is_of_accumulator(op_type, attributes):
            return
        if op_type[:2] == "__":  # in eager mode such a call has the name of its function
            self.calls_functions = True
        numbers, made_of = [], self._made_of
        for x in inputs:
            at = x._id
            numbers.append(at)
            self.reads[at] = self.reads.get(at, 0) + 1
            if at not in made_of:
                self.read[at] = x
        for y in outputs:
            made_of[y._id] = numbers

    def noting(self) -> contextlib.AbstractContextManager[Any]:
        """While f or a rule runs: note what it computes. In a graph, this gives a list that gets the
        operations that it has made.
        """
        return listening_with(self.notice)

    def add(self, outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        """Note that outputs are made of inputs, without an operation."""
        numbers = [x._id for x in inputs]
        self._made_of.update([(y._id, numbers) for y in outputs])

    def made_of(self, ends: Iterable[int]) -> set[int]:
        """Return the numbers of what was made here of these, or of what those around made of them."""
        reached = set(ends)
        for each in reversed((self, *self._around)):
            for at, inputs in each._made_of.items():
                if not reached.isdisjoint(inputs):
                    reached.add(at)
        return reached.intersection(self._made_of)

    def close(self, outputs: Sequence[Tensor]) -> dict[int, Tensor]:
        """Note that f has returned; give away the tensors that were read and not made, outputs
        among them.
        """
        self._last = uid()
        read = {**self.read, **{y._id: y for y in outputs if y._id not in self._made_of}}
        explained = sum(at > self.first for at in self._made_of)
        for at, x in read.items():
            if is_watched([x]):
                self._watched.add(at)
            if at > self.first and is_eager(x) and is_differentiable(x.dtype):
                if _numbers_of(x) <= _numbers_in(_code_of(self.call.f), x.dtype):
                    explained += 1
                elif shape_of_eager(x) != ():
                    # what operations make of a Python number, as tf.range(n), is a constant
                    self._of_values.add(at)
        self.may_hold_values = bool(self._of_values) or self._last - self.first - 1 > explained
        self.read = {}
        return read

    def has_made(self, tensor: Tensor) -> bool:
        """Return True if a tensor came into being while f ran."""
        return bool(self.first < tensor._id < self._last)

    def is_made_of_values(self, tensor: Tensor) -> bool:
        """Return True if f may have made a tensor of values that Python read, and not of numbers
        that f knows.
        """
        if not is_eager(tensor):  # in a graph Python reads no values
            return False
        if not self.has_made(tensor) or not is_differentiable(tensor.dtype) or is_watched([tensor]):
            return False
        if tensor._id in self._made_of:
            return self.leads_to(tensor, self._of_values)
        known = [
            *(0, 1, *self._held, *_constants_in(_code_of(self.call.f))),
            *self.call.static,
        ]
        return not _numbers_of(tensor) <= _rounded(known, tensor.dtype)

    def leads_to(self, tensor: Tensor, ends: Collection[int]) -> bool:
        """Return True if a tensor was made of one of these."""
        return any(at in ends for at in self._back_from(tensor, ()))

    def leads_beyond(self, tensor: Tensor, known: Collection[int]) -> bool:
        """Return True if a watched tensor depends on any that is, but the known ones."""
        leaves = [at for at in self._back_from(tensor, known) if self._inputs_of(at) is None]
        return tensor._id in leaves or any(
            at in each._watched or (at in each.read and is_watched([each.read[at]]))
            for at in leaves
            for each in (self, *self._around)
        )

    def _back_from(self, tensor: Tensor, known: Collection[int]) -> list[int]:
        """Return the numbers of a tensor, and of all that it was made of but the known ones."""
        return reached([tensor._id], lambda at: self._inputs_of(at) or (), known)

    def _inputs_of(self, at: int) -> Sequence[int] | None:
        if self.is_end(at):
            return None
        records = (self, *self._around)
        return next((each._made_of[at] for each in records if at in each._made_of), None)

    def is_end(self, at: int) -> bool:
        """Return True if a tensor is what is differentiated here, whatever it was made of."""
        return any(at in each.ends for each in (self, *self._around))


running_rule: RuleScope[Record | None] = RuleScope("cgshim_tensorflow_running_rule")
"""the record of the rule that is running"""


# --- Numbers that f knows without reading a tensor ------------------------------------------------

_MOST = 64
_LARGE = float(np.finfo(np.float32).max)
_EMPTY = types.CellType()


def _numbers_of(tensor: Tensor) -> set[Any]:
    """Return the numbers in a small tensor; one that is no number stands for those of a large one."""
    return {*tensor.numpy().ravel().tolist()} if tensor.shape.num_elements() <= _MOST else {None}


def _numbers_held_by(f: Any) -> list[Any]:
    """Return the numbers in the variables and in the object of f."""
    cells = [
        cell
        for cell in getattr(getattr(f, "__func__", f), "__closure__", None) or ()
        if cell != _EMPTY
    ]
    return [
        x
        for x in (
            *[cell.cell_contents for cell in cells],
            *getattr(getattr(f, "__self__", None), "__dict__", {}).values(),
        )
        if isinstance(x, (int, float, complex))
    ]


def _code_of(f: Any) -> types.CodeType | None:
    return getattr(getattr(f, "__func__", f), "__code__", None)


@functools.lru_cache(maxsize=4096)
def _numbers_in(code: types.CodeType | None, dtype: tf.DType) -> frozenset[Any]:
    """Return 0, 1, and the numbers in some code, as a dtype has them."""
    return _rounded((0, 1, *_constants_in(code)), dtype)


def _constants_in(code: types.CodeType | None) -> list[Any]:
    inner = (
        [_constants_in(x) if isinstance(x, types.CodeType) else x for x in code.co_consts]
        if code
        else []
    )
    return [x for each in inner for x in (each if isinstance(each, (list, tuple)) else [each])]


def _rounded(numbers: Iterable[Any], dtype: tf.DType) -> frozenset[Any]:
    kind: Any = dtype.as_numpy_dtype
    kinds = (int, float, complex) if dtype.is_complex else (int, float)
    known = [number for number in numbers if isinstance(number, kinds) and abs(number) < _LARGE]
    return frozenset([kind(sign * number).item() for number in known for sign in (1, -1)])


# --- Listening ------------------------------------------------------------------------------------


class Listening:
    """While TensorFlow tells a listener of each operation of this thread, in graphs too.

    `op_callbacks.add_op_callback` does the same, but when one thread is done, it takes
    `execute_with_callbacks` away from all. Here it stays, and tells nobody when nobody listens.
    """

    def __init__(self, listener: Listener) -> None:
        self.listener = listener

    def __call__(
        self, op_type: Any, inputs: Any, attributes: Any, outputs: Any, *_: Any, **named: Any
    ) -> Any:
        """Tell the listener; this is what TensorFlow calls."""
        if outputs is None:  # so a debugger, which listens too, says that it has not replaced them
            outputs = named["graph"].get_operations()[-1].outputs
        self.listener(
            op_type.decode() if isinstance(op_type, bytes) else op_type, inputs, attributes, outputs
        )
        return outputs  # in a graph, the next listener gets what this one returns

    def __enter__(self) -> None:
        execute.execute = execute.execute_with_callbacks
        context.context().add_op_callback(self)

    def __exit__(self, *_: object) -> None:
        context.context().remove_op_callback(self)


def listening_with(listener: Listener) -> contextlib.AbstractContextManager[Any]:
    """While a listener gets each operation. In a graph, this gives a list that gets them, and the
    listener gets all at the end: there TensorFlow does not tell of the call of a tf.function.
    """
    return Listening(listener) if tf.executing_eagerly() else _noted_at_the_end(listener)


@contextlib.contextmanager
def _noted_at_the_end(listener: Listener) -> Iterator[list[Any]]:
    operations: list[Any] = []
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield operations
    operations += graph.get_operations()[before:]
    for operation in operations:
        if operation.type not in ("Const", *OPEN):  # these may stand for what it has captured
            listener(operation.type, operation.inputs, attributes_of(operation), operation.outputs)


def attributes_of(operation: Any) -> tuple[Any, ...]:
    """Return what `is_of_accumulator` asks an operation of a graph for: no other has a function."""
    return ("f", operation.get_attr("f")) if operation.type.endswith(_CALL) else ()


def note(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Note, for f and the rules that are running, that outputs were made of inputs without an
    operation.
    """
    for listening in context.context().op_callbacks:
        if isinstance(listening, Listening) and tf.executing_eagerly():
            listening.listener("", inputs, (), outputs)


# --- Tensors of graphs ----------------------------------------------------------------------------


def in_this_graph(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of the graph that is being built, if one is, and the values of variables."""
    values = [tf.convert_to_tensor(x) if isinstance(x, tf.Variable) else x for x in tensors]
    if tf.executing_eagerly():
        return values
    capture = getattr(tf.compat.v1.get_default_graph(), "capture", None)
    return (
        [tf.nest.map_structure(capture, x, expand_composites=True) for x in values]
        if capture
        else values
    )


def converted_as_caller(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as AutoGraph has converted the caller: `if` and `while` on tensors work in
    a graph, too.
    """
    if tf.executing_eagerly():
        return function
    return autograph.tf_convert(function, ctx=autograph.control_status_ctx())  # type: ignore[no-any-return]


def stand_ins(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor, and what it stands for in the graphs around its own."""
    while tensor is not None:
        yield tensor
        captures = () if is_eager(tensor) else getattr(tensor.graph, "captures", ())
        tensor = next((external for external, internal in captures if internal is tensor), None)


def sources_beyond(tensor: Tensor, known: frozenset[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the ends of all paths back from a tensor but through the known ones, in a rule that is
    running.

    The second list has those that may yet be differentiated: arguments of a graph, and variables.
    They are in it as the graph has captured them in which the path last passed an operation: the
    gradient of a tf.cond cannot do it again.
    """
    rule = running_rule.current
    ends, may_be, seen, todo = [], [], {*known}, [(tensor, tensor)]
    while todo:
        at, nearest = todo.pop()
        if at._id in seen or (
            _is_read(at) and any(x._id in known for x in stand_ins(at.op.inputs[0]))
        ):
            continue
        seen.add(at._id)
        is_end = rule is not None and rule.is_end(at._id)
        back = [] if is_eager(at) or is_end else _one_step_back(at)
        if not back:
            ends.append(at)
            if not is_eager(at) and (is_end or _is_read(at) or at.op.type in OPEN):
                may_be.append(nearest)
        todo += [(each, each if at.op.inputs else nearest) for each in back]
    return ends, may_be


def _one_step_back(tensor: Tensor) -> list[Tensor]:
    """Return what a tensor was made of, or stands for; nothing if a tape follows it from here on."""
    if _is_read(tensor):
        return []
    back = list(tensor.op.inputs) or [*stand_ins(tensor)][1:2]
    return [] if back and is_watched([tensor]) and not is_watched(back) else back


def _is_read(tensor: Tensor) -> bool:
    """Return True if a tensor is what a variable holds."""
    return not is_eager(tensor) and tensor.op.type == "ReadVariableOp"
