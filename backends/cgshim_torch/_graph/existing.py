"""PyTorch: what f and its rule hold, and what of that existed before f ran.

A tensor that existed before f ran is no function of the arguments. f can name what is in its
closure, its object, its options and its global variables; each is looked into a few levels deep.
What is further away is not known: the derivative of a tensor from there is refused, and not taken
for zero.

A rule is never taken apart: it runs as it is, on what it holds. But autograd saves memory, and
notices changes in place, for those tensors alone that are saved with save_for_backward.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import torch

from cgshim.backend import SIMPLE, Call, FunctionHolder, Tensor, subvals, tensors_inside
from cgshim_torch._versions.private import alive_in, functorch

_METHODS_IN_C = (BuiltinFunctionType, MethodWrapperType)
_LIBRARIES = {"torch", "numpy", "scipy", "cgshim", "cgshim_torch", *sys.stdlib_module_names}
_CODE = (ModuleType, FunctionType, BuiltinFunctionType, type, type(torch.add))
_OF_PULLBACKS = "torch._functorch.eager_transforms"
_UNASSIGNED = CellType()
_WITH_NAMES = (type, SimpleNamespace)
_LEVELS = 3
"""how deep what f can name is looked into: an object of its closure, a dict in that, a tensor in that"""
MOST = 1000
"""of how many items a container may be to be looked into in each call: a vocabulary of 100,000 took 200 ms"""


# --- Names ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes that code uses, with those of functions that it
    makes.
    """
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))


def is_of_a_library(x: Any) -> bool:
    """Return True for a module, a function or a class of torch, NumPy and the like: they hold no
    residuals.
    """
    name = "__name__" if isinstance(x, ModuleType) else "__module__"
    return isinstance(x, _CODE) and _is_a_library(getattr(x, name) or "builtins")


@functools.lru_cache(maxsize=4096)
def _is_a_library(name: str) -> bool:
    return name.partition(".")[0] in _LIBRARIES and not name.startswith("cgshim.testing")


def library_names(function: Any, and_functions: bool = False) -> tuple[tuple[str, Any], ...] | None:
    """Return the globals that a function names; None if one is neither a constant nor of a library.

    Other functions are none, either, unless they are wanted: one that holds nothing and names
    nothing else.
    """
    if not isinstance(function, FunctionType):
        return None
    named = [(name, function.__globals__.get(name)) for name in names_in(function.__code__)]
    for _, x in named:
        if type(x) in SIMPLE or is_of_a_library(x):
            continue
        if not (and_functions and holds_nothing(x) and library_names(x) is not None):
            return None
    return tuple(named)


def holds_nothing(function: Any) -> bool:
    """Return True for a function that has no closure, no attributes, and numbers alone for default
    values.
    """
    is_open = not isinstance(function, FunctionType) or function.__closure__ or function.__dict__
    return not is_open and all(type(held.tensor) in SIMPLE for held in held_by(function) or ())


def reads_arguments_alone(call: Call) -> bool:
    """Return True if f can read nothing but its arguments and libraries."""
    if any(type(x) not in SIMPLE for x in call.static) or not holds_nothing(call.f):
        return False
    return library_names(call.f, and_functions=True) is not None


# --- What things hold -----------------------------------------------------------------------------


class Held(NamedTuple):
    """Something that a function, a container or an object holds."""

    tensor: Any
    holder: CellType | list[Any] | dict[Any, Any] | SimpleNamespace | type | Held | None = None
    """what may hold something else for a while, or the place of a tuple, which is made again for that; None
    for what existed before f ran
    """
    key: Any = None

    @property
    def outermost(self) -> Any:
        """What holds the tuple, if a tuple is the holder; else the holder."""
        return self.holder.outermost if isinstance(self.holder, Held) else self.holder

    def items(self) -> list[Held]:
        """Return the items of the tuple that is held; their places do not hold the tuple."""
        can_be_made = type(self.tensor) is tuple or hasattr(self.tensor, "_make")
        place = (
            Held(None, self.holder, self.key) if can_be_made and self.holder is not None else None
        )
        return [Held(item, place, at) for at, item in enumerate(self.tensor)]


