"""The tensors that a function holds in its closure, taken out so that a framework can look after them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

Function = Callable[..., Any]
Remake = Callable[[Sequence[Any]], Any]
"""Makes a function again, around other tensors."""


class FunctionHolder:
    """An object that is called as the function that it holds, as an op is: its closure is searched too."""

    __slots__ = ()

    @property
    def held_function(self) -> Function:
        """The function."""
        raise NotImplementedError

    def holding(self, function: Function) -> FunctionHolder:
        """A like object that holds another function of the same code."""
        raise NotImplementedError


class Lifted(NamedTuple):
    """What was found in a function."""

    tensors: list[Any]
    """the known tensors, and then those that the function holds besides"""
    remake: Remake
    held: frozenset[int]
    """the places, among the tensors, of those that the function holds"""
    objects: list[Any]
    """other objects that it holds, into whose attributes nobody has looked"""
    old: list[Any]
    """objects and containers that it holds and that were there before: nobody has looked into them either"""


def lift(
    function: Function, is_tensor: Callable[[Any], bool], of: Function | None = None, known: Sequence[Any] = ()
) -> tuple[list[Any], Remake]:
    """The known tensors and then those in the closure of a function that `of` made; how to make it around others.

    Cells, default values, nested functions, partials and Python's containers are searched; the attributes of objects
    are not, for an object is known by its identity. What is shared stays shared: a cell, a helper or a list that two
    functions hold is made once for both. What was there before the call (all that `of` holds) stays the one that it
    is, and so does a variable that a function assigns to: the author sees what the rule does to it.
    """
    return search(function, is_tensor, of, known)[:2]


def search(
    function: Function,
    is_tensor: Callable[[Any], bool],
    of: Function | None = None,
    known: Sequence[Any] = (),
    trees: Trees | None = None,
) -> Lifted:
    """What `lift` finds, and what else there is to know about it; trees knows the containers of a framework."""
    return _search_plain(function, is_tensor, known) or _Search(is_tensor, of, known, trees)(function)


class Trees(Protocol):
    """What takes a framework's own containers apart, and makes them again: a backend does."""

    def tree_flatten(self, tree: Any, /) -> tuple[list[Any], Any]: ...

    def tree_unflatten(self, structure: Any, leaves: Sequence[Any], /) -> Any: ...


SIMPLE = frozenset([bool, int, float, complex, str, bytes, type(None)])


_EMPTY = types.CellType()


def _search_plain(function: Function, is_tensor: Callable[[Any], bool], known: Sequence[Any]) -> Lifted | None:
    """What is found in a function that holds tensors and numbers alone, as most rules do; None for any other."""
    if type(function) is not types.FunctionType or function.__defaults__ or function.__kwdefaults__:
        return None
    tensors = list(known)
    place = _places(known)
    cells: list[tuple[types.CellType, int | None]] = []
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # a name that was never assigned
            return None
        if is_tensor(content):
            at = place.setdefault(id(content), len(tensors))
            if at == len(tensors):
                tensors.append(content)
            cells.append((_EMPTY, at))  # not the cell, which holds the tensor
        elif type(content) in SIMPLE:
            cells.append((cell, None))
        else:
            return None
    held = frozenset([at for _, at in cells if at is not None])
    if not held:
        return Lifted(tensors, lambda tensors: function, held, [], [])
    if assigned_names(function.__code__):
        return None

    code, scope, name = function.__code__, function.__globals__, function.__name__

    def remake(tensors: Sequence[Any]) -> Function:
        closure = tuple([cell if at is None else types.CellType(tensors[at]) for cell, at in cells])
        return types.FunctionType(code, scope, name, None, closure)

    return Lifted(tensors, remake, held, [], [])


def _places(known: Sequence[Any]) -> dict[int, int]:
    """The place of each known tensor by its identity; the first place of one that is known twice."""
    place: dict[int, int] = {}
    for at, tensor in enumerate(known):
        place.setdefault(id(tensor), at)
    return place


