"""Fingerprints of rules: equal for two rules that do the same, but for the values of tensors."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from cgshim.backend import SIMPLE, FunctionHolder, attributes_of
from cgshim_tensorflow._values import is_eager

IsTensor = Callable[[Any], bool]

_MOST_OBJECTS = 500
"""a look at more takes as long as tracing the rule does"""
_MOST_BYTES = 2**20
"""the size of the largest NumPy array whose content is compared"""


def fingerprint(x: Any, is_tensor: IsTensor) -> Any:
    """Return what is equal for things that do the same, but for the values of tensors; None if that is unknown."""
    try:
        return _Fingerprint(is_tensor)(x)
    except _UnknownObjectError:
        return None


class _UnknownObjectError(Exception):
    """Raised for an object if it is unknown what a rule may read in it."""


class _Fingerprint:
    """One look at a thing, and at all that it holds."""

    def __init__(self, is_tensor: IsTensor) -> None:
        self._is_tensor = is_tensor
        self._place = "closure"
        """where the look is now: in a closure, in an object, or at a global name"""
        self._seen: dict[tuple[int, str], int] = {}
        self._alive: list[Any] = []  # what was seen: while it lives, nothing else has its identity

    def __call__(self, x: Any) -> Any:
        if self._is_tensor(x):
            return self._of_tensor(x)
        if x is None or isinstance(x, (bool, int, float, complex, str, bytes, tf.DType)):
            return type(x), x
        seen = (id(x), self._place)
        if seen in self._seen:
            return self._seen[seen]
        self._seen[seen] = len(self._seen)
        self._alive.append(x)
        if len(self._seen) > _MOST_OBJECTS:
            raise _UnknownObjectError
        return self._of_contents(x)

    def _of_contents(self, x: Any) -> Any:
        if isinstance(x, types.FunctionType):
            return x.__code__, self([x.__defaults__, x.__kwdefaults__, *(x.__closure__ or ())]), self._of_globals(x)
        if isinstance(x, types.CellType):
            return self._of_cell(x)
        if isinstance(x, (list, tuple)):
            return type(x), *map(self, x)
        if isinstance(x, dict):
            return type(x), *[(self(key), self(value)) for key, value in x.items()]
        if isinstance(x, functools.partial):
            return functools.partial, self([x.func, x.args, x.keywords])
        if isinstance(x, types.MethodType):
            return types.MethodType, self([x.__func__, x.__self__])
        if isinstance(x, FunctionHolder):
            return type(x), self(x.held_function)
        if isinstance(x, (type, types.ModuleType, types.BuiltinFunctionType)):
            return x
        return self._of_array(x) if isinstance(x, (np.ndarray, np.generic)) else self._of_object(x)

    def _of_tensor(self, x: Any) -> Any:
        if self._place == "closure" or isinstance(x, tf.Variable):
            return str(x.shape), x.dtype, type(x)
        if is_eager(x):  # a trace of the rule reads its value: nobody can put another in its place
            return type(x), x._id
        raise _UnknownObjectError

    def _of_array(self, x: Any) -> Any:
        if x.dtype.hasobject or x.nbytes > _MOST_BYTES:
            raise _UnknownObjectError
        return type(x), x.dtype.str, x.shape, hashlib.blake2b(x.tobytes()).digest()

    def _of_object(self, x: Any) -> Any:
        """Know an object by its class and its attributes, if there is no more to it and it is not a global one."""
        attributes = attributes_of(x) if _has_attributes_alone(type(x)) and self._place != "global" else []
        if not attributes:
            raise _UnknownObjectError
        names = tuple(getattr(x, "__dict__", ()))
        of_class = [value for base in type(x).__mro__ for value in vars(base).values() if type(value) in SIMPLE]
        return type(x), names, tuple(of_class), self._in("object", attributes)

    def _of_cell(self, cell: types.CellType) -> Any:
        try:
            return self(cell.cell_contents)
        except ValueError:  # a name that was never assigned
            return None

    def _of_globals(self, function: types.FunctionType) -> Any:
        """Know what a function reads by global names: numbers and functions by value, objects by identity."""
        named = [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]
        return tuple([self._of_global(x) for x in named])

    def _of_global(self, x: Any) -> Any:
        try:
            return self._in("global", x)
        except _UnknownObjectError:
            return _TheSame(x)

    def _in(self, place: str, x: Any) -> Any:
        before, self._place = self._place, place
        try:
            return self(x)
        finally:
            self._place = before


def _has_attributes_alone(kind: Any) -> bool:
    """Return True if instances of a class hold nothing but their attributes: nothing that only C code knows of."""
    slots = [name for base in kind.__mro__ for name in vars(base).get("__slots__", ()) if not name.startswith("__")]
    pointers = len(slots) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return not kind.__itemsize__ and bool(kind.__basicsize__ == object.__basicsize__ + _POINTER * pointers)


_POINTER = tuple.__itemsize__


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
    """Return the global names that code, and the functions that it makes, may read."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return (*code.co_names, *(name for names in inner for name in names))
