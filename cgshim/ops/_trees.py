"""Trees of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cgshim._backend import backend_of
from cgshim._errors import CustomGradientTypeError, describe_tree, sentence
from cgshim._tree import take_apart

Tree = Any


def tree_map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """A tree of fn's results for each tensor of a tree, and for the tensors at its place in the rest.

    Parameters
    ----------
    fn : callable
        Takes one tensor for each tree.
    tree, *rest : tree
        Of what the backend's registry knows (lists, dicts, modules), alike in structure. A leaf that is no tensor
        stays as it is in the first.

    Returns
    -------
    tree
        Structured as the first.

    Raises
    ------
    CustomGradientTypeError
        Where the trees are structured in different ways.

    Examples
    --------
    >>> import numpy as np
    >>> tree_map(lambda a, b: a + 10 * b, {"w": np.ones(2), "name": "x"}, {"w": np.array([1.0, 2.0]), "name": "y"})
    {'w': array([11., 21.]), 'name': 'x'}
    """
    backend = backend_of([tree, *rest])
    tensors, parts = take_apart("op_tree_map", backend, tree)
    columns = []
    for other in rest:
        column, other_parts = take_apart("op_tree_map", backend, other)
        if other_parts.paths("tree") != parts.paths("tree"):
            raise CustomGradientTypeError(
                sentence("op_tree_map", f"the trees must be structured alike ({describe_tree(tree)})",
                         describe_tree(other), "give trees with tensors at the same places")
            )  # fmt: skip
        columns.append(column)
    return parts.fill([fn(*each) for each in zip(tensors, *columns, strict=True)])