def held_by(x: Any) -> list[Held] | None:
    """Return what functions and Python's containers hold; None for any other object."""
    kind = type(x)
    if kind is FunctionType:
        cells = [
            Held(inner, cell, "cell_contents")
            for cell in x.__closure__ or ()
            for inner in contents(cell)
        ]
        if not (x.__defaults__ or x.__kwdefaults__ or x.__dict__):
            return cells
        defaults = *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()
        return [
            *cells,
            *map(Held, defaults),
            *(Held(inner, x.__dict__, key) for key, inner in x.__dict__.items()),
        ]
    if kind is list or kind is dict:
        return [Held(inner, x, key) for key, inner in (x.items() if kind is dict else enumerate(x))]
    if kind is SimpleNamespace:
        return [Held(inner, x, name) for name, inner in vars(x).items()]
    if isinstance(x, tuple):
        return [*map(Held, x)]
    if kind is functools.partial:
        return [*map(Held, (x.func, *x.args, *x.keywords.values()))]
    if isinstance(x, FunctionHolder):
        return [Held(x.held_function)]
    if kind is MethodType:
        return [Held(x.__func__), Held(x.__self__)]
    return [Held(x.__self__)] if kind in _METHODS_IN_C else None


def contents(cell: CellType) -> list[Any]:
    """Return what a variable holds; nothing if it was never assigned."""
    return [] if cell == _UNASSIGNED else [cell.cell_contents]


def inside(x: Any, most: float = math.inf) -> list[Any]:
    """Return what an object holds, in its attributes and as a container; not of a container that is
    longer, unless it begins with a tensor.
    """
    slots = copyreg._slotnames(type(x))  # type: ignore[attr-defined]  # which the class remembers
    held = [*getattr(x, "__dict__", {}).values(), *[getattr(x, name, None) for name in slots]]
    if isinstance(x, (list, tuple, set, frozenset, deque, dict)):
        items = x.values() if isinstance(x, dict) else x
        if len(items) <= most or isinstance(next(iter(items)), torch.Tensor):
            held += items
    elif isinstance(x, torch.nn.Module):
        held += [buffers for each in x.modules() if (buffers := each._buffers)]
    return held


class Holdings:
    """What a rule holds: in its variables, in functions and Python's containers in them."""

    def __init__(self, *roots: Any, existing: Collection[int] = ()) -> None:
        self.tensors: list[Held] = []
        self.objects: list[Any] = []
        """other objects, which may hold more"""
        self.seen: dict[int, Any] = {}
        """all that holds anything, by identity"""
        self.pullbacks: list[FunctionType] = []
        """those of torch.func.vjp, which hold tensors with the graph that made them"""
        self._existing = existing
        self._visit([*map(Held, roots)])

    def _visit(self, level: Sequence[Held]) -> None:
        seen, existing = self.seen, self._existing
        while level:
            inner: list[Held] = []
            for held in level:
                x, holder, key = held
                if type(holder) is Held:
                    holder = holder.outermost
                if holder is not None:
                    seen[id(holder)] = holder
                if isinstance(x, torch.Tensor):
                    self.tensors.append(Held(x, None, key) if id(holder) in existing else held)
                # a tuple is looked into at each of its places, for it is made again at each
                elif type(x) not in SIMPLE and (id(x) not in seen or isinstance(x, tuple)):
                    seen[id(x)] = x
                    inner += self._inside(held)
            level = inner

    def _inside(self, held: Held) -> Sequence[Held]:
        x = held.tensor
        if isinstance(x, tuple):
            return held.items()
        if type(x) is FunctionType and id(x) in self._existing:
            return ()  # a helper: what it holds was there before, too
        if type(x) is FunctionType and x.__module__ == _OF_PULLBACKS:
            self.pullbacks.append(x)
        inner = held_by(x)
        if inner is None and not is_of_a_library(x):
            self.objects.append(x)
        return inner or ()


