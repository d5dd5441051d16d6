"""Trees of tensors by optree, and the containers that `tf.nest` knows and optree does not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import optree

from cgshim.backend import SLOT, framework_of
from cgshim_tensorflow._private import WRAPPERS


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    is_leaf = _holds_no_tensor if _learned else None
    leaves, structure = optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=_NAMESPACE)
    if any(_learn(type(leaf)) for leaf in leaves):
        return tree_flatten(tree)
    return leaves, structure


_NAMESPACE = "cgshim.tensorflow"
_learned: set[type] = set()
"""the classes with `__tf_flatten__`, and those of attrs, that have been seen in trees"""


for _wrapper, _plain in WRAPPERS:  # taken for a plain list, dict or tuple
    optree.register_pytree_node(
        _wrapper,
        lambda x, plain=_plain: ([plain(x)], None),  # type: ignore[misc]
        lambda _, leaves: next(iter(leaves)),
        namespace=_NAMESPACE,
    )


def _learn(kind: Any) -> bool:
    """Register a class with `__tf_flatten__`, or one of attrs; return False for any other, and for
    a known one.
    """
    if kind in _learned:
        return False  # an object that holds no tensor
    names = [field.name for field in getattr(kind, "__attrs_attrs__", ())]
    if hasattr(kind, "__tf_flatten__"):
        optree.register_pytree_node(
            kind,
            lambda x: x.__tf_flatten__()[::-1],  # type: ignore[attr-defined]
            lambda static, parts: kind.__tf_unflatten__(static, tuple(parts)),
            namespace=_NAMESPACE,
        )
    elif names:
        optree.register_pytree_node(
            kind,
            lambda x: ([getattr(x, name) for name in names], None),
            lambda _, parts: _with_attributes(kind, zip(names, parts, strict=True)),
            namespace=_NAMESPACE,
        )
    else:
        return False
    _learned.add(kind)
    return True


def _with_attributes(kind: type, attributes: Iterable[tuple[str, Any]]) -> Any:
    """Return an object with these attributes, without its `__init__`: that has run when the object
    was first made.
    """
    x: Any = object.__new__(kind)
    for name, value in attributes:
        object.__setattr__(x, name, value)  # a frozen class has a __setattr__ of its own
    return x


def _holds_no_tensor(x: Any) -> bool:
    """Return True if x is of a learned class and holds no tensor: then it is a leaf."""
    if type(x) not in _learned:
        return False
    leaves = optree.tree_leaves(x, none_is_leaf=True, namespace=_NAMESPACE)
    static = [leaf for leaf in leaves if leaf is not SLOT and framework_of(leaf) is None]
    return len(static) == len(leaves) and any(leaf is not None for leaf in leaves)
