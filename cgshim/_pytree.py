"""Partition pytrees into tensors and static leaves, and combine them again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

from cgshim._closure import SIMPLE, paths_to, tensors_inside
from cgshim._dispatch import beside, framework_of, is_numpy_array, of_another_framework, value_of
from cgshim._errors import CustomGradientTypeError, describe, refusal
from cgshim._foreign import is_traced
from cgshim._protocol import Backend, Tensor
from cgshim._registry import name_of


def told_apart(static: Any) -> Hashable:
    """Return a key for a static value: f may tell 1, 1.0 and True apart.

    For classes that are not Python's own, each object has its own key.
    """
    if type(static) is tuple:
        return tuple(map(told_apart, static))
    if type(static) in (float, complex):
        return type(static), repr(static)  # NaN equals itself here, and -0.0 differs from 0.0
    return type(static), static if type(static) in SIMPLE else id(static)


class TreeSpec:
    """A tree without its tensors: its structure and its static leaves.

    It keeps no tensor alive: the code that partitions a tree decides which ones live.
    """

    __slots__ = ("_backend", "_static", "_structure", "_tensor_at", "converted", "count")

    def __init__(
        self,
        backend: Any,
        static: list[Any],
        tensor_at: list[int],
        structure: Any,
        converted: Sequence[int] = (),
    ) -> None:
        self.converted = converted
        """the ids of the leaves that became tensors: NumPy arrays and Keras Variables"""
        self.count = len(tensor_at)
        """the number of tensors"""
        self._backend = backend
        self._static = static
        self._tensor_at = tensor_at
        self._structure = structure

    def combine(self, tensors: Sequence[Any]) -> Any:
        """Return the tree around these tensors."""
        leaves = list(self._static)
        for at, tensor in zip(self._tensor_at, tensors, strict=True):
            leaves[at] = tensor
        return self._backend.tree_unflatten(self._structure, leaves)

    def without_static(self) -> TreeSpec:
        """Return the tree with None for each static leaf, as gradients are structured."""
        if len(self._static) == self.count > 0:
            return self
        return TreeSpec(self._backend, [None] * len(self._static), self._tensor_at, self._structure)

    def static_leaves(self) -> Sequence[Any]:
        """Return the leaves that are not tensors."""
        return [leaf for leaf in self._static if leaf is not None]

    def align(self, gradient: Any) -> list[Any] | None:
        """Return the leaves of this tree's gradient, one per tensor; None if the structure differs.

        None stands for a branch without a gradient, and a list may stand for a tuple.
        """
        if gradient is None:
            return [None] * self.count
        leaves, found = self._backend.tree_flatten(gradient)
        if found == self._structure:
            return [leaves[at] for at in self._tensor_at]
        tree = self._with_slots([SLOT] * self.count)
        slots, structure = self._backend.tree_flatten(tree)
        leaves, found = self._backend.tree_flatten(_filled(tree, gradient))
        if tree is None or found != structure:
            return None
        pairs = zip(slots, leaves, strict=True)
        return [None if leaf is SLOT else leaf for slot, leaf in pairs if slot is SLOT]

    def path(self, name: str, at: int) -> str:
        """Return a tensor's name for messages, in a tree called name: x, params['w'], pair[1]."""
        return self.paths(name)[at]

    def paths(self, name: str) -> list[str]:
        """Return the names of all tensors."""
        slots = [object() for _ in range(self.count)]
        paths = paths_to(slots, self._with_slots(slots))
        return [
            f"{name} (leaf {at})" if path is None else name + path
            for at, path in zip(self._tensor_at, paths, strict=True)
        ]

    @property
    def places(self) -> Hashable:
        """The structure of the tree, and which leaves are tensors."""
        return self._structure, tuple(self._tensor_at)

    @property
    def key(self) -> Hashable:
        """A key for this spec; it is hashable if the static leaves are."""
        static = tuple(map(told_apart, self._static))
        return self.places, static, self._order()

    def _order(self) -> Hashable:
        """Return the order of the leaves in the tree.

        Dicts with other orders of keys have one structure, and f may read the order.
        """
        slots = [object() for _ in self._static]
        try:
            tree = self._backend.tree_unflatten(self._structure, slots)
        except Exception:  # noqa: BLE001  # of a class that checks its fields
            return None
        places = {id(slot): at for at, slot in enumerate(slots)}
        return tuple(places[id(x)] for x in tensors_inside(tree, lambda x: id(x) in places, 20))

    def _with_slots(self, slots: Sequence[Any]) -> Any:
        """Return the tree around slots; None if a class in it accepts only tensors."""
        try:
            return self.combine(slots)
        except Exception:  # noqa: BLE001  # of a class that looks at what it is made of
            return None


class _Leaf(TreeSpec):
    """A tree that is one leaf: a tensor, or static."""

    __slots__ = ()

    def without_static(self) -> TreeSpec:
        return self if self.count else _NO_TENSOR

    @property
    def key(self) -> Hashable:
        return self.count, tuple(map(told_apart, self._static))

    def combine(self, tensors: Sequence[Any]) -> Any:
        return tensors[0] if self.count else self._static[0]

    def align(self, gradient: Any) -> list[Any] | None:
        if gradient is None:
            return [None] * self.count
        is_one = self.count and not isinstance(gradient, (list, tuple, dict))
        return [gradient] if is_one else None

    def paths(self, name: str) -> list[str]:
        return [name] * self.count


