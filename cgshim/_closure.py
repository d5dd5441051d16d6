"""Closures as pytrees: split a function into its tensors and the rest, and rejoin them.

A rule keeps its residuals in its closure, where a framework cannot see them: `torch.autograd` needs
them in `ctx.save_for_backward`, and a second derivative must go through them. So a backend converts
the rule, as `jax.closure_convert` does, but without tracing it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from cgshim._protocol import Backend, Tensor

SIMPLE = frozenset([bool, int, float, complex, str, bytes, type(None)])
"""types whose objects hold no tensor"""

Rebuild = Callable[[Sequence[Any]], Callable[..., Any]]


class FunctionHolder:
    """An object that is called like the function that it holds; an op is one."""

    __slots__ = ()
    _f: Callable[..., Any]

    @property
    def held_function(self) -> Callable[..., Any]:
        """The function."""
        return self._f

    def with_function(self, f: Callable[..., Any]) -> FunctionHolder:
        """Return an equal object that holds another function."""
        raise NotImplementedError


class Converted(NamedTuple):
    """A function without its tensors."""

    residuals: list[Tensor]
    """the tensors it closes over, each once"""
    rebuild: Rebuild
    """``rebuild(tensors)`` returns the function around other tensors"""
    opaque: Sequence[Any] = ()
    """the objects it closes over that are not tensors, functions or pytrees"""


def closure_convert(
    function: Callable[..., Any], backend: Backend, constants: Collection[int] = ()
) -> Converted:
    """Return the tensors that a function closes over, and a way to rebuild it around others.

    It visits cells, default values, nested functions, partials, bound methods, ops, dataclasses,
    ``SimpleNamespace`` and pytrees. It copies the objects that lead to a tensor, and shares
    everything else. Cells and objects whose ids are in ``constants`` existed before f ran, and are
    shared too.
    """
    if type(function) is FunctionType:
        plain = _convert_plain(function, backend, constants)
        if plain is not None:
            return plain
    residuals: list[Tensor] = []
    slots: dict[int, _Slot] = {}

    def slot_of(tensor: Tensor) -> _Slot:
        slot = slots.get(id(tensor))
        if slot is None:
            slot = slots[id(tensor)] = _Slot(len(residuals))
            residuals.append(tensor)
        return slot

    opaque: list[Any] = []
    template = _Copier(backend, backend.is_tensor, slot_of, constants, opaque)(function)
    return Converted(residuals, partial(_fill, template, backend, constants), opaque)


def _fill(
    template: Any, backend: Backend, constants: Collection[int], tensors: Sequence[Any]
) -> Any:
    return _Copier(backend, _is_slot, lambda slot: tensors[slot.number], constants, [])(template)


# --- Fast path: the cells hold tensors and numbers ------------------------------------------------


def _convert_plain(
    function: FunctionType, backend: Backend, constants: Collection[int]
) -> Converted | None:
    """Convert a function whose cells hold only tensors and numbers, as in most rules."""
    if function.__defaults__ or function.__kwdefaults__ or function.__dict__:
        return None
    residuals: list[Tensor] = []
    indices: dict[int, int] = {}
    cells: list[CellType | int] = []
    for cell in function.__closure__ or ():
        try:
            x = cell.cell_contents
        except ValueError:  # a name that is not assigned yet
            return None
        if type(x) in SIMPLE or id(cell) in constants or id(x) in constants:
            cells.append(cell)
        elif backend.is_tensor(x):
            index = indices.setdefault(id(x), len(residuals))
            cells.append(index)
            if index == len(residuals):
                residuals.append(x)
        else:
            return None
    return Converted(
        residuals, partial(_fill_plain, function.__code__, function.__globals__, cells)
    )


def _fill_plain(
    code: CodeType, scope: dict[str, Any], cells: list[CellType | int], tensors: Sequence[Any]
) -> FunctionType:
    closure = [CellType(tensors[cell]) if type(cell) is int else cell for cell in cells]
    return FunctionType(code, scope, None, None, tuple(closure))  # type: ignore[arg-type]


# --- General path ---------------------------------------------------------------------------------


class _Slot(NamedTuple):
    """The place of a tensor in a template."""

    number: int


def _is_slot(x: object) -> bool:
    return type(x) is _Slot


class _Parts(NamedTuple):
    """A container with slots, taken apart, because its class may not accept slots."""

    rebuild: Callable[[Sequence[Any]], Any]
    parts: list[Any]


class _Copier:
    """Copy the objects that lead to a leaf, with replaced leaves; share everything else.

    It is a class: a recursive inner function would be a reference cycle that keeps tensors alive.
    """

    def __init__(
        self,
        backend: Backend,
        is_leaf: Callable[[Any], bool],
        replace: Callable[[Any], Any],
        constants: Collection[int],
        opaque: list[Any],
    ) -> None:
        self.backend, self.is_leaf, self.replace = backend, is_leaf, replace
        self.constants, self.opaque = constants, opaque
        self.copies: dict[int, Any] = {}  # by id, as in copy.deepcopy
        self.alive: list[Any] = []  # keep the objects alive, so that their ids stay unique

    def __call__(self, x: Any) -> Any:
        if type(x) in SIMPLE or id(x) in self.constants:
            return x
        if self.is_leaf(x):
            return self.replace(x)
        if id(x) not in self.copies:
            self.alive.append(x)
            self.copies[id(x)] = x  # a container may hold itself
            self.copies[id(x)] = self.copy(x)
        return self.copies[id(x)]

    def copy(self, x: Any) -> Any:
        """Return x, or a copy if it leads to a leaf."""
        if type(x) is FunctionType:
            return self.function(x)
        if type(x) is _Parts:
            return x.rebuild([*map(self, x.parts)])
        rebuild, parts = self.parts(x)
        copies = [*map(self, parts)]
        if all(copy is part for copy, part in zip(copies, parts, strict=True)):
            return x
        return _Parts(rebuild, copies)

    def parts(self, x: Any) -> tuple[Callable[[Sequence[Any]], Any], Sequence[Any]]:
        """Return the parts of x, and a function that makes an equal object from other parts."""
        if isinstance(x, partial):
            return _partial, [x.func, x.args, x.keywords]
        if isinstance(x, MethodType):
            return _method, [x.__func__, x.__self__]
        if isinstance(x, FunctionHolder):
            return _Holder(x), [x.held_function]
        leaves, structure = self.backend.tree_flatten(x)
        if not (len(leaves) == 1 and leaves[0] is x):
            return partial(self.backend.tree_unflatten, structure), leaves
        if type(x) is SimpleNamespace or (dataclasses.is_dataclass(x) and not isinstance(x, type)):
            attributes = _attributes(x)
            return partial(_object, type(x), [*attributes]), [*attributes.values()]
        self.opaque.append(x)
        return lambda _: x, ()

    def function(self, f: FunctionType) -> FunctionType:
        """Return f, or a copy with new cells; functions that share a cell share its copy.

        A function that leads to no leaf is shared: a framework may cache by its identity.
        """
        rest = (f.__defaults__, f.__kwdefaults__, f.__dict__)
        if not (f.__closure__ or any(rest)):
            return f
        cells, unfilled = [], []
        for cell in f.__closure__ or ():
            copy = self.copies.get(id(cell))
            if copy is None:
                is_shared = id(cell) in self.constants or _is_simple(cell)
                copy = self.copies[id(cell)] = cell if is_shared else CellType()
                if copy is not cell:
                    unfilled.append((copy, cell))
            cells.append(copy)
        new = FunctionType(f.__code__, f.__globals__, f.__name__, None, tuple(cells))
        self.copies[id(f)] = new  # before its cells are filled: it may call itself
        for copy, cell in unfilled:
            copy.cell_contents = self(cell.cell_contents)
        new.__defaults__ = f.__defaults__ and (*map(self, f.__defaults__),)
        new.__kwdefaults__ = f.__kwdefaults__ and self.values(f.__kwdefaults__)
        new.__dict__.update(self.values(f.__dict__))
        pairs = [(copy.cell_contents, cell.cell_contents) for copy, cell in unfilled]
        pairs += [
            *zip(new.__defaults__ or (), f.__defaults__ or (), strict=True),
            *[(new.__dict__[name], x) for name, x in f.__dict__.items()],
            *[
                ((new.__kwdefaults__ or {})[name], x)
                for name, x in (f.__kwdefaults__ or {}).items()
            ],
        ]
        copied = [
            copy for copy, cell in zip(cells, f.__closure__ or (), strict=True) if copy is not cell
        ]
        if len(copied) > len(unfilled) or any(x is not y and x is not new for x, y in pairs):
            return new
        self.copies.update({id(cell): cell for _, cell in unfilled})
        self.copies[id(f)] = f
        return f

    def values(self, named: dict[str, Any]) -> dict[str, Any]:
        return {name: self(x) for name, x in named.items()}


class _Holder:
    """Make the equal of an op with another function; do not keep the op's function alive."""

    def __init__(self, holder: FunctionHolder) -> None:
        self.empty = holder.with_function(_no_function)

    def __call__(self, parts: Sequence[Any]) -> FunctionHolder:
        return self.empty.with_function(parts[0])


