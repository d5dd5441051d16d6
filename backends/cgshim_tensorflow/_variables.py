"""The variables that f reads: those that are trainable, and others that somebody watches nevertheless.

TensorFlow tells that a variable is read only if it is trainable: nothing else can be seen of the quick path of an eager
operation. So a watched variable is made to look trainable while f runs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from cgshim_tensorflow._origins import is_watched
from cgshim_tensorflow._private import BaseResourceVariable, forwardprop, record, tape

_not_trainable: dict[int, weakref.ref[Any]] = {}
"""by identity, the variables that are not trainable but that a tape or an accumulator was told to watch"""


def variables_read() -> contextlib.AbstractContextManager[Any]:
    """Return a context that notes the variables that are read in it."""
    return _with_watched_ones() if _not_trainable else record.VariableWatcher()


@contextlib.contextmanager
def _with_watched_ones() -> Iterator[Any]:
    passing = [variable for variable in _still_alive() if _is_watched(variable)]
    for variable in passing:
        variable._trainable = True
    try:
        with record.VariableWatcher() as watcher:
            yield watcher
    finally:
        for variable in passing:
            variable._trainable = False


def _still_alive() -> list[Any]:
    found = [reference() for reference in list(_not_trainable.values())]
    return [variable for variable in found if variable is not None]


def _is_watched(variable: Any) -> bool:
    """Return True if the variable's handle is watched, or what stands for it in a graph that is being built."""
    if is_watched([variable.handle]):
        return True
    forms = [variable.handle]
    for graph in reversed([] if tf.executing_eagerly() else _graphs()):
        captures = getattr(graph, "captures", ())
        forms += [internal for external, internal in captures if any(external is form for form in forms)]
    return any(is_watched([form]) for form in forms)


def _graphs() -> list[Any]:
    """Return the graph that is being built, and those around it."""
    graphs, graph = [], tf.compat.v1.get_default_graph()
    while graph is not None:
        graphs.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return graphs


# --- What is watched ------------------------------------------------------------------------------------------------


def _note(x: Any) -> None:
    """Note the variables in x that are not trainable."""
    variables = [each for each in tf.nest.flatten(x) if hasattr(each, "handle")]
    for variable in [part for each in variables for part in getattr(each, "_values", [each])]:  # one for each replica
        if isinstance(variable, BaseResourceVariable) and not variable.trainable:
            _not_trainable[id(variable)] = weakref.ref(variable, functools.partial(_forget, id(variable)))


def _forget(at: int, _: Any) -> None:
    _not_trainable.pop(at, None)


def _noting(watch: Callable[..., None]) -> Callable[..., None]:
    """Return a function that makes a tape or an accumulator watch x, and that notes x."""

    @functools.wraps(watch)
    def noted(watcher: Any, x: Any, *more: Any) -> None:
        watch(watcher, x, *more)
        _note(x)

    return noted


tape.watch_variable = _noting(tape.watch_variable)
forwardprop.ForwardAccumulator._watch = _noting(forwardprop.ForwardAccumulator._watch)
for _variable in [x for x in gc.get_objects() if issubclass(type(x), BaseResourceVariable)]:
    if not _variable.trainable and is_watched([_variable.handle]):  # by a tape that was there before this module
        _note(_variable)
