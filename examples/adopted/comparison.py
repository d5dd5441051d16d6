"""Compares a library with itself, with cgshim in the place of its own custom gradients."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

Case = Callable[[], Any]


def outcome(case: Case) -> Any:
    """Return the numbers of a case, or its error."""
    try:
        return [np.asarray(x) for x in case()]
    except Exception as error:  # noqa: BLE001  # whatever a library raises
        return error


def is_same(one: Any, other: Any) -> bool:
    """Return True if two outcomes are the same numbers, up to the order of sums."""
    if isinstance(one, Exception) or isinstance(other, Exception):
        return False
    return len(one) == len(other) and all(
        x.shape == y.shape and np.allclose(x, y, rtol=1e-6, atol=1e-9, equal_nan=True)
        for x, y in zip(one, other, strict=True)
    )


def compare(
    cases: dict[str, Case],
    expected: dict[str, Case],
    install: Callable[[], None],
    uninstall: Callable[[], None],
) -> int:
    """Print what passes with their gradients and with ours; return how many of ours fail.

    A case passes if it has the numbers that are expected; where nothing is known, those that the
    library has with its own.
    """
    theirs = {name: outcome(case) for name, case in cases.items()}
    install()
    ours = {name: outcome(case) for name, case in cases.items()}
    uninstall()
    right = {name: outcome(expected[name]) if name in expected else theirs[name] for name in cases}
    for title, outcomes in (("theirs", theirs), ("ours", ours)):
        failed = {name: got for name, got in outcomes.items() if not is_same(got, right[name])}
        print(f"{title}: {len(cases) - len(failed)} passed, {len(failed)} failed")
        for name, got in failed.items():
            print(f"  {name}: {_said(got)}")
    return sum(not is_same(ours[name], right[name]) for name in cases)


def _said(got: Any) -> str:
    if isinstance(got, Exception):
        return f"{type(got).__name__}: {got}".splitlines()[0][:150]
    return f"another number ({np.ravel(got[0])[:3]}, ...)"


def print_ratios(
    cases: dict[str, Case], install: Callable[[], None], uninstall: Callable[[], None]
) -> None:
    """Print the time of each case with ours for one with theirs: the least of turns, after one."""
    for name, case in cases.items():
        theirs, ours = [], []
        for _ in range(30):
            theirs.append(_seconds(case))
            install()
            ours.append(_seconds(case))
            uninstall()
        print(f"time of {name}: {min(ours[1:]) / min(theirs[1:]):.2f} of theirs")


def _seconds(case: Case) -> float:
    start = time.perf_counter()
    case()
    return time.perf_counter() - start


def print_lines(replaced: Iterable[Any], adapter: Path) -> None:
    """Print how many lines the functions and classes have that an adapter replaces, and it itself."""
    theirs = sum(len(inspect.getsource(each).splitlines()) for each in replaced)
    print(f"lines: {theirs} of theirs, {len(adapter.read_text().splitlines())} of ours")