class _Search:
    """One search of a function: a graph of what it holds, and the tensors found in it, each once."""

    def __init__(
        self, is_tensor: Callable[[Any], bool], of: Function | None, known: Sequence[Any], trees: Trees | None
    ) -> None:
        self._is_tensor = is_tensor
        self._trees = trees
        self._tensors = list(known)
        self._place = _places(known)
        self._held: set[int] = set()
        self._objects: list[Any] = []
        self._old: list[Any] = []
        self._nodes: dict[int, tuple[Any, list[Any]]] = {}  # by identity: what is searched, and what it holds
        self._stays = _identities_in(of)

    def __call__(self, function: Function) -> Lifted:
        self._visit(function)
        remade = self._leading_to_tensors()
        recipes = {key: self._recipe(x, remade) for key, x in remade.items()}
        remake: Remake = lambda tensors: function
        if id(function) in remade:
            root = id(function)
            remake = lambda tensors: _Remaking(recipes, tensors).made(root)
        return Lifted(self._tensors, remake, frozenset(self._held), self._objects, self._old)

    def _visit(self, x: Any) -> None:
        todo = [x]
        while todo:
            x = todo.pop()
            if self._is_tensor(x):
                self._hold(x)
                continue
            if id(x) in self._nodes or type(x) in SIMPLE:
                continue
            inner = self._contents_of(x)
            if id(x) in self._stays:  # a tensor may be held by what was there before the call
                self._old += [x] if inner is None or isinstance(x, (list, dict)) else []
                inner = inner if inner and isinstance(x, types.CellType) else []
            elif inner is None:
                if not isinstance(x, types.ModuleType) and (not isinstance(x, type) or "<locals>" in x.__qualname__):
                    self._objects.append(x)
                inner = []
            self._nodes[id(x)] = x, inner
            todo += reversed(inner)

    def _contents_of(self, x: Any) -> list[Any] | None:
        inner = contents_of(x)
        if inner is None and self._trees is not None and id(x) not in self._stays:
            leaves, _ = self._trees.tree_flatten(x)
            inner = leaves if len(leaves) != 1 or leaves[0] is not x else None
        return inner

    def _hold(self, tensor: Any) -> None:
        at = self._place.setdefault(id(tensor), len(self._tensors))
        if at == len(self._tensors):
            self._tensors.append(tensor)
        self._held.add(at)

    def _leading_to_tensors(self) -> dict[int, Any]:
        """What has to be made again, by identity: whatever leads to a tensor, but for what a function assigns to."""
        assigned = {id(cell) for x, _ in self._nodes.values() for cell in _assigned_cells(x)}
        holders: dict[int, list[int]] = {}
        for holder, (_, inner) in self._nodes.items():
            for each in inner:
                holders.setdefault(id(each), []).append(holder)
        remade: dict[int, Any] = {}
        todo = [self._id_of(at) for at in self._held]
        while todo:
            for holder in holders.get(todo.pop(), ()):
                if holder not in remade and holder not in assigned:
                    remade[holder] = self._nodes[holder][0]
                    todo.append(holder)
        return remade

    def _id_of(self, at: int) -> int:
        return id(self._tensors[at])

    # --- Recipes, which hold no tensor -----------------------------------------------------------------------

    def _recipe(self, x: Any, remade: dict[int, Any]) -> _Recipe:
        """How to make x again; a function's cells come with it."""
        part = functools.partial(self._part, remade)
        if isinstance(x, types.FunctionType):
            return _recipe_of_function(
                x, [(id(cell) in remade and id(cell), cell) for cell in x.__closure__ or ()], part
            )
        if isinstance(x, types.CellType):
            return part(x.cell_contents)
        if isinstance(x, functools.partial):
            func, args, keywords = part(x.func), [*map(part, x.args)], {k: part(v) for k, v in x.keywords.items()}
            return lambda r: functools.partial(func(r), *[a(r) for a in args], **{k: v(r) for k, v in keywords.items()})
        if isinstance(x, types.MethodType):
            func, instance = part(x.__func__), part(x.__self__)
            return lambda r: types.MethodType(func(r), instance(r))
        if isinstance(x, _METHODS_IN_C):
            instance, name = part(x.__self__), x.__name__
            return lambda r: getattr(instance(r), name)
        if isinstance(x, FunctionHolder):
            func, holding = part(x.held_function), _without_tensors(x).holding
            return lambda r: holding(func(r))
        if contents_of(x) is None:
            return self._recipe_of_tree(x, part)
        if isinstance(x, dict):
            table = {key: part(value) for key, value in x.items()}
            return lambda r: {key: value(r) for key, value in table.items()}
        items = [*map(part, x)]
        join = list if isinstance(x, list) else getattr(type(x), "_make", tuple)
        return lambda r: join([item(r) for item in items])

    def _recipe_of_tree(self, x: Any, part: Callable[[Any], _Recipe]) -> _Recipe:
        """How to make a container of the framework's again."""
        assert self._trees is not None
        leaves, structure = self._trees.tree_flatten(x)
        items, unflatten = [*map(part, leaves)], self._trees.tree_unflatten
        return lambda r: unflatten(structure, [item(r) for item in items])

    def _part(self, remade: dict[int, Any], x: Any) -> _Recipe:
        """How to get what a thing holds: a tensor, something that is made again, or x as it is."""
        at, key = self._place.get(id(x)), id(x)
        if at is not None:
            return lambda r: r.tensors[at]
        if key in remade:
            return lambda r: r.made(key)
        return lambda r: x


class _Remaking:
    """What leads from a function to tensors, made once more around other tensors: each thing once."""

    def __init__(self, recipes: dict[int, _Recipe], tensors: Sequence[Any]) -> None:
        self.recipes = recipes
        self.tensors = tensors
        self.things: dict[int, Any] = {}

    def made(self, key: int) -> Any:
        if key not in self.things:
            self.things[key] = self.recipes[key](self)
        return self.things[key]


_Recipe = Callable[[_Remaking], Any]


