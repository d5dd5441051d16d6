"""`--pairwise` runs a part of each product of parameters. A plugin, which conftest.py registers.

A test with two parameters of 6 values each runs 12 of 36 combinations, in which each value occurs
as often as each other one. With three parameters each pair of values occurs.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict

import pytest

ONE_OF = 3
"""the part of the combinations that runs, if the parameters have as many values"""


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    if not config.option.pairwise:
        return
    of_tests: dict[object, list[pytest.Item]] = defaultdict(list)
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        of_tests[item.nodeid.split("[")[0], parameters.get("backend")].append(item)
    left_out = {item for of_test in of_tests.values() for item in _left_out(of_test)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the combinations whose indices do not add up to a multiple of `ONE_OF`."""
    columns = _independent_columns(items)
    sizes = [len(set(column)) for column in columns]
    if len(sizes) < 2 or math.prod(sizes) != len(items):
        return []
    # each value of two parameters, and each pair of values of more, must meet every remainder
    free = sorted(size - 1 for size in sizes)[: max(1, len(sizes) - 2)]
    divisor = min(ONE_OF, 1 + sum(free))
    start = zlib.crc32(items[0].nodeid.split("[")[0].encode())  # other combinations in each test
    sums = [start + sum(indices) for indices in zip(*columns, strict=True)]
    return [item for item, total in zip(items, sums, strict=True) if total % divisor]


def _independent_columns(items: list[pytest.Item]) -> list[tuple[int, ...]]:
    """Return, for each parameter, which of its values each item has.

    One of two parameters that change together, as in one `parametrize`, is left out.
    """
    names = items[0].callspec.params if hasattr(items[0], "callspec") else ()
    columns = {_column(items, name) for name in names}
    independent: list[tuple[int, ...]] = []
    for column in sorted(columns, key=max, reverse=True):
        counts = [(len(set(zip(other, column, strict=True))), max(other)) for other in independent]
        if max(column) and all(pairs > values + 1 for pairs, values in counts):
            independent.append(column)
    return independent


def _column(items: list[pytest.Item], name: str) -> tuple[int, ...]:
    values = [id(item.callspec.params[name]) for item in items]
    positions = {value: position for position, value in enumerate(dict.fromkeys(values))}
    return tuple(positions[value] for value in values)
