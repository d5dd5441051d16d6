"""Where tensors come from: whether one depends on what is differentiated by another way than through given ones."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.eager import context, execute, record, tape
from tensorflow.python.eager.forwardprop_util import pack_tangents

from cgshim_tensorflow._values import is_eager

Tensor = Any
Listener = Callable[[str, Sequence[Tensor], Any, Sequence[Tensor]], None]
"""Is told of an operation: its type, inputs, attributes and outputs."""


def is_of_accumulator(op_type: str, attributes: Any) -> bool:
    """Whether an operation is the call of a function by which an accumulator derives another operation."""
    if op_type.endswith("PartitionedCall"):
        op_type = next((value.name for key, value in itertools.pairwise(attributes) if key == "f"), op_type)
    return "__jvp_" in op_type


def is_watched(tensors: Sequence[Tensor]) -> bool:
    """Whether a tape or an accumulator follows one of the tensors."""
    return bool(record.should_record_backprop(tensors) or pack_tangents(tensors).tangents)


# --- Eager tensors, which do not know what they were made of --------------------------------------------------------


class Origins:
    """What the eager tensors that were made while f or its rule ran depend on, by identity; no tensor is held."""

    __slots__ = ("_around", "_of")

    def __init__(self, around: Origins | None) -> None:
        self._of: dict[int, list[int]] = {}
        self._around = around

    @contextlib.contextmanager
    def followed(self, listener: Listener | None = None) -> Iterator[None]:
        """While every operation is noted that depends on what is differentiated, and the listener is told of all."""

        def notice(op_type: str, inputs: Sequence[Tensor], attrs: Any, outputs: Sequence[Tensor]) -> None:
            if not is_of_accumulator(op_type, attrs):
                self.add(outputs, inputs)
                if listener:
                    listener(op_type, inputs, attrs, outputs)

        token = _following.set((*_following.get(), self))
        try:
            with listening(notice):
                yield
        finally:
            _following.reset(token)

    def add(self, outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        """Note that outputs were made from inputs."""
        watched = [tensor._id for tensor in inputs if is_watched([tensor])]
        if watched:
            self._of.update(dict.fromkeys([tensor._id for tensor in outputs], watched))

    def leads_beyond(self, tensor: Tensor, given: frozenset[int]) -> bool:
        """Whether a tensor that is watched depends on anything but the given ones."""
        seen, todo = {tensor._id}, [tensor._id]
        while todo:
            at = todo.pop()
            if at in given:
                continue
            made_from = None if at in _differentiated.get() else self._made_from(at)
            if made_from is None:
                return True
            fresh = [each for each in made_from if each not in seen]
            seen.update(fresh)
            todo += fresh
        return False

    def _made_from(self, at: int) -> list[int] | None:
        origins: Origins | None = self
        while origins is not None:
            if at in origins._of:
                return origins._of[at]
            origins = origins._around
        return None


_following: ContextVar[tuple[Origins, ...]] = ContextVar("cgshim_tensorflow_following", default=())
_differentiated: ContextVar[set[int] | frozenset[int]] = ContextVar(
    "cgshim_tensorflow_differentiated", default=frozenset()
)


def note(outputs: Sequence[Tensor], inputs: Sequence[Tensor], *more: Origins) -> None:
    """Tell whoever follows that outputs were made from inputs, by other means than an operation."""
    for origins in (*_following.get(), *more):
        origins.add(outputs, inputs)


@contextlib.contextmanager
def differentiated(tensors: Sequence[Tensor]) -> Iterator[None]:
    """While these tensors are what is differentiated, whatever they were made from; and what a tape watches then."""
    token = _differentiated.set({*_differentiated.get(), *(tensor._id for tensor in tensors)})
    try:
        yield
    finally:
        _differentiated.reset(token)


def _note_what_is_watched(watch: Callable[..., None]) -> Callable[..., None]:
    """Tapes know what they watch, and do not tell; so whoever makes one watch a tensor is asked."""

    @functools.wraps(watch)
    def noted(of_tape: Any, tensor: Tensor) -> None:
        watch(of_tape, tensor)
        differentiated = _differentiated.get()
        if isinstance(differentiated, set):
            differentiated.add(tensor._id)

    return noted


tape.watch = _note_what_is_watched(tape.watch)
_lock, _listeners = threading.Lock(), 0
_before: Any = None


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """While TensorFlow tells of each operation of this thread, in graphs too: its type, inputs, attributes and outputs.

    As `add_op_callback`, which unhooks what other threads listen to when the first one is done.
    """
    global _listeners, _before

    def notice(op_type: Any, inputs: Any, attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None) -> Any:
        listener(op_type.decode() if isinstance(op_type, bytes) else op_type, inputs, attrs, outputs)
        return outputs  # in a graph, the next listener is told of what this one returns

    here = context.context()
    with _lock:
        if not _listeners:
            _before, execute.execute = execute.execute, execute.execute_with_callbacks
        _listeners += 1
    here.add_op_callback(notice)
    try:
        yield
    finally:
        here.remove_op_callback(notice)
        with _lock:
            _listeners -= 1
            if not _listeners:
                execute.execute, _before = _before, None


# --- Tensors of graphs ----------------------------------------------------------------------------------------------

OPEN = ("Placeholder", "PlaceholderWithDefault")


def stand_ins(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor, and what it stands for in the graphs around its own."""
    while tensor is not None:
        yield tensor
        captures = () if is_eager(tensor) else getattr(tensor.graph, "captures", ())
        tensor = next((external for external, internal in captures if internal is tensor), None)


