"""Boxes that f captures, and f around other values of them.

Derivatives of captured boxes need f to run on their values at each level of derivatives. So f is
copied with other values in its closure. Neither f nor a box is written to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any, cast

import optree

from cgshim.backend import Call, closure_convert, is_in_rule
from cgshim_numpy._arrays import Array, is_box, is_tensor, tree_unflatten
from cgshim_numpy._vjp import as_array, value_of


class Captured:
    """The boxes that f and its options hold."""

    boxes: Sequence[Array] = ()
    variables: Sequence[Array] = ()
    """what the rule gets as variables; the boxes among them are differentiated"""

    def __init__(self, call: Call, inputs: Sequence[Array]) -> None:
        self.call = call
        if not (call.options or call.variables) and _holds_nothing(call.f):
            return
        held = (call.f, *call.options.values())
        self.boxes, self.rebuild, _ = closure_convert(cast(Any, held), search(call, is_box))
        captured = () if is_in_rule() else self.boxes
        for x in captured:
            if not is_tensor(x) or call.option_of(x) is not None:  # a container in one box
                call.refuse_captured(x)
        self.variables = call.captured_variables(captured, inputs)
        if is_in_rule():
            self.variables = [*map(_constant, self.variables)]

    def call_at(self, variables: Sequence[Array]) -> Call:
        """Return the call of f around other values of the variables."""
        if not self.boxes:
            return self.call
        places = {id(v): at for at, v in enumerate(self.variables)}
        values = [variables[places[id(x)]] if id(x) in places else _constant(x) for x in self.boxes]
        f, *options = cast(Any, self.rebuild(values))
        return self.call.with_f(f, dict(zip(self.call.options, options, strict=True)))


def _constant(box: Array) -> Array:
    return as_array(value_of(box))


def _holds_nothing(f: Any) -> bool:
    """Return True for a function whose closure is empty, as most are."""
    return type(f) is FunctionType and not (
        f.__closure__ or f.__defaults__ or f.__kwdefaults__ or f.__dict__
    )


def search(call: Call, is_leaf: Callable[[Any], bool]) -> Any:
    """Return what closure_convert needs of a backend, to search for other leaves than tensors.

    Declared variables may be attributes of an object, so it searches objects too if there are any.
    """
    return (_ObjectSearch if call.variables else _Search)(is_leaf)


class _Search:
    tree_unflatten = staticmethod(tree_unflatten)

    @staticmethod
    def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
        return optree.tree_flatten(tree, none_is_leaf=True)  # type: ignore[return-value]

    def __init__(self, is_leaf: Callable[[Any], bool]) -> None:
        self.is_tensor = is_leaf


class _ObjectSearch(_Search):
    @staticmethod
    def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
        leaves, structure = _Search.tree_flatten(tree)
        is_object = len(leaves) == 1 and leaves[0] is tree and hasattr(tree, "__dict__")
        if not is_object or isinstance(tree, (type, ModuleType)):
            return leaves, structure
        return [*vars(tree).values()], tree

    @staticmethod
    def tree_unflatten(structure: Any, leaves: Sequence[Any]) -> Any:
        if not hasattr(structure, "__dict__"):
            return tree_unflatten(structure, leaves)
        new = copy.copy(structure)
        vars(new).update(zip(vars(structure), leaves, strict=True))
        return new
