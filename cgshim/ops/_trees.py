"""Trees of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cgshim.backend import (
    CustomGradientTypeError,
    backend_or_numpy,
    describe_tree,
    partition,
    refusal,
)

Tree = Any


def tree_map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Return a tree of fn's results for each tensor of a tree, and for the tensors at its place in
    the rest.

    Parameters
    ----------
    fn : callable
        Takes one tensor for each tree.
    tree, *rest : tree
        Of what the backend's registry knows (lists, dicts, modules), with the same structure. A
        leaf that is not a tensor stays as it is in the first.

    Returns
    -------
    tree
        Structured as the first.

    Raises
    ------
    CustomGradientTypeError
        If the trees have different structures.

    Examples
    --------
    >>> import numpy as np
    >>> tree_map(lambda a, b: a + 10 * b, {"w": np.ones(2), "name": "x"}, {"w": np.array([1.0, 2.0]), "name": "y"})
    {'w': array([11., 21.]), 'name': 'x'}
    """
    backend = backend_or_numpy([tree, *rest])
    tensors, spec = partition("op_tree_map", backend, tree)
    columns = []
    for other in rest:
        column, other_spec = partition("op_tree_map", backend, other)
        if other_spec.paths("tree") != spec.paths("tree"):
            raise refusal(CustomGradientTypeError, "op_tree_map",
                          must=f"the trees must be structured alike ({describe_tree(tree)})",
                          got=describe_tree(other), do="give trees with tensors at the same places")  # fmt: skip
        columns.append(column)
    return spec.combine([fn(*each) for each in zip(tensors, *columns, strict=True)])
