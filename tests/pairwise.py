"""`--pairwise` runs a part of each product of parameters. A plugin, which conftest.py registers.

A test with two parameters of 6 values each runs 12 of 36 combinations, in which each value occurs
as often as each other one. With three parameters each pair of values occurs. A conformance case
with three tables runs each pair of their rows; other cases run whole. JAX stages a function in six
ways, which most of its tests share: each test runs with two of them, other tests with the others.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict

import pytest

from cgshim.testing.conformance import Case, _registry

ONE_OF = 3
"""the part of the combinations that runs, if the parameters have as many values"""
WAYS = {"staging", "staged"}
"""the parameters that many tests share, of which each test runs with a part of the values"""


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    if not config.option.pairwise:
        return
    of_tests: dict[object, list[pytest.Item]] = defaultdict(list)
    for item in items:
        of_tests[_test_of(item), _parameters(item).get("backend")].append(item)
    left_out: set[pytest.Item] = set()
    for of_test in of_tests.values():
        other_ways = _of_other_ways(of_test)
        left_out.update(other_ways, _left_out([x for x in of_test if x not in other_ways]))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _of_other_ways(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the items with a value of WAYS that other tests run with."""
    left_out: set[pytest.Item] = set()
    for name in WAYS & set(_parameters(items[0])):
        column = _column(items, name)
        divisor, start = min(ONE_OF, max(column) + 1), _start(items)
        left_out.update(
            item for item, at in zip(items, column, strict=True) if (start + at) % divisor
        )
    return left_out


def _left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the combinations whose indices do not add up to a multiple of `ONE_OF`."""
    columns = _independent_columns(items)
    sizes = [len(set(column)) for column in columns]
    least = 2 if _case_of(items[0]) is None else 3  # of a contract, each pair is tested
    if len(sizes) < least or math.prod(sizes) != len(items):
        return []
    # each value of two parameters, and each pair of values of more, must meet every remainder
    free = sorted(size - 1 for size in sizes)[: max(1, len(sizes) - 2)]
    divisor = min(ONE_OF, 1 + sum(free))
    sums = [_start(items) + sum(indices) for indices in zip(*columns, strict=True)]
    return [item for item, total in zip(items, sums, strict=True) if total % divisor]


def _independent_columns(items: list[pytest.Item]) -> list[tuple[int, ...]]:
    """Return, for each parameter, which of its values each item has.

    One of two parameters that change together, as in one `parametrize`, is left out.
    """
    columns = {_column(items, name) for name in _parameters(items[0])}
    independent: list[tuple[int, ...]] = []
    for column in sorted(columns, key=max, reverse=True):
        counts = [(len(set(zip(other, column, strict=True))), max(other)) for other in independent]
        if max(column) and all(pairs > values + 1 for pairs, values in counts):
            independent.append(column)
    return independent


def _start(items: list[pytest.Item]) -> int:
    """Return a number that differs from test to test, so that each runs other combinations."""
    return zlib.crc32(_test_of(items[0]).encode())


def _test_of(item: pytest.Item) -> str:
    """Return the name of an item's test, or of its conformance case and backend."""
    case = _case_of(item)
    name = item.nodeid if case is None else f"{case.framework.name}::{case.name}"
    return name.split("[")[0]


def _parameters(item: pytest.Item) -> dict[str, object]:
    case = _case_of(item)
    if case is not None:
        return getattr(_registry._bodies[case.name], "keywords", {})
    return item.callspec.params if hasattr(item, "callspec") else {}


def _case_of(item: pytest.Item) -> Case | None:
    case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
    return case if isinstance(case, Case) else None


def _column(items: list[pytest.Item], name: str) -> tuple[int, ...]:
    values = [id(_parameters(item)[name]) for item in items]
    positions = {value: position for position, value in enumerate(dict.fromkeys(values))}
    return tuple(positions[value] for value in values)