class Source(NamedTuple):
    """Where a way back through graphs ends."""

    tensor: Tensor
    nearest: Tensor
    """what stands for it in the graph in which the way was last among operations"""


def sources_beyond(tensor: Tensor, given: frozenset[int]) -> list[Source]:
    """What a tensor of a graph depends on besides the given ones: the ends of all other ways back."""
    found, seen, todo = [], {tensor._id}, [tensor]
    nearest: dict[int, Tensor] = {}
    while todo:
        at = todo.pop()
        if at._id in given or (_is_read(at) and any(x._id in given for x in stand_ins(at.op.inputs[0]))):
            continue
        back = [] if is_eager(at) or at._id in _differentiated.get() else _one_step_back(at)
        if not back:
            found.append(Source(at, nearest.get(at._id, at)))
        fresh = [each for each in back if each._id not in seen]
        seen.update([each._id for each in fresh])
        if back and not at.op.inputs:
            nearest.update([(each._id, nearest.get(at._id, at)) for each in fresh])
        todo += fresh
    return found


def _one_step_back(tensor: Tensor) -> list[Tensor]:
    """What a tensor was made from, or stands for; nothing for what a tape follows from here on."""
    if _is_read(tensor):
        return []
    back = list(tensor.op.inputs) or [*stand_ins(tensor)][1:2]
    return [] if back and is_watched([tensor]) and not is_watched(back) else back


def _is_read(tensor: Tensor) -> bool:
    """Whether a tensor is what a variable holds."""
    return not is_eager(tensor) and tensor.op.type == "ReadVariableOp"


def may_be_differentiated(tensor: Tensor) -> bool:
    """Whether nobody knows yet if an end of the way back through a graph is differentiated: an argument, a variable."""
    open_end = tensor._id in _differentiated.get() or _is_read(tensor)
    return not is_eager(tensor) and (open_end or tensor.op.type in OPEN)


def in_this_graph(x: Tensor) -> Tensor:
    """A variable's value, and in a graph a tensor of that graph."""
    x = tf.convert_to_tensor(x) if isinstance(x, tf.Variable) else x
    if tf.executing_eagerly():
        return x
    capture = getattr(tf.compat.v1.get_default_graph(), "capture", None)
    return tf.nest.map_structure(capture, x, expand_composites=True) if capture else x