def _recipe_of_function(
    function: types.FunctionType, cells: Sequence[tuple[int, types.CellType]], part: Callable[[Any], _Recipe]
) -> _Recipe:
    """How to make a function again; it is known before its cells are filled, for they may hold the function itself."""
    kept = [(key, None if key else cell) for key, cell in cells]
    bare, own = _like(function, tuple([types.CellType() for _ in cells])), id(function)
    defaults, keyword_defaults = part(function.__defaults__), part(function.__kwdefaults__)
    bare.__defaults__ = bare.__kwdefaults__ = None

    def make(r: _Remaking) -> types.FunctionType:
        empty = [key for key, _ in kept if key and -key not in r.things]
        r.things.update({-key: types.CellType() for key in empty})
        made = r.things[own] = _like(bare, tuple([cell or r.things[-key] for key, cell in kept]))
        made.__defaults__, made.__kwdefaults__ = defaults(r), keyword_defaults(r)
        for key in empty:
            r.things[-key].cell_contents = r.made(key)
        return made

    return make


_METHODS_IN_C = (types.BuiltinMethodType, types.MethodWrapperType)


def contents_of(x: Any) -> list[Any] | None:
    """What a thing that is searched holds; None for any other object."""
    if isinstance(x, types.FunctionType):
        return [*(x.__closure__ or ()), x.__defaults__, x.__kwdefaults__]
    if isinstance(x, types.CellType):
        try:
            return [x.cell_contents]
        except ValueError:  # a name that was never assigned
            return []
    if type(x) in (list, tuple) or (isinstance(x, tuple) and hasattr(x, "_fields")):
        return list(x)
    if type(x) is dict:
        return list(x.values())
    if type(x) is functools.partial:
        return [x.func, *x.args, *x.keywords.values()]
    if isinstance(x, types.MethodType):
        return [x.__func__, x.__self__]
    if isinstance(x, _METHODS_IN_C) and not isinstance(x.__self__, types.ModuleType | None):
        return [x.__self__]
    if isinstance(x, FunctionHolder):
        return [x.held_function]
    return None


def _without_tensors(holder: FunctionHolder) -> FunctionHolder:
    return holder.holding(_nothing)


def _nothing(*args: Any, **kwargs: Any) -> Any:
    """Stands where a function with its tensors stood."""


def _identities_in(of: Any) -> frozenset[int] | set[int]:
    """The identities of all that a function holds: what was there before it was called."""
    found: set[int] = set()
    todo = [of]
    while todo:
        x = todo.pop()
        if id(x) not in found and type(x) not in SIMPLE:
            found.add(id(x))
            todo += contents_of(x) or ()
    return found


def _like(function: types.FunctionType, closure: tuple[types.CellType, ...]) -> types.FunctionType:
    """The same function, around other cells."""
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update({k: v for k, v in function.__dict__.items() if k != "__wrapped__"})  # which holds the tensors
    return made


def attributes_of(x: Any) -> list[Any]:
    """What an object holds in its attributes."""
    slots = [name for base in type(x).__mro__ for name in _as_names(base.__dict__.get("__slots__", ()))]
    slots = [name for name in slots if name not in ("__dict__", "__weakref__")]
    return [*getattr(x, "__dict__", {}).values(), *(getattr(x, name, None) for name in slots)]


def _as_names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def tensors_inside(x: Any, is_tensor: Callable[[Any], bool], depth: int = 5) -> Iterator[Any]:
    """The tensors that an object holds, in its attributes too, down to a depth at which configuration ends."""
    seen: set[int] = set()
    level = [x]
    for _ in range(depth):
        inner = [each for x in level for each in (contents_of(x) or attributes_of(x))]
        yield from filter(is_tensor, inner)
        level = [each for each in inner if id(each) not in seen and _may_hold(each) and not is_tensor(each)]
        seen.update(map(id, level))


def _may_hold(x: Any) -> bool:
    return type(x) not in SIMPLE and not isinstance(x, (type, types.ModuleType))


def assigned_cells_of(f: Any) -> list[types.CellType]:
    """The variables outside of f that f, or a function that it holds, assigns to."""
    found: list[types.CellType] = []
    seen: set[int] = set()
    todo = [f]
    while todo:
        x = todo.pop()
        if id(x) not in seen and type(x) not in SIMPLE:
            seen.add(id(x))
            found += _assigned_cells(x)
            todo += contents_of(x) or ()
    return found


def _assigned_cells(x: Any) -> Iterator[types.CellType]:
    """The cells that a function assigns to, which belong to whoever else reads them."""
    if isinstance(x, types.FunctionType) and x.__closure__:
        assigned = assigned_names(x.__code__)
        for name, cell in zip(x.__code__.co_freevars, x.__closure__, strict=True):
            if name in assigned:
                yield cell


@functools.lru_cache(maxsize=4096)
def assigned_names(code: types.CodeType) -> frozenset[str]:
    """The names of an outer function that code, or a function that it makes, declares nonlocal and assigns to."""
    import dis  # costs as much as all of cgshim, and few processes come here more than a few times

    own = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("STORE_DEREF", "DELETE_DEREF")
    }
    inner = (assigned_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(own.union(*inner)) & frozenset(code.co_freevars)
