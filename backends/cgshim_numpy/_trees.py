"""NumPy: trees of arrays, in which autograd may have put a container into one box."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree

from cgshim_numpy._arrays import is_tensor
from cgshim_numpy._private import DictBox, SequenceBox, getval

_NAMESPACE = "cgshim_numpy"
"""in which optree opens boxes of containers; tree_unflatten makes the containers themselves, with boxes in them"""


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True, namespace=_NAMESPACE)
    return leaves, structure


def tree_unflatten(structure: Any, leaves: Sequence[Any], /) -> Any:
    return optree.tree_unflatten(structure, leaves)


def with_boxes_opened(tree: Any) -> Any:
    """Return a tree with a container in the place of each box of a container."""
    if is_tensor(tree):
        return tree
    leaves, structure = tree_flatten(tree)
    return tree_unflatten(structure, leaves)


def _content(box: Any) -> Any:
    """Return a container with a box for each item, instead of one box for all."""
    if isinstance(box, DictBox):
        return {key: box[key] for key in box}
    return type(getval(box))([box[at] for at in range(len(box))])


def _register(kind: Any) -> None:
    optree.register_pytree_node(
        kind, lambda box: ([_content(box)], None), lambda _, content: next(iter(content)), namespace=_NAMESPACE
    )


_register(DictBox)
_register(SequenceBox)