class Reach:
    """What f can name: what it holds, its options, its globals, and what is in them, some levels
    deep.

    In each call a container that is longer than `MOST` is not looked into, unless it begins with a
    tensor. Where a rule reads a tensor that is not found so, its second order is refused.
    """

    def __init__(self, call: Call, levels: int = _LEVELS, most: float = math.inf) -> None:
        self._most = most
        self.tensors: list[Tensor] = []
        self.seen: dict[int, Any] = {}
        """all that holds anything, by identity"""
        self.names: dict[str, None] = {}
        """the names that f and its helpers use"""
        level = [call.f, *call.static]
        for _ in range(levels):
            # functions first, which tell what else is named
            level.sort(key=_is_no_function)
            held: list[Any] = []
            self._look_into_each(level, held)
            level = held
        self.tensors += [x for x in level if isinstance(x, torch.Tensor)]

    def _look_into_each(self, level: Iterable[Any], held: list[Any]) -> None:
        for x in level:
            if type(x) not in SIMPLE and id(x) not in self.seen:
                self._look_into(x, held)

    def _look_into(self, x: Any, held: list[Any]) -> None:
        """Add what something holds; of a module or a class what f names in it."""
        if is_of_a_library(x):
            return
        if isinstance(x, torch.Tensor):
            self.tensors.append(x)
            return
        self.seen[id(x)] = x
        if type(x) is FunctionType:
            self._add_held(x, held)
            names, scope = names_in(x.__code__), x.__globals__
            self.names.update(dict.fromkeys(names))
            held += [scope[name] for name in names if name in scope]
        elif isinstance(x, (MethodType, functools.partial, FunctionHolder)):
            inner: list[Any] = []
            self._add_held(x, inner)
            self._look_into_each(inner, held)  # as near as what they hold
        elif isinstance(x, (type, ModuleType)):
            scope = vars(x)
            held += [scope[name] for name in self.names if name in scope]
        else:
            held += inside(x, self._most)
            method = getattr(type(x), "__call__", None)  # noqa: B004  # it is looked into
            if type(method) is FunctionType:
                held.append(method)

    def _add_held(self, function: Any, held: list[Any]) -> None:
        """Add what a function holds, and note its variables, which may hold something else."""
        for inner in held_by(function) or ():
            held.append(inner.tensor)
            if inner.holder is not None:
                self.seen[id(inner.holder)] = inner.holder


def _is_no_function(x: Any) -> bool:
    return type(x) is not FunctionType


@contextlib.contextmanager
def holding(pairs: Collection[tuple[Held, Tensor]], lock: Any) -> Iterator[None]:
    """Let what a rule or a module holds be other tensors: for calls that no function mode sees."""
    with lock:
        before = [_now_in(place) for place, _ in pairs]
        for place, tensor in pairs:
            put(place, tensor)
        try:
            yield
        finally:
            for (place, tensor), was in zip(pairs, before, strict=True):
                if _now_in(place) is tensor:  # not what the rule has put there itself
                    put(place, was)


def put(place: Held, x: Any) -> None:
    """Let a variable, an item of a container or a name of a class be something else."""
    if isinstance(place.holder, Held):
        now = _now_in(place.holder)
        if isinstance(now, tuple):
            put(place.holder, getattr(type(now), "_make", tuple)(subvals(now, [place.key], [x])))
    elif isinstance(place.holder, (CellType, *_WITH_NAMES)):
        setattr(place.holder, place.key, x)
    elif place.holder is not None:
        place.holder[place.key] = x


def _now_in(place: Held) -> Any:
    try:
        if isinstance(place.holder, Held):
            return _now_in(place.holder)[place.key]
        if isinstance(place.holder, CellType):
            return place.holder.cell_contents
        holder: Any = vars(place.holder) if isinstance(place.holder, _WITH_NAMES) else place.holder
        return holder[place.key]
    except (ValueError, LookupError, TypeError):
        return None


# --- The state of modules -------------------------------------------------------------------------
#
# While functional_call runs, it puts other tensors in the places of a module's Parameters. They are
# variables of an f that reads them, like Parameters, leaves or not. A rule runs later; for that they
# are put there again.


def put_in_modules(f: Callable[..., Any]) -> list[Held]:
    """Return what functional_call has put in the modules that f holds, and is differentiated."""
    held = tensors_inside(f, lambda x: isinstance(x, torch.nn.Module))
    return [
        Held(tensor, place, name)
        for module in {id(module): module for each in held for module in each.modules()}.values()
        for place in (module._parameters, module._buffers)
        for name, tensor in place.items()
        if tensor is not None and not isinstance(tensor, torch.nn.Parameter)
        and (tensor.requires_grad or functorch.is_functorch_wrapped_tensor(tensor))
    ]  # fmt: skip