ONE_TENSOR = _Leaf(None, [None], [0], None)
_NO_TENSOR = _Leaf(None, [None], [], None)


SLOT = object()
"""marks the place of a tensor"""


def partition(
    op: str, backend: Backend, tree: Any, near: Tensor | None = None
) -> tuple[list[Tensor], TreeSpec]:
    """Return a tree's tensors and its spec.

    NumPy arrays and Keras Variables become the backend's tensors, on the device of ``near``, or of
    the first tensor in the tree.
    """
    if backend.is_tensor(tree):
        return [tree], ONE_TENSOR
    if type(tree) in SIMPLE:
        return [], _Leaf(None, [tree], [], None)
    leaves, structure = backend.tree_flatten(tree)
    if leaves and all(map(backend.is_tensor, leaves)):
        return leaves, TreeSpec(backend, [None] * len(leaves), list(range(len(leaves))), structure)
    if near is None:
        near = next(filter(backend.is_tensor, leaves), None)
    as_tensors = [as_tensor(op, backend, leaf, near) for leaf in leaves]
    tensor_at = [at for at, tensor in enumerate(as_tensors) if tensor is not None]
    if not tensor_at:
        return [], _Leaf(None, [tree], [], None)
    tensors = [as_tensors[at] for at in tensor_at]
    static = subvals(leaves, tensor_at, [None] * len(tensor_at))
    converted = [id(leaves[at]) for at in tensor_at if as_tensors[at] is not leaves[at]]
    return tensors, TreeSpec(backend, static, tensor_at, structure, converted)


def partition_each(
    op: str, backend: Backend, trees: Sequence[Any]
) -> tuple[list[Tensor], list[TreeSpec]]:
    """Return the tensors of several trees in one list, and the spec of each tree."""
    if all(map(backend.is_tensor, trees)):
        return list(trees), [ONE_TENSOR] * len(trees)
    tensors: list[Tensor] = []
    each: list[TreeSpec] = []
    near = next(filter(backend.is_tensor, trees), None)
    for tree in trees:
        tensor_leaves, spec = partition(op, backend, tree, near)
        tensors += tensor_leaves
        each.append(spec)
    return tensors, each


def combine_each(each: Sequence[TreeSpec], tensors: Sequence[Any]) -> list[Any]:
    """Return the trees around tensors that come in one list."""
    rest = iter(tensors)
    return [
        next(rest) if spec is ONE_TENSOR else spec.combine(list(islice(rest, spec.count)))
        for spec in each
    ]


def with_leaves(backend: Backend, fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree with fn applied to its leaves."""
    leaves, structure = backend.tree_flatten(tree)
    return backend.tree_unflatten(structure, list(map(fn, leaves)))


def subvals(values: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """Return the values with the others at these places.

    Examples
    --------
    >>> subvals(["a", "b", "c"], [2, 0], ["C", "A"])
    ['A', 'b', 'C']
    """
    full = list(values)
    for at, other in zip(places, others, strict=True):
        full[at] = other
    return full


def as_tensor(op: str, backend: Backend, leaf: Any, near: Tensor | None = None) -> Tensor | None:
    """Return leaf as the backend's tensor, on the device of ``near``; None if it is static.

    Raises an error for another framework's tensor.
    """
    if backend.is_tensor(leaf):
        return leaf
    if framework_of(leaf) is None:
        return None
    leaf = value_of(leaf)
    if backend.is_tensor(leaf):
        return leaf
    if is_numpy_array(leaf):
        portable = leaf if is_traced() else _portable(op, backend, leaf)
        return beside(backend, near, backend.convert_to_tensor, portable)
    raise of_another_framework(op, backend, leaf)


def _portable(op: str, backend: Backend, array: Any) -> Any:
    """Return a NumPy array in native byte order, and in a dtype that every framework supports."""
    if array.dtype.char in "gG":
        raise refusal(CustomGradientTypeError, op, must="only NumPy has long double",
                      got=describe(array), do=f"cast it to a dtype of {name_of(backend)}")  # fmt: skip
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _filled(tree: Any, gradient: Any) -> Any:
    """Return a gradient with the tree's own slots in the place of each branch that is None."""
    if gradient is None:
        return tree
    if type(tree) is dict and type(gradient) is dict and tree.keys() == gradient.keys():
        return {key: _filled(tree[key], gradient[key]) for key in tree}
    sequences = (list, tuple)
    if type(tree) in sequences and type(gradient) in sequences and len(tree) == len(gradient):
        return type(tree)([_filled(*each) for each in zip(tree, gradient, strict=True)])
    if is_dataclass(tree) and type(tree) is type(gradient):
        filled = copy(gradient)
        for name in [field.name for field in fields(tree)]:
            part = _filled(getattr(tree, name), getattr(gradient, name))
            object.__setattr__(filled, name, part)  # it may be frozen
        return filled
    return gradient
