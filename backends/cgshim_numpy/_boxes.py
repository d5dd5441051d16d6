"""NumPy: what there is to know of one box of HIPS autograd.

A box holds a value, which may be a box of an outer derivative, the number of its derivative (its level), and a node
of the graph behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cgshim_numpy._private import box_types

Node = Any


def has_box(xs: Iterable[Any]) -> bool:
    """Return True if one of xs is a box."""
    return not box_types.isdisjoint(map(type, xs))


def levels_of(xs: Iterable[Any]) -> set[int]:
    """Return the levels of the boxes among xs, and of the boxes in them."""
    levels = set()
    for x in xs:
        while type(x) in box_types:
            levels.add(x._trace)
            x = x._value
    return levels


def at_level(x: Any, level: int) -> Any:
    """Return what is in a box, below all derivatives that are further in than level."""
    while type(x) in box_types and x._trace > level:
        x = x._value
    return x


def nodes_of(x: Any) -> list[Node]:
    """Return the node of a box, of the box in it, and so on."""
    nodes = []
    while type(x) in box_types:
        nodes.append(x._node)
        x = x._value
    return nodes
