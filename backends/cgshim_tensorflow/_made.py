"""What f makes while tapes record it, and what its rule reads of that in a second order.

Tapes record f, so most of what a rule reads is connected with the arguments, wherever f kept it. What is left are
tensors that f made of values that Python read, as `tf.constant(np.exp(x.numpy()))`: no tape follows them, and nobody
can tell them from constants but by what they are made of. In a graph there are no values to read.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from cgshim_tensorflow._origins import is_of_accumulator, is_watched
from cgshim_tensorflow._private import shape_of_eager, uid
from cgshim_tensorflow._values import is_differentiable

if TYPE_CHECKING:
    from cgshim.backend import Call

Tensor = Any


class Made:
    """The tensors that an eager run of f has made: their numbers alone, so that none is kept alive."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.first = self._last = uid()
        self._by_operations: set[int] = set()
        self._of_arrays: set[int] = set()
        self._of_numbers: set[int] = set()
        self.reads: Counter[int] = Counter()
        """how often operations of f have read each tensor"""
        self._tensors: list[weakref.ref[Tensor]] | None = None

    def notice(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Note an operation of f."""
        of_arrays = False
        for x in inputs:
            at = x._id
            self.reads[at] += 1
            if at > self.first and at not in self._by_operations:
                if is_constant(x, self._call.f):
                    self._of_numbers.add(at)
                elif shape_of_eager(x) != ():
                    of_arrays = True
            elif at in self._of_arrays:
                of_arrays = True
        made = [y._id for y in outputs]
        self._by_operations.update(made)
        if self._tensors is not None:
            self._tensors += map(weakref.ref, outputs)
        if of_arrays:
            self._of_arrays.update(made)

    def remember(self) -> None:
        """Remember the tensors themselves, too."""
        self._tensors = []

    def alive(self) -> list[Tensor]:
        """Return those that are still there."""
        return [tensor for reference in self._tensors or () if (tensor := reference()) is not None]

    def close(self) -> None:
        """Note that f has returned."""
        self._last = uid()

    def has_made(self, tensor: Tensor) -> bool:
        """Return True if a tensor came into being while f ran."""
        return bool(self.first < tensor._id < self._last)

    @property
    def may_hold_values(self) -> bool:
        """Whether f may have made a tensor of values: one that neither operations nor constants explain."""
        explained = len(self._by_operations) + len(self._of_numbers)
        return bool(self._of_arrays) or self._last - self.first - 1 > explained

    def is_made_of_values(self, tensor: Tensor) -> bool:
        """Return True if f may have made a tensor of values that Python read, and not of numbers that f knows.

        What operations make of a Python number, as `tf.range(n) / 10.0`, is a constant.
        """
        if not self.has_made(tensor) or not is_differentiable(tensor) or is_watched([tensor]):
            return False
        if tensor._id in self._by_operations:
            return tensor._id in self._of_arrays
        return not self._is_constant(tensor)

    def _is_constant(self, tensor: Tensor) -> bool:
        """Return True if a small tensor holds nothing but numbers that f knows without reading a tensor."""
        return is_constant(tensor, self._call.f) or _values_of(tensor) <= _rounded(
            _numbers_known_to(self._call), tensor.dtype
        )


def is_constant(tensor: Tensor, f: Any) -> bool:
    """Return True if a small tensor holds nothing but numbers that stand in the code of f."""
    if not is_differentiable(tensor):
        return True
    code = getattr(getattr(f, "__func__", f), "__code__", None)
    return _values_of(tensor) <= _numbers_in(code, tensor.dtype)


def _values_of(tensor: Tensor) -> set[Any]:
    """Return the values of a small tensor; one that is no number stands for those of a large one."""
    return {*tensor.numpy().ravel().tolist()} if tensor.shape.num_elements() <= _MOST else {None}


_MOST = 64


def _numbers_known_to(call: Call) -> Iterator[Any]:
    """Yield the numbers in f's closure and object, in its options, and in static arguments."""
    f = getattr(call.f, "__func__", call.f)
    yield from [cell.cell_contents for cell in getattr(f, "__closure__", None) or () if cell != _EMPTY]
    yield from getattr(getattr(call.f, "__self__", None), "__dict__", {}).values()
    yield from call.options.values()
    yield from [leaf for spec in call.arguments.specs for leaf in spec.static_leaves()]


@functools.lru_cache(maxsize=4096)
def _numbers_in(code: types.CodeType | None, dtype: tf.DType) -> frozenset[Any]:
    """Return 0, 1, and the numbers in some code, as a dtype has them."""
    return _rounded((0, 1, *_constants_in(code)), dtype)


def _constants_in(code: types.CodeType | None) -> Iterator[Any]:
    for constant in () if code is None else code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _constants_in(constant)
        elif isinstance(constant, tuple):
            yield from constant
        else:
            yield constant


def _rounded(numbers: Iterable[Any], dtype: tf.DType) -> frozenset[Any]:
    kind: Any = dtype.as_numpy_dtype
    known = [number for number in numbers if isinstance(number, (int, float)) and abs(number) < _LARGE]
    return frozenset([kind(sign * number).item() for number in known for sign in (1, -1)])


_EMPTY = types.CellType()
_LARGE = float(np.finfo(np.float32).max)


class Reading:
    """The tensors that the operations of a rule read and have not made."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.reads: Counter[int] = Counter()
        """how often each of them was read"""
        self._made: set[int] = set()

    def notice(self, op_type: str, inputs: Sequence[Tensor], attributes: Any, outputs: Sequence[Tensor]) -> None:
        """Note an operation of the rule."""
        if not is_of_accumulator(op_type, attributes):
            read = {x._id: x for x in inputs if x._id not in self._made}
            self.tensors.update(read)
            self.reads.update([x._id for x in inputs])
            self._made.update([y._id for y in outputs])
