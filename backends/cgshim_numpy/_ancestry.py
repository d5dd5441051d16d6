"""NumPy: what a box was computed from, as the nodes of autograd's graph tell it.

In reverse mode a node knows its parents. In forward mode it holds a tangent and nothing else: there the backend
remembers, while a rule runs, what its residuals were made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autograd.extend import JVPNode

from cgshim.backend import RuleScope
from cgshim_numpy._boxes import Node, layers_of

Links = Mapping[int, tuple[Node, Sequence[Node]]]
"""For nodes of forward mode, by identity: the node, and the nodes that it was made of."""

rule_scope: RuleScope[Links] = RuleScope("cgshim_numpy_rule")
"""While a rule runs: the links of what it was given."""


def links_of(residuals: Iterable[Any], values: Sequence[Any]) -> Links:
    """Return what forward mode does not record: that residuals were made of values."""
    links: dict[int, tuple[Node, Sequence[Node]]] = {}
    for x in residuals:
        for level, node in layers_of(x):
            if isinstance(node, JVPNode):
                links[id(node)] = node, [n for value in values for at, n in layers_of(value) if at == level]
    return links


class Ancestry:
    """Tells which boxes are functions of known ones alone."""

    def __init__(self, known: Iterable[Any], links: Links) -> None:
        self._known = {id(node) for x in known for _, node in layers_of(x)}
        self._links = links

    def covers(self, box: Any) -> bool:
        return all(self._reaches_no_further(node) for _, node in layers_of(box))

    def _reaches_no_further(self, node: Node) -> bool:
        todo, seen = [node], set[int]()
        while todo:
            node = todo.pop()
            if id(node) in self._known or id(node) in seen:
                continue
            parents = self._parents(node)
            if not parents:  # a derivative began here, or nobody knows what the node was made of
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
    """The same, but a node of forward mode, which tells nothing, is trusted if a known one is of its level."""

    def __init__(self, known: Sequence[Any]) -> None:
        super().__init__(known, {})
        self._trusted = {level for x in known for level, node in layers_of(x) if isinstance(node, JVPNode)}

    def covers(self, box: Any) -> bool:
        return all(
            level in self._trusted if isinstance(node, JVPNode) else self._reaches_no_further(node)
            for level, node in layers_of(box)
        )