def _no_function(*args: Any) -> Any:
    raise AssertionError


def _partial(parts: Sequence[Any]) -> partial[Any]:
    function, args, keywords = parts
    return partial(function, *args, **keywords)


def _method(parts: Sequence[Any]) -> MethodType:
    return MethodType(*parts)


def _attributes(x: Any) -> dict[str, Any]:
    names = (
        vars(x) if type(x) is SimpleNamespace else [field.name for field in dataclasses.fields(x)]
    )
    return {name: getattr(x, name) for name in names if hasattr(x, name)}


def _object(kind: Any, names: Sequence[str], parts: Sequence[Any]) -> Any:
    x = kind.__new__(kind)  # not __init__, which may check or compute
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(x, name, part)  # a dataclass may be frozen
    return x


def _is_simple(cell: CellType) -> bool:
    try:
        return type(cell.cell_contents) in SIMPLE
    except ValueError:  # a name that is not assigned yet
        return True


# --- Objects --------------------------------------------------------------------------------------


def tensors_inside(x: Any, is_tensor: Callable[[Any], bool], depth: int = 6) -> list[Tensor]:
    """Return the tensors that an object holds in attributes, containers and closures, each once."""
    return [tensor for tensor, _ in _walk(x, is_tensor, depth)]


def paths_to(things: Sequence[Any], x: Any, depth: int = 20) -> list[str | None]:
    """Return the path to each thing in an object, such as ``solver.history[0]``, or None."""
    wanted = set(map(id, things))
    found = {id(thing): step for thing, step in _walk(x, lambda x: id(x) in wanted, depth)}
    return [_written(found[id(x)]) if id(x) in found else None for x in things]


