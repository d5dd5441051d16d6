"""Where tensors come from: does one depend on what is differentiated other than through the given tensors?"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from cgshim.backend import RuleScope
from cgshim_tensorflow._private import context, execute, pack_tangents, record, tape
from cgshim_tensorflow._values import is_eager

if TYPE_CHECKING:
    from cgshim.backend import Call

Tensor = Any
Listener = Callable[[str, Sequence[Tensor], Any, Sequence[Tensor]], None]
"""is told of an operation: its type, inputs, attributes and outputs"""


def is_of_accumulator(op_type: str, attributes: Any) -> bool:
    """Return True for the call of a function by which an accumulator derives another operation."""
    if op_type.endswith("PartitionedCall"):
        op_type = next((value.name for key, value in itertools.pairwise(attributes) if key == "f"), op_type)
    return "__jvp_" in op_type


def is_watched(tensors: Sequence[Tensor]) -> bool:
    """Return True if a tape or an accumulator follows one of the tensors."""
    return bool(record.should_record_backprop(tensors) or pack_tangents(tensors).tangents)


def needed_among(tensors: Sequence[Tensor]) -> list[bool] | None:
    """Return for each tensor if somebody follows it; None in a graph: who runs it may follow any."""
    return [is_watched([tensor]) for tensor in tensors] if tf.executing_eagerly() else None


# --- Eager tensors, which do not know what they were made of --------------------------------------------------------


class Origins:
    """What the eager tensors depend on that are made while f or its rule runs. It holds identities, and no tensor."""

    __slots__ = ("_around", "_of", "call")

    def __init__(self, around: Origins | None, call: Call | None = None) -> None:
        self._of: dict[int, list[int]] = {}
        self._around = around
        self.call = call
        """whose rule it is; None for f, whose call would keep the options"""

    def notice(self, op_type: str, inputs: Sequence[Tensor], attributes: Any, outputs: Sequence[Tensor]) -> None:
        """Note an operation, if it depends on what is differentiated."""
        if not is_of_accumulator(op_type, attributes):
            self.add(outputs, inputs)

    def add(self, outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        """Note that outputs were made from inputs."""
        watched = [tensor._id for tensor in inputs if is_watched([tensor])]
        if watched:
            for tensor in outputs:
                self._of[tensor._id] = watched

    def leads_beyond(self, tensor: Tensor, given: frozenset[int]) -> bool:
        """Return True if a tensor that is watched depends on anything but the given ones."""
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

    def leads_to(self, tensor: Tensor, ends: Collection[int]) -> bool:
        """Return True if a tensor was made from one of these."""
        seen, todo = set[int](), [tensor._id]
        while todo:
            made_from = [each for each in self._made_from(todo.pop()) or () if each not in seen]
            if any(each in ends for each in made_from):
                return True
            seen.update(made_from)
            todo += made_from
        return False

    def _made_from(self, at: int) -> list[int] | None:
        origins: Origins | None = self
        while origins is not None:
            if at in origins._of:
                return origins._of[at]
            origins = origins._around
        return None


_following: ContextVar[tuple[Listener, ...]] = ContextVar("cgshim_tensorflow_following", default=())
_differentiated: ContextVar[set[int] | frozenset[int]] = ContextVar(
    "cgshim_tensorflow_differentiated", default=frozenset()
)


def note(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Note, for f and the rules that are running, that outputs were made from inputs without an operation."""
    for following in _following.get():
        following("", inputs, (), outputs)


class Differentiated:
    """While these tensors, and what tapes begin to watch, are what is differentiated, whatever they were made from."""

    __slots__ = ("_tensors", "_token")

    _token: Token[set[int] | frozenset[int]]

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def __enter__(self) -> None:
        self._token = _differentiated.set({*_differentiated.get(), *[tensor._id for tensor in self._tensors]})

    def __exit__(self, *_: object) -> None:
        _differentiated.reset(self._token)


def _note_what_is_watched(watch: Callable[..., None]) -> Callable[..., None]:
    """Return the function with which tapes are told what to watch, made to note it: tapes themselves do not tell."""

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


running_rule: RuleScope[Origins | None] = RuleScope("cgshim_tensorflow_running_rule")
"""the origins of what is made while a rule runs"""


class Listening:
    """While TensorFlow tells a listener of each operation of this thread, in graphs too.

    `add_op_callback` does the same, but unhooks the listeners of other threads when the first thread is done.
    """

    __slots__ = ("_listener",)

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def __call__(self, op_type: Any, inputs: Any, attributes: Any, outputs: Any, *_: Any, **named: Any) -> Any:
        """Tell the listener; this is what TensorFlow calls."""
        self._listener(op_type.decode() if isinstance(op_type, bytes) else op_type, inputs, attributes, outputs)
        return outputs  # in a graph, the next listener is told of what this one returns

    def __enter__(self) -> None:
        global _listeners, _before
        with _lock:
            if not _listeners:
                _before, execute.execute = execute.execute, execute.execute_with_callbacks
            _listeners += 1
        context.context().add_op_callback(self)

    def __exit__(self, *_: object) -> None:
        global _listeners, _before
        context.context().remove_op_callback(self)
        with _lock:
            _listeners -= 1
            if not _listeners:
                execute.execute, _before = _before, None


class Following(Listening):
    """While a listener is told of operations, and of what is made without one."""

    __slots__ = ("_token",)

    _token: Token[tuple[Listener, ...]]

    def __enter__(self) -> None:
        super().__enter__()
        self._token = _following.set((*_following.get(), self._listener))

    def __exit__(self, *_: object) -> None:
        _following.reset(self._token)
        super().__exit__()


# --- Tensors of graphs ----------------------------------------------------------------------------------------------

OPEN = ("Placeholder", "PlaceholderWithDefault")


def stand_ins(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor, and what it stands for in the graphs around its own."""
    while tensor is not None:
        yield tensor
        captures = () if is_eager(tensor) else getattr(tensor.graph, "captures", ())
        tensor = next((external for external, internal in captures if internal is tensor), None)


class Source(NamedTuple):
    """The end of a path back through graphs."""

    tensor: Tensor
    nearest: Tensor
    """what stands for it in the graph in which the path last passed an operation"""


def sources_beyond(tensor: Tensor, given: frozenset[int]) -> list[Source]:
    """Return what a tensor of a graph depends on besides the given ones: the ends of all other paths back."""
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
    """Return what a tensor was made from, or stands for; nothing if a tape follows it from here on."""
    if _is_read(tensor):
        return []
    back = list(tensor.op.inputs) or [*stand_ins(tensor)][1:2]
    return [] if back and is_watched([tensor]) and not is_watched(back) else back


def _is_read(tensor: Tensor) -> bool:
    """Return True if a tensor is what a variable holds."""
    return not is_eager(tensor) and tensor.op.type == "ReadVariableOp"


def may_be_differentiated(tensor: Tensor) -> bool:
    """Return True if a path back ends at an argument of a graph or at a variable, which may yet be differentiated."""
    open_end = tensor._id in _differentiated.get() or _is_read(tensor)
    return not is_eager(tensor) and (open_end or tensor.op.type in OPEN)


def in_this_graph(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of the graph that is being built, if one is, and the values of variables."""
    values = [tf.convert_to_tensor(x) if isinstance(x, tf.Variable) else x for x in tensors]
    if tf.executing_eagerly():
        return values
    capture = getattr(tf.compat.v1.get_default_graph(), "capture", None)
    return [tf.nest.map_structure(capture, x, expand_composites=True) for x in values] if capture else values
