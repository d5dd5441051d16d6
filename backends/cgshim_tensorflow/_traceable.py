"""Whether a rule can do without the values of its tensors: no host function, and no `if` of Python's, reads them.

What a rule does with tensors is seen as it is done; what it reads of them in Python is not. So it is traced, where
nobody can read a value; once for all calls in which nothing but values differ.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph, dismantle_func_graph

from cgshim.backend import lift

Tensor = Any
Function = Callable[..., Any]
IsTensor = Callable[[Any], bool]


def reads_no_values(
    run: Callable[..., Any],
    grad_fn: Function,
    inputs: Sequence[Tensor],
    upstreams: Sequence[Tensor],
    is_tensor: IsTensor,
) -> bool:
    """Whether `run(grad_fn, inputs, *upstreams)` can be traced."""
    try:
        key: Any = _Fingerprint(is_tensor)([grad_fn, *inputs, *upstreams])
    except _UnknownObjectError:
        key = None
    if key is not None and key in _traced:
        return True
    tensors, remake = lift(grad_fn, is_tensor)
    if _can_be_traced(lambda: run(remake(_unknown(tensors)), _unknown(inputs), *_unknown(upstreams))):
        if key is not None:
            _remember(key)
        return True
    return _can_be_traced(lambda: run(grad_fn, inputs, *_unknown(upstreams)))


def _can_be_traced(run: Callable[[], Any]) -> bool:
    graph = FuncGraph("cgshim_rule")
    try:
        with graph.as_default():
            run()
    except Exception:  # noqa: BLE001  # whatever a rule raises that wants a value where a graph has none
        return False
    finally:
        dismantle_func_graph(graph)
    return True


def _unknown(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the same types, of which nobody knows the values."""
    return [tf.compat.v1.placeholder(x.dtype, x.shape) if isinstance(x, tf.Tensor) else x for x in tensors]


# --- What has been traced ---------------------------------------------------------------------------------------

_traced: dict[Any, None] = {}
_MOST = 1024


def _remember(key: Any) -> None:
    if len(_traced) >= _MOST:
        _traced.pop(next(iter(_traced)))
    _traced[key] = None


class _UnknownObjectError(Exception):
    """Raised for an object of which nobody knows what a rule reads in it."""


class _Fingerprint:
    """What two rules have in common that do the same, but for the values of tensors."""

    def __init__(self, is_tensor: IsTensor) -> None:
        self._is_tensor = is_tensor
        self._seen: dict[int, int] = {}

    def __call__(self, x: Any) -> Any:
        if self._is_tensor(x):
            return str(x.shape), x.dtype, type(x)
        if x is None or isinstance(x, (bool, int, float, complex, str, bytes, tf.DType)):
            return type(x), x
        if id(x) in self._seen:
            return self._seen[id(x)]
        self._seen[id(x)] = len(self._seen)
        if isinstance(x, types.FunctionType):
            return x.__code__, self([x.__defaults__, x.__kwdefaults__, *(x.__closure__ or ())]), self._globals_of(x)
        if isinstance(x, types.CellType):
            return self._content(x)
        if isinstance(x, (list, tuple)):
            return type(x), *map(self, x)
        if isinstance(x, dict):
            return type(x), *[(self(key), self(value)) for key, value in x.items()]
        if isinstance(x, functools.partial):
            return self([x.func, x.args, x.keywords])
        if isinstance(x, (type, types.ModuleType, types.BuiltinFunctionType)):
            return x
        raise _UnknownObjectError

    def _content(self, cell: types.CellType) -> Any:
        try:
            return self(cell.cell_contents)
        except ValueError:  # a name that was never assigned
            return None

    def _globals_of(self, function: types.FunctionType) -> Any:
        """The global names that a function reads: numbers and functions by what they are, objects by which they are."""
        named = [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]
        return tuple([self._of_global(x) for x in named])

    def _of_global(self, x: Any) -> Any:
        try:
            return self(x)
        except _UnknownObjectError:
            return _TheSame(x)


class _TheSame:
    """An object, known by its identity."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TheSame) and other._x is self._x

    def __hash__(self) -> int:
        return id(self._x)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The global names that code, and the functions that it makes, may read."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return (*code.co_names, *(name for names in inner for name in names))
