"""PyTorch: trees in code that Dynamo traces; it cannot trace optree.

torch's own pytree is for what is registered with it. For lists, tuples and dicts Dynamo would guard
its registry, at each run of a compiled function; they are taken apart here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from optree.utils import total_order_sorted
from torch.utils import _pytree as pytree

from cgshim.backend import SIMPLE

_LEAF = "*"
leaf_types: frozenset[Any] = SIMPLE
"""the types of leaves that torch's registry need not be asked about; `_host` adds its own"""


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a tree, and its structure: for each node what it is, and the structures
    of its children; for a dict these alone, by their keys, in the dict's own order.
    """
    kind = type(tree)
    if kind is dict:
        by_key = {key: flatten(tree[key]) for key in total_order_sorted(tree)}
        leaves = [leaf for leaves, _ in by_key.values() for leaf in leaves]
        return leaves, {key: by_key[key][1] for key in tree}
    node: Any = kind.__name__
    if kind is list or kind is tuple:
        children = tree
    elif kind in leaf_types or isinstance(tree, torch.Tensor) or pytree.tree_is_leaf(tree):
        return [tree], _LEAF
    else:
        children, node = pytree.tree_flatten(tree, is_leaf=lambda x: x is not tree)
    parts = [flatten(child) for child in children]
    leaves = [leaf for leaves, _ in parts for leaf in leaves]
    return leaves, (node, tuple([structure for _, structure in parts]))


def unflatten(structure: Any, leaves: Iterable[Any]) -> Any:
    """Return the tree of a structure from flatten."""
    rest = iter(leaves)  # of an iterator itself: the children take what follows
    if isinstance(structure, dict):
        by_key = {key: unflatten(structure[key], rest) for key in total_order_sorted(structure)}
        return {key: by_key[key] for key in structure}
    if structure == _LEAF:
        return next(rest)
    node, children = structure
    made = [unflatten(child, rest) for child in children]
    if isinstance(node, pytree.TreeSpec):
        return pytree.tree_unflatten(made, node)
    return tuple(made) if node == "tuple" else made
