"""NumPy: what there is to know of the boxes of HIPS autograd, and of the graph behind them.

A box holds a value, which may be a box of an outer derivative, the number of its derivative (its level), and a node:
in reverse mode a node knows its parents, in forward mode it holds a tangent and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import optree
from autograd import numpy as anp
from autograd.builtins import DictBox, SequenceBox
from autograd.extend import JVPNode
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import getval, isbox

Array = Any
Node = Any
Links = Mapping[int, tuple[Node, Sequence[Node]]]
"""For nodes of forward mode, by identity: the node, and the nodes that it was made of."""

_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # of kind V, like records, but numbers


def is_tensor(x: Any, /) -> bool:
    if type(x) is np.ndarray or isinstance(x, np.generic):
        return x.dtype.kind in "biufc" or x.dtype.name in _ML_DTYPES
    if isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray):  # of which nobody knows a masked gradient
        return is_tensor(x.view(np.ndarray))
    return isinstance(x, ArrayBox)


# --- Trees ------------------------------------------------------------------------------------------------------------

_TREES = "cgshim_numpy"
"""the namespace in which optree opens autograd's boxes of containers; they are closed as the containers themselves"""


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True, namespace=_TREES)
    return leaves, structure


def tree_unflatten(structure: Any, leaves: Sequence[Any], /) -> Any:
    return optree.tree_unflatten(structure, leaves)


def in_the_open(tree: Any) -> Any:
    """A tree with containers for the boxes of containers in it."""
    if is_tensor(tree):
        return tree
    leaves, structure = tree_flatten(tree)
    return tree_unflatten(structure, leaves)


def _content(box: Any) -> Any:
    """A container with a box for each item, instead of one box for all."""
    if isinstance(box, DictBox):
        return {key: box[key] for key in box}
    return type(getval(box))([box[at] for at in range(len(box))])


def _open_boxes_in_trees() -> None:
    kinds: Any = (DictBox, SequenceBox)
    for kind in kinds:
        optree.register_pytree_node(
            kind, lambda box: ([_content(box)], None), lambda _, content: next(iter(content)), namespace=_TREES
        )


_open_boxes_in_trees()


# --- Arrays -----------------------------------------------------------------------------------------------------------


def is_float(x: Array) -> bool:
    return x.dtype.kind in "fcV"


def is_complex(x: Array) -> bool:
    return bool(x.dtype.kind == "c")


def as_array(x: Any) -> Any:
    """A Python number, which autograd boxes as it is, as NumPy's."""
    if type(x) is float:
        return np.float64(x)
    return np.complex128(x) if type(x) is complex else x


def plain(x: Array) -> Array:
    """An array in a file as any other; autograd knows no class that is derived from NumPy's."""
    return np.asarray(x) if isinstance(x, np.memmap) else x


def copied(x: Array) -> Array:
    """A copy of x, connected with it; NumPy's scalars cannot be changed."""
    return x if isinstance(getval(x), np.generic) else anp.array(x)


def as_object_of_its_own(x: Array) -> Array:
    """The same array, told from others by its identity: it may be in two boxes, or a constant of the rule."""
    return x.view() if isinstance(x, np.ndarray) else x.copy()


def conjugated(x: Array) -> Array:
    return cast(Any, anp).conj(x) if is_complex(x) else x  # autograd makes its functions where no type checker looks


def levels_of(xs: Iterable[Any]) -> set[int]:
    """The levels of all boxes in xs."""
    return {level for x in xs for level, _ in _layers(x)}


def at_level(box: Any, level: int) -> Any:
    """What is in a box, below all derivatives that are further in than level."""
    while isbox(box) and box._trace > level:
        box = box._value
    return box


def _layers(x: Any) -> Iterator[tuple[int, Node]]:
    """The level and the node of a box, of the box in it, and so on."""
    while isbox(x):
        yield x._trace, x._node
        x = x._value


class Ancestry:
    """Tells which boxes are functions of known ones alone."""

    def __init__(self, known: Iterable[Any], links: Links) -> None:
        self._known = {id(node) for x in known for _, node in _layers(x)}
        self._links = links

    def covers(self, box: Any) -> bool:
        return all(self._reaches_no_further(node) for _, node in _layers(box))

    def _reaches_no_further(self, node: Node) -> bool:
        todo, seen = [node], set[int]()
        while todo:
            node = todo.pop()
            if id(node) in self._known or id(node) in seen:
                continue
            parents = self._parents(node)
            if not parents:  # where a derivative began, or what nobody knows
                return False
            seen.add(id(node))
            todo += parents
        return True

    def _parents(self, node: Node) -> Sequence[Node]:
        if isinstance(node, JVPNode):
            return self._links[id(node)][1] if id(node) in self._links else ()
        parents: Sequence[Node] = node.parents
        return parents


class AncestryOfResults(Ancestry):
    """The same, where a node of forward mode, which tells nothing, is trusted if a known one is of its level."""

    def __init__(self, known: Sequence[Any]) -> None:
        super().__init__(known, {})
        self._trusted = {level for x in known for level, node in _layers(x) if isinstance(node, JVPNode)}

    def covers(self, box: Any) -> bool:
        return all(
            level in self._trusted if isinstance(node, JVPNode) else self._reaches_no_further(node)
            for level, node in _layers(box)
        )


def links_of(residuals: Iterable[Any], values: Sequence[Any]) -> Links:
    """What forward mode does not record: that residuals were made of values."""
    links: dict[int, tuple[Node, Sequence[Node]]] = {}
    for x in residuals:
        for level, node in _layers(x):
            if isinstance(node, JVPNode):
                links[id(node)] = node, [n for value in values for at, n in _layers(value) if at == level]
    return links


def agree(a: Array, b: Array) -> bool:
    """Whether two arrays of one shape and dtype are the same, up to a few units in the last place."""
    a, b = np.asarray(getval(a)), np.asarray(getval(b))
    if a.dtype.kind not in "fc":
        return bool(a.tobytes() == b.tobytes())
    return bool(np.allclose(a, b, rtol=4 * float(np.finfo(a.dtype).eps), atol=0.0, equal_nan=True))
