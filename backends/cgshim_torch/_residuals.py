"""PyTorch: the tensors that a rule holds, for what must see them: saved tensors, their hooks, torch.func.

A rule is never taken apart: it runs as it is, on what it holds. But autograd saves memory, and notices changes in
place, for those tensors alone that are saved with save_for_backward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from cgshim.backend import SIMPLE, FunctionHolder
from cgshim_torch._existing import METHODS_IN_C, contents, is_of_a_library

Tensor = Any


class Held(NamedTuple):
    """A tensor in a variable, a list or a dict that a rule holds."""

    tensor: Tensor
    holder: CellType | list[Any] | dict[Any, Any] | None
    """what may hold another tensor for a while; None for a tuple, and for what existed before f ran"""
    key: Any


class Holdings:
    """What a rule holds: in its variables, in functions and Python's containers in them."""

    def __init__(self, rule: Callable[..., Any], existing: Collection[int] = ()) -> None:
        self.tensors: list[Held] = []
        self.objects: list[Any] = []
        """other objects, which may hold more"""
        self.seen: set[int] = set()
        """the identities of all that holds anything"""
        self._existing = existing
        self._visit(rule)

    def _visit(self, x: Any) -> None:
        if id(x) in self.seen:
            return
        self.seen.add(id(x))
        items: list[tuple[Any, Any, Any]] = []
        kind = type(x)
        if kind is FunctionType and id(x) in self._existing:
            return  # a helper: what it holds was there before, too
        if kind is FunctionType:
            items = [(cell, None, inner) for cell in x.__closure__ or () for inner in contents(cell)]
            items += [(None, None, inner) for inner in (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values())]
            items += [(x.__dict__, key, inner) for key, inner in x.__dict__.items()]
        elif kind is list:
            items = [(x, at, inner) for at, inner in enumerate(x)]
        elif isinstance(x, tuple):
            items = [(None, None, inner) for inner in x]
        elif kind is dict:
            items = [(x, key, inner) for key, inner in x.items()]
        elif kind is functools.partial:
            items = [(None, None, inner) for inner in (x.func, *x.args, *x.keywords.values())]
        elif isinstance(x, FunctionHolder):
            items = [(None, None, x.held_function)]
        elif kind is MethodType:
            items = [(None, None, x.__func__), (None, None, x.__self__)]
        elif kind in METHODS_IN_C:
            items = [(None, None, x.__self__)]
        elif not is_of_a_library(x):
            self.objects.append(x)
        for holder, key, inner in items:
            if holder is not None:
                self.seen.add(id(holder))
            if isinstance(inner, torch.Tensor):
                self.tensors.append(Held(inner, None if id(holder) in self._existing else holder, key))
            elif type(inner) not in SIMPLE:
                self._visit(inner)


@contextlib.contextmanager
def holding(held: Sequence[Held], tensors: Sequence[Tensor], lock: Any) -> Iterator[None]:
    """Let what a rule holds be other tensors, or nothing where one is None: for calls that no function mode sees."""
    with lock:
        for each, tensor in zip(held, tensors, strict=True):
            put(each, tensor)
        try:
            yield
        finally:
            for each, tensor in zip(held, tensors, strict=True):
                if _now_in(each) is tensor:  # not what the rule has put there itself
                    put(each, each.tensor)


def put(held: Held, tensor: Tensor | None) -> None:
    """Let a variable or an item of a container hold a tensor, or nothing."""
    if isinstance(held.holder, CellType):
        if tensor is None:
            del held.holder.cell_contents
        else:
            held.holder.cell_contents = tensor
    elif held.holder is not None:
        held.holder[held.key] = tensor


def _now_in(held: Held) -> Any:
    try:
        return held.holder.cell_contents if isinstance(held.holder, CellType) else held.holder[held.key]  # type: ignore[index]
    except (ValueError, LookupError, TypeError):
        return None
