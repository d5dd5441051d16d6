"""Trees of tensors by optree, and the containers that `tf.nest` knows and optree does not."""

from __future__ import annotations

from typing import Any

import optree
from optree import tree_unflatten as tree_unflatten

from cgshim.backend import SLOT, framework_of

_NAMESPACE = "cgshim.tensorflow"
_learned: set[type] = set()
"""the classes that have been seen in trees and registered"""


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    is_leaf = _holds_no_tensor if _learned else None
    leaves, structure = optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=_NAMESPACE)
    if any(_learn(leaf) for leaf in leaves):
        return tree_flatten(tree)
    return leaves, structure


def _learn(x: Any) -> bool:
    """Register the class of a container; return False for any other, and for a known one.

    Containers are objects with `__tf_flatten__`, those of attrs, and the wrappers that a tf.Module
    puts around lists, dicts and tuples in its attributes.
    """
    kind: Any = type(x)
    if kind in _learned:
        return False  # an object that holds no tensor
    names = [field.name for field in getattr(kind, "__attrs_attrs__", ())]
    plain = next((plain for plain in (list, dict, tuple) if isinstance(x, plain)), None)
    if hasattr(kind, "__tf_flatten__"):
        flatten = lambda x: x.__tf_flatten__()[::-1]
        unflatten = lambda static, parts: kind.__tf_unflatten__(static, tuple(parts))
    elif names:
        flatten = lambda x: ([getattr(x, name) for name in names], None)
        unflatten = lambda _, parts: _with_attributes(kind, names, parts)
    elif plain and kind.__module__.startswith("tensorflow."):
        flatten, unflatten = lambda x: ([plain(x)], None), lambda _, parts: parts[0]
    else:
        return False
    optree.register_pytree_node(kind, flatten, unflatten, namespace=_NAMESPACE)  # type: ignore[arg-type]
    _learned.add(kind)
    return True


def _with_attributes(kind: type, names: list[str], parts: Any) -> Any:
    """Return an object with these attributes, without its `__init__`, which may check or compute."""
    x: Any = object.__new__(kind)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(x, name, part)  # a frozen class has a __setattr__ of its own
    return x


def _holds_no_tensor(x: Any) -> bool:
    """Return True if x is of a learned class and holds no tensor: then it is a leaf."""
    if type(x) not in _learned:
        return False
    leaves = optree.tree_leaves(x, none_is_leaf=True, namespace=_NAMESPACE)
    static = [leaf for leaf in leaves if leaf is not SLOT and framework_of(leaf) is None]
    return len(static) == len(leaves) and any(leaf is not None for leaf in leaves)
