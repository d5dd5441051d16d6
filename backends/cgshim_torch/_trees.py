"""PyTorch: trees in code that Dynamo traces; it cannot trace optree.

torch's own pytree is for what is registered with it. For lists, tuples and dicts Dynamo would guard its registry, at
each run of a compiled function; they are taken apart here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from optree.utils import total_order_sorted
from torch.utils import _pytree as pytree

from cgshim.backend import SIMPLE, Spec

_LEAF = "*"
_LEAVES = SIMPLE | {Spec}


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a tree, and its structure: that of pytree if something in it is registered."""
    if _is_plain(tree):
        leaves: list[Any] = []
        return leaves, _structure(tree, leaves)
    leaves, structure = pytree.tree_flatten(_with_sorted_keys(tree))
    return leaves, structure


def unflatten(structure: Any, leaves: Sequence[Any]) -> Any:
    """Return the tree of a structure from flatten."""
    if isinstance(structure, pytree.TreeSpec):
        return pytree.tree_unflatten(leaves, structure)
    return _tree(structure, iter(leaves))


def _is_plain(tree: Any) -> bool:
    kind = type(tree)
    if kind is list or kind is tuple:
        return all(map(_is_plain, tree))
    if kind is dict:
        return all(map(_is_plain, tree.values()))
    if kind in _LEAVES or isinstance(tree, torch.Tensor):
        return True
    return not isinstance(tree, (list, tuple, dict)) and pytree.tree_is_leaf(tree)


def _structure(tree: Any, leaves: list[Any]) -> Any:
    """Return the structure of a plain tree, and append its leaves to a list."""
    if type(tree) in (list, tuple):
        return type(tree).__name__, (), tuple([_structure(child, leaves) for child in tree])
    if type(tree) is dict:
        keys = tuple(total_order_sorted(tree))
        return "dict", keys, tuple([_structure(tree[key], leaves) for key in keys])
    leaves.append(tree)
    return _LEAF


def _tree(structure: Any, leaves: Iterator[Any]) -> Any:
    if structure == _LEAF:
        return next(leaves)
    kind, keys, children = structure
    made = [_tree(child, leaves) for child in children]
    if kind == "dict":
        return {key: made[at] for at, key in enumerate(keys)}
    return tuple(made) if kind == "tuple" else made


def _with_sorted_keys(tree: Any) -> Any:
    """Return tree with sorted dicts: the structures of pytree depend on their order."""
    if type(tree) is dict:
        return {key: _with_sorted_keys(tree[key]) for key in total_order_sorted(tree)}
    if isinstance(tree, (list, tuple)):
        make = getattr(type(tree), "_make", type(tree))
        return make([_with_sorted_keys(child) for child in tree])
    return tree
