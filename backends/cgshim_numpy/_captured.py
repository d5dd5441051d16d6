"""Boxes that f captures: found in its closure, and replaced in a copy of f.

f runs on other values of them at each level of derivatives. Neither f nor a box is written to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any, cast

import optree

from cgshim.backend import Call, closure_convert, is_in_rule
from cgshim_numpy._arrays import Array, is_box, is_tensor
from cgshim_numpy._vjp import as_array, value_of

Captured = tuple[Sequence[Array], Callable[[Sequence[Any]], Any], Sequence[Array]]
"""the boxes in f and its options, a function that rebuilds these around other values, and the
variables
"""


def captured_by(call: Call, inputs: Sequence[Array]) -> Captured:
    """Return the boxes that f captures, and the variables of the call.

    The rule gets the variables, and cgshim differentiates the boxes among them. In a rule there are
    none.
    """
    names = ("__closure__", "__defaults__", "__kwdefaults__", "__dict__")
    is_empty = type(call.f) is FunctionType and not any(getattr(call.f, name) for name in names)
    if is_empty and not (call.options or call.variables):
        return (), tuple, ()
    held = cast(Any, (call.f, *call.options.values()))
    boxes, rebuild, _ = closure_convert(held, search(call, is_box))
    if is_in_rule():
        return boxes, rebuild, [*map(constant, call.variables)]
    for x in boxes:
        if not is_tensor(x) or call.option_of(x) is not None:  # a container in one box
            call.refuse_captured(x)
    return boxes, rebuild, call.captured_variables(boxes, inputs)


def constant(x: Array) -> Array:
    """Return the value of a box, below all levels of derivatives."""
    return as_array(value_of(x))


def search(call: Call, is_leaf: Callable[[Any], bool]) -> Any:
    """Return the part of a backend that closure_convert uses, to search for other leaves.

    Declared variables may be attributes of an object, so it searches objects if there are any.
    """
    return _Search(call, is_leaf)


class _Search:
    def __init__(self, call: Call, is_leaf: Callable[[Any], bool]) -> None:
        self.is_tensor, self.opens_objects = is_leaf, bool(call.variables)

    def tree_flatten(self, tree: Any, /) -> tuple[list[Any], Any]:
        leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
        is_leaf = len(leaves) == 1 and leaves[0] is tree and self.opens_objects
        if is_leaf and hasattr(tree, "__dict__") and not isinstance(tree, (type, ModuleType)):
            return [*vars(tree).values()], tree
        return leaves, structure

    def tree_unflatten(self, structure: Any, leaves: Sequence[Any], /) -> Any:
        if isinstance(structure, optree.PyTreeSpec):
            return optree.tree_unflatten(structure, leaves)
        new = copy.copy(structure)
        vars(new).update(zip(vars(structure), leaves, strict=True))
        return new
