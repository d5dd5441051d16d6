"""PyTorch: what f can name, and what of that existed before it ran.

A tensor that existed before f ran is no function of the arguments. f can name what is in its closure, its object, its
options and its global variables; each is looked into one level deep. What is further away is not known: the derivative
of a tensor from there is refused, and not taken for zero.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from cgshim.backend import SIMPLE, FunctionHolder

if TYPE_CHECKING:
    from cgshim.backend import Call

Tensor = Any

_LIBRARIES = {"torch", "numpy", "scipy", "cgshim", "cgshim_torch", *sys.stdlib_module_names}


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes that code uses, with those of functions that it makes."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))


def is_of_a_library(x: Any) -> bool:
    """Return True for a module, a function or a class of torch, NumPy and the like: they hold no residuals."""
    if isinstance(x, _CODE):
        return _is_a_library((x.__name__ if isinstance(x, ModuleType) else x.__module__) or "builtins")
    return False


_CODE = (ModuleType, FunctionType, BuiltinFunctionType, type, type(torch.add))


@functools.lru_cache(maxsize=4096)
def _is_a_library(name: str) -> bool:
    return name.partition(".")[0] in _LIBRARIES and not name.startswith("cgshim.testing")


def names_libraries_alone(function: FunctionType) -> bool:
    """Return True if a function can read nothing but its closure, its arguments and libraries."""
    return library_names(function) is not None


_CONTAINERS = frozenset([list, tuple, dict, set, deque])
METHODS_IN_C = (BuiltinFunctionType, MethodWrapperType)


def library_names(function: Any, and_functions: bool = False) -> list[tuple[str, Any]] | None:
    """Return the globals that a function names; None if one is neither a constant nor of a library.

    Other functions are none, either, unless they are wanted: one that holds nothing and names nothing else.
    """
    if not isinstance(function, FunctionType):
        return None
    named = [(name, function.__globals__.get(name)) for name in names_in(function.__code__)]
    for _, x in named:
        if x is None or type(x) in SIMPLE or is_of_a_library(x):
            continue
        if not (and_functions and holds_nothing(x) and library_names(x) is not None):
            return None
    return named


def holds_nothing(function: Any) -> bool:
    """Return True for a function that has no closure, no attributes, and numbers alone for default values."""
    if not isinstance(function, FunctionType) or function.__closure__ or function.__dict__:
        return False
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    return all(type(x) in SIMPLE for x in defaults)


def holds_no_tensor(x: Any) -> bool:
    """Return True if an object has no attributes but numbers and the like."""
    kind: Any = type(x)
    if _slots(kind) or isinstance(x, (torch.Tensor, dict, list, tuple, set, frozenset, deque, type, ModuleType)):
        return False
    return all(type(value) in SIMPLE for value in attributes_of(x).values())


_IMPORTERS = frozenset(["numpy", "random", "scipy", "sys", "importlib", "__import__", "exec", "eval"])


class Reach:
    """What f can name: its variables, and the objects and containers in them."""

    def __init__(self, call: Call) -> None:
        self.names: dict[str, None] = {}
        self.scopes: list[dict[str, Any]] = []
        self.cells: list[CellType] = []
        self.roots: list[Any] = [*call.options.values()]
        if not call.arguments.are_tensors:
            self.roots += [leaf for spec in call.arguments.specs for leaf in spec.static_leaves()]
        self._add_callable(call.f, 3)
        self._named = self._globals()
        helpers = [x for x in self._named if type(x) is FunctionType and not is_of_a_library(x)]
        if helpers:  # they may read other globals
            for helper in helpers:
                self._add_callable(helper, 0)
            self._named = self._globals()
        self.roots = [x for x in self.roots if type(x) not in SIMPLE and not is_of_a_library(x)]
        self.roots += [x for x in self._named if not is_of_a_library(x)]

    def _globals(self) -> list[Any]:
        found = [scope.get(name) for scope in self.scopes for name in self.names]
        return [x for x in found if type(x) not in SIMPLE]

    def libraries(self) -> set[str]:
        """Return the names of the libraries that f can call, as far as it names them."""
        modules = [x.__name__ if isinstance(x, ModuleType) else x.__module__ for x in self._named if is_of_a_library(x)]
        return {(name or "builtins").partition(".")[0] for name in (*modules, *_IMPORTERS.intersection(self.names))}

    def _add_callable(self, f: Any, depth: int) -> None:
        """Add what a function holds, and what the functions in its closure hold."""
        if isinstance(f, MethodType):
            self.roots.append(f.__self__)
            f = f.__func__
        if isinstance(f, functools.partial):
            self.roots += [*f.args, *f.keywords.values()]
            self._add_callable(f.func, depth)
        elif isinstance(f, FunctionHolder):
            self._add_callable(f.held_function, depth)
        elif isinstance(f, FunctionType):
            self.roots += [*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()]
            if f.__dict__:
                self.roots.append(f)
            self.names.update(dict.fromkeys(names_in(f.__code__)))
            if not any(scope is f.__globals__ for scope in self.scopes):
                self.scopes.append(f.__globals__)
            for cell in f.__closure__ or ():
                self.cells.append(cell)
                for x in contents(cell):
                    self.roots.append(x)
                    if depth and isinstance(x, (FunctionType, MethodType, functools.partial, FunctionHolder)):
                        self._add_callable(x, depth - 1)
        elif not isinstance(f, (type, BuiltinFunctionType)):  # an object with __call__
            self.roots.append(f)
            method = getattr(type(f), "__call__", None)  # noqa: B004  # it is looked into
            if isinstance(method, FunctionType) and depth:
                self._add_callable(method, depth - 1)

    def containers(self) -> Iterator[Any]:
        """Yield the roots that hold anything, the containers and plain objects in them, and buffers of modules."""
        for x in self.roots:
            if (type(x) is FunctionType and not x.__dict__) or isinstance(x, torch.Tensor):
                continue
            yield x
            for inner in self.values_of(x):
                kind: Any = type(inner)
                if kind not in SIMPLE and inner is not None and (
                    inner if kind in _CONTAINERS else _has_attributes(kind) and inner.__dict__
                ):  # fmt: skip
                    yield inner
            if isinstance(x, torch.nn.Module):
                module: Any = x
                yield from (inside._buffers for inside in module.modules() if inside._buffers)

    def values_of(self, x: Any) -> Iterable[Any]:
        """Return what an object holds one level deep; of a module or a class what f names in it."""
        if isinstance(x, dict):
            return x.values()
        if isinstance(x, (list, tuple, set, frozenset, deque)):
            return x
        attributes = attributes_of(x)
        if isinstance(x, (type, ModuleType)):
            return [attributes[name] for name in self.names if name in attributes]
        kind: Any = type(x)
        slots = _slots(kind)
        return [*attributes.values(), *(getattr(x, name, None) for name in slots)] if slots else attributes.values()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that f can read."""
        yield from (x for x in self.roots if isinstance(x, torch.Tensor))
        for holder in self.containers():
            yield from (x for x in self.values_of(holder) if isinstance(x, torch.Tensor))