def state_of(f: Callable[..., Any], variables: Sequence[Tensor]) -> list[tuple[Held, int]]:
    """Return the places in modules of the variables that f read, each with its variable's number;
    none if all are Parameters, as is usual.
    """
    if all(isinstance(variable, torch.nn.Parameter) for variable in variables):
        return []
    numbers = {id(variable): number for number, variable in enumerate(variables)}
    return [
        (each, numbers[id(each.tensor)]) for each in put_in_modules(f) if id(each.tensor) in numbers
    ]


# --- What existed before f ran --------------------------------------------------------------------


class Existing:
    """The tensors that f could read before it ran, by identity. Parameters always did; the rest is
    noted, but for those of lazy modules, which f initializes.
    """

    def __init__(self, call: Call | None, holders: Collection[int] = ()) -> None:
        self._tensors: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.holders = holders
        """the identities of functions, variables and containers that f can name: they are not to be touched"""
        if call is not None:
            reach = Reach(call, most=MOST)
            self.holders = set(reach.seen)
            self._tensors = {
                id(t): (weakref.ref(t), version_of(t))
                for t in reach.tensors
                if type(t) is not torch.nn.Parameter and not torch.nn.parameter.is_lazy(t)
            }

    def forget_changed(self) -> None:
        """Leave out what f has written to in place: that may be a function of the arguments now."""
        self._tensors = self._tensors and {
            key: (ref, version)
            for key, (ref, version) in self._tensors.items()
            if (t := alive_in(ref)) is not None and version_of(t) == version
        }

    def has(self, t: Tensor) -> bool:
        """Return True if a tensor existed before f ran, and f has not changed it."""
        known = self._tensors.get(id(t))
        is_noted = known is not None and alive_in(known[0]) is t
        return is_noted or type(t) is torch.nn.Parameter


NOTHING = Existing(None)
"""of an f that reads its arguments alone"""


def existing_for(call: Call) -> Existing:
    """Return what f of a call could read before it ran."""
    return NOTHING if reads_arguments_alone(call) else Existing(call)


def version_of(t: Tensor) -> int:
    """Return how often a tensor was changed in place; in inference mode torch does not count."""
    return 0 if t.is_inference() else int(t._version)


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return `version_of` each, without a call for each: there may be thousands."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:  # one was made in inference mode
        return [*map(version_of, tensors)]


# --- Another run of f leaves no trace -------------------------------------------------------------


@contextlib.contextmanager
def without_trace(reach: Reach) -> Iterator[None]:
    """Undo what is written meanwhile to what f can name. Tensors are not copied: `reads` refuses to
    write to them. A name that is new, the first run would have made.
    """
    containers: list[tuple[Any, Any]] = []
    named: list[Held] = []
    for x in reach.seen.values():
        if isinstance(x, CellType):
            named += [Held(inner, x, "cell_contents") for inner in contents(x)]
            continue
        if isinstance(x, (list, deque, set, dict)):
            containers.append((x, x.copy()))
        if isinstance(x, (type, ModuleType, FunctionType)):
            scope: Mapping[str, Any] = x.__globals__ if isinstance(x, FunctionType) else vars(x)
            holder: Any = x if isinstance(x, type) else scope
            named += [Held(scope[name], holder, name) for name in reach.names if name in scope]
        attributes = None if isinstance(x, ModuleType) else getattr(x, "__dict__", None)
        if type(attributes) is dict:  # not that of a class
            containers.append((attributes, attributes.copy()))
    try:
        yield
    finally:
        for place in named:
            if _now_in(place) is not place.tensor:
                put(place, place.tensor)
        for x, before in containers:
            if _identities(x) != _identities(before):
                x.clear()
                (x.extend if isinstance(x, (list, deque)) else x.update)(before)


def _identities(x: Any) -> list[int]:
    return [*map(id, x), *map(id, x.values() if isinstance(x, dict) else ())]