Step = tuple[Any, str, Any]
"""the step before it, and the format and the key of one more part of a path"""


def _walk(x: Any, is_wanted: Callable[[Any], bool], depth: int) -> list[tuple[Any, Step | None]]:
    """Return the wanted objects inside an object, the nearest first, and the last step to each."""
    found: list[tuple[Any, Step | None]] = []
    seen: dict[int, Any] = {}
    level: list[tuple[Any, Step | None]] = [(x, None)]
    for remaining in range(depth, -1, -1):
        parts: list[tuple[Any, Step | None]] = []
        for x, step in level:
            if id(x) in seen or type(x) in SIMPLE:
                continue
            seen[id(x)] = x
            if is_wanted(x):
                found.append((x, step))
            elif remaining:
                parts += [(part, (step, form, key)) for form, key, part in _named_parts(x)]
        level = parts
    return found


def _written(step: Step | None) -> str:
    """Return a path as Python code; the name of a cell begins one."""
    if step is None:
        return ""
    before, form, key = step
    return form.format(key) if form == "{}" else _written(before) + form.format(key)


def _named_parts(x: Any) -> list[tuple[str, Any, Any]]:
    """Return the parts of an object, each with the format and the key of its path."""
    if isinstance(x, (type, ModuleType)):
        return []
    if isinstance(x, FunctionType):
        cells = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
        named = [("{}", name, cell.cell_contents) for name, cell in cells if cell != _EMPTY]
        rest = (x.__defaults__, x.__kwdefaults__, x.__dict__)
        return [*named, *[("", None, held) for held in rest if held]]
    if isinstance(x, MethodType):
        return [("{}", "self", x.__self__), ("", None, x.__func__)]
    if isinstance(x, partial):
        return [(".{}", name, getattr(x, name)) for name in ("func", "args", "keywords")]
    if isinstance(x, FunctionHolder):
        return [("", None, x.held_function)]
    if isinstance(x, dict):
        return [("[{!r}]", key, held) for key, held in x.items()]
    if type(x) is not tuple and (fields := fields_of(x)):
        return [(".{}", name, held) for name, held in zip(fields, x, strict=True)]
    if isinstance(x, (list, tuple)):
        return [("[{}]", at, held) for at, held in enumerate(x)]
    if isinstance(x, (set, frozenset)):
        return [("", None, held) for held in x]
    return [(".{}", name, held) for name, held in _attributes_of(x).items()]


def fields_of(x: Any) -> Sequence[str] | None:
    """Return the fields of a namedtuple; None for anything else."""
    return getattr(x, "_fields", None) if isinstance(x, tuple) else None


def _attributes_of(x: Any) -> dict[str, Any]:
    """Return the attributes and filled slots of an object; none for a proxy that makes them up."""
    slots = [
        name
        for kind in type(x).__mro__
        for name in vars(kind).get("__slots__", ())
        if not name.startswith("__")  # such as __weakref__, which a C class may lack
    ]
    try:
        attributes = getattr(x, "__dict__", {})
        filled = {name: getattr(x, name) for name in slots if hasattr(x, name)}
    except Exception:  # noqa: BLE001  # of the author of the class
        return {}
    return {**attributes, **filled} if isinstance(attributes, dict) else filled


_EMPTY = CellType()
