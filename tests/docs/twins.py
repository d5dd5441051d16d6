"""The rows of a table in docs/porting.md, each with an op by hand and the same op here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Make = Callable[[], Sequence[Callable[..., Any]]]


class Twin(NamedTuple):
    """`make` returns functions of a vector and `more`: one by hand, and one or more with cgshim.

    They have derivatives up to `orders`.
    """

    row: str
    make: Make
    more: tuple[Any, ...]
    orders: int


class Twins:
    """The twins of a table, and the rows whose twin is a pair of the page or in another test."""

    def __init__(self, elsewhere: dict[str, str]) -> None:
        self.elsewhere, self.all = elsewhere, list[Twin]()

    def add(self, row: str, *more: Any, orders: int = 2) -> Callable[[Make], None]:
        return lambda make: self.all.append(Twin(row, make, more, orders))
