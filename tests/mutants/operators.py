"""The mistakes: cosmic-ray's operators, and three of our own for code that calls more than it
computes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import parso
from cosmic_ray.operators.boolean_replacer import AddNot
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.plugins import get_operator, operator_names

Positions = Iterator[tuple[tuple[int, int], tuple[int, int]]]


class RemoveStatement(Operator):
    """A call for its effect, or an assignment to an attribute or an item, does not happen."""

    def mutation_positions(self, node: Any) -> Positions:
        if node.type == "simple_stmt" and self._has_an_effect(node.children[0]):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        statement = parso.parse("pass\n").children[0]
        statement.get_first_leaf().prefix = node.get_first_leaf().prefix
        return statement

    @staticmethod
    def _has_an_effect(statement: Any) -> bool:
        if statement.type == "expr_stmt":
            to = statement.children[0]
            return to.type in ("power", "atom_expr")
        return statement.type in ("power", "atom_expr", "await_expr", "del_stmt")

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("f(x)\n", "pass\n"), Example("x.a = 1\n", "pass\n"))


class RemoveKeyword(Operator):
    """A keyword argument of a call is forgotten."""

    def mutation_positions(self, node: Any) -> Positions:
        yield from [
            (node.children[at].start_pos, node.children[at].end_pos) for at in self._keywords(node)
        ]

    def mutate(self, node: Any, index: int) -> Any:
        at = self._keywords(node)[index]
        if node.type == "trailer":
            del node.children[at]
        else:  # with the comma before it, or after it
            del node.children[max(at - 1, 0) : at + 1 + (at == 0)]
        return node

    @staticmethod
    def _keywords(node: Any) -> list[int]:
        in_a_call = node.type == "trailer" and node.children[0] == "("
        if not (in_a_call or (node.type == "arglist" and node.parent.type == "trailer")):
            return []
        return [
            at
            for at, child in enumerate(node.children)
            if child.type == "argument" and child.children[1] == "="
        ]

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("f(x, y=1)", "f(x)"), Example("f(y=1)", "f()"))


class RemoveCall(Operator):
    """A method without arguments is not called: `x.detach()` is x."""

    def mutation_positions(self, node: Any) -> Positions:
        if self._calls_nothing_with_a_method(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        del node.children[-2:]
        return node

    @staticmethod
    def _calls_nothing_with_a_method(node: Any) -> bool:
        if node.type not in ("power", "atom_expr") or len(node.children) < 3:
            return False
        name, call = node.children[-2:]
        return (
            name.type == call.type == "trailer"
            and name.children[0] == "."
            and call.get_code() == "()"
        )

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("y = x.detach()", "y = x"),)


class Negate(AddNot):
    """A condition is turned around, where no other operator does that: not `x is y`, and not `not
    x`.
    """

    def mutation_positions(self, node: Any) -> Positions:
        if [*super().mutation_positions(node)]:
            condition = node.children[2 if node.type == "test" else 1]
            if condition.type not in ("comparison", "not_test"):
                yield condition.start_pos, condition.end_pos


OWN: tuple[type[Operator], ...] = (RemoveStatement, RemoveKeyword, RemoveCall, Negate)

# Of cosmic-ray's replacements those that somebody could have written: `x is y` for `x is not y`,
# not `x << y` for `x + y`.
REPLACEMENTS = {
    "core/ReplaceComparisonOperator": (
        "Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt"
    ),
    "core/ReplaceBinaryOperator": (
        "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_Mul Pow_Mul BitOr_BitAnd BitAnd_BitOr BitXor_BitOr"
    ),
}
# the last one is Negate here
LEFT_OUT = ("core/VariableReplacer", "core/VariableInserter", "core/AddNot")


@functools.cache
def operators() -> dict[str, Operator]:
    """Every operator, by its name."""
    theirs = {name: get_operator(name)() for name in operator_names() if _is_wanted(name)}
    return theirs | {operator.__name__: operator() for operator in OWN}


def _is_wanted(name: str) -> bool:
    kind, _, which = name.partition("_")
    return name not in LEFT_OUT and (
        kind not in REPLACEMENTS or which in REPLACEMENTS[kind].split()
    )


def family(name: str) -> str:
    """Operators that change the same place in the same way: of each family a place has one mutant."""
    return name.removeprefix("core/").partition("_")[0]