def contents(cell: CellType) -> list[Any]:
    """Return what a variable holds; nothing if it was never assigned."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def attributes_of(x: Any) -> Any:
    """Return the attributes of an object that has a dict of them."""
    try:
        return object.__getattribute__(x, "__dict__") if not isinstance(x, type) else vars(x)
    except AttributeError:
        return {}


@functools.lru_cache(maxsize=4096)
def _has_attributes(kind: Any) -> bool:
    """Return True for a class whose objects are looked into, beside what holds them."""
    root = kind.__module__.partition(".")[0]
    return kind.__dictoffset__ != 0 and root not in ("torch", "numpy", "builtins") and not issubclass(kind, type)


@functools.lru_cache(maxsize=4096)
def _slots(kind: Any) -> tuple[str, ...]:
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__ if not is_of_a_library(base)]
    return tuple(name for names in found for name in ([names] if isinstance(names, str) else names) if name[:2] != "__")


class Existing:
    """The tensors that f could read before it ran, by identity. Parameters always did; the rest is noted by `Reach`."""

    def __init__(self, call: Call, tensors: Iterable[Tensor] | None = None) -> None:
        self._call: Call | None = call
        self._holders: set[int] | None = None
        self._tensors = {
            id(t): (weakref.ref(t), version_of(t))
            for t in (Reach(call).tensors() if tensors is None else tensors) if type(t) is not torch.nn.Parameter
        }  # fmt: skip

    @property
    def holders(self) -> set[int]:
        """The identities of functions, variables and containers that f can name: they are not to be touched.

        It is asked after f has run, because few calls need it. What f itself has put there is then not touched either.
        """
        if self._holders is None:
            assert self._call is not None
            reach = Reach(self._call)
            self._holders = {id(x) for x in (self._call.f, *reach.cells, *reach.roots, *reach.containers())}
            self._call = None
        return self._holders

    def forget_changed(self) -> None:
        """Leave out what f has written to in place: that may be a function of the arguments now."""
        for key, (ref, version) in list(self._tensors.items()):
            t = ref()
            if t is None or version_of(t) != version:
                del self._tensors[key]

    def has(self, t: Tensor) -> bool:
        """Return True if a tensor existed before f ran, and f has not changed it."""
        if type(t) is torch.nn.Parameter:
            return True
        found = self._tensors.get(id(t))
        return found is not None and found[0]() is t


class _Nothing(Existing):
    """What an f can read that is given all that it reads."""

    def __init__(self) -> None:
        self._call, self._tensors, self._holders = None, {}, set()


NOTHING: Existing = _Nothing()


def version_of(t: Tensor) -> int:
    """Return how often a tensor was changed in place; in inference mode torch does not count."""
    return 0 if t.is_inference() else int(t._version)


# --- Another run of f leaves no trace -----------------------------------------------------------------------------

_MISSING: Any = object()


class Footprint:
    """What f could write to: put back, it is as it was. Tensors are not copied: `_reads` refuses to write to them."""

    def __init__(self, reach: Reach) -> None:
        self._undo: list[Callable[[], None]] = [functools.partial(_fill, cell, contents(cell)) for cell in reach.cells]
        self._undo += [functools.partial(_restore, scope, _named(scope, reach.names)) for scope in reach.scopes]
        for x in reach.containers():
            if isinstance(x, (list, deque)):
                self._undo.append(functools.partial(_refill, x, list(x)))
            elif isinstance(x, set):
                self._undo.append(functools.partial(_refill, x, set(x)))
            elif isinstance(x, dict):
                self._undo.append(functools.partial(_restore, x, dict(x), True))
            elif isinstance(x, type):
                self._undo.append(functools.partial(_reset, x, _named(vars(x), reach.names)))
            elif isinstance(x, ModuleType):
                self._undo.append(functools.partial(_restore, vars(x), _named(vars(x), reach.names)))
            elif type(attributes_of(x)) is dict:
                self._undo.append(functools.partial(_restore, attributes_of(x), dict(attributes_of(x)), True))

    def put_back(self) -> None:
        """Undo what was written since."""
        for undo in self._undo:
            undo()


def _named(scope: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: scope.get(name, _MISSING) for name in names}


def _fill(cell: CellType, held: list[Any]) -> None:
    if held:
        cell.cell_contents = held[0]
    elif contents(cell):
        del cell.cell_contents


def _refill(x: Any, items: Any) -> None:
    if len(x) != len(items) or any(a is not b for a, b in zip(x, items, strict=True)):
        x.clear()
        (x.update if isinstance(x, set) else x.extend)(items)


def _restore(scope: dict[str, Any], before: dict[str, Any], is_whole: bool = False) -> None:
    """Let a dict hold what it held before, under these names or under all."""
    if is_whole:
        for name in [name for name in scope if name not in before]:
            del scope[name]
    for name, x in before.items():
        if x is _MISSING:
            scope.pop(name, None)
        elif scope.get(name, _MISSING) is not x:
            scope[name] = x


def _reset(kind: type, before: dict[str, Any]) -> None:
    for name, x in before.items():
        now = vars(kind).get(name, _MISSING)
        if now is not x:
            delattr(kind, name) if x is _MISSING else setattr(kind, name, x)
