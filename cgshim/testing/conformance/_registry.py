"""The cases by name, and the functions that run them."""

from __future__ import annotations

import functools
import itertools
import unittest
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from cgshim.testing.conformance._failures import place_of, reason_of
from cgshim.testing.conformance._framework import Framework, Gradients

Body = Callable[[Framework], None]

_bodies: dict[str, Body] = {}


def case(**tables: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a case, once for each combination of the rows of its tables."""

    def register(body: Callable[..., None]) -> Callable[..., None]:
        for rows in itertools.product(*(table.items() for table in tables.values())):
            names = "-".join(name for name, _ in rows)
            values = dict(zip(tables, (value for _, value in rows), strict=True))
            _bodies[f"{body.__name__}[{names}]" if names else body.__name__] = functools.partial(
                body, **values
            )
        return body

    return register


ORDERS = {"1": 1, "2": 2, "3": 3}
"""orders of derivatives, as a table"""


def orders(*expected: Any) -> dict[str, tuple[int, Any]]:
    """A table of orders from the first on, each with its expected value."""
    return {str(order): (order, value) for order, value in enumerate(expected, start=1)}


class KnownGap(unittest.SkipTest):
    """A case that fails as the table of gaps says; test runners show it as skipped with the reason."""


@dataclass(frozen=True)
class Case:
    """One case for one backend: calling it raises an error if the backend fails."""

    framework: Framework
    name: str
    gap: str | None = None
    """why it is known to fail, or None"""

    @property
    def __name__(self) -> str:  # pytest names a parameter by it
        return self.name

    def __call__(self) -> None:
        """Run the case; raise KnownGap for a known failure, AssertionError for a gap that passes."""
        if self.gap is None:
            _bodies[self.name](self.framework)
            return
        try:
            _bodies[self.name](self.framework)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # any error is the gap
            raise KnownGap(self.gap) from error
        raise AssertionError(
            f"{self.name} passes on {self.framework.name}: take it off the table of gaps ({self.gap})"
        )


class Result(NamedTuple):
    """The result of one case."""

    case: str
    outcome: Literal["passed", "failed", "gap"]
    reason: str
    """the error in one line, or the reason of the gap; empty for a pass"""
    place: str = ""
    """file and line of the error: in the backend if its code raised it, else in the case"""


def cases(
    name: str, *, gaps: Mapping[str, str] | None = None, state: Gradients | None = None
) -> list[Case]:
    """Every conformance case for one backend.

    Parameters
    ----------
    name : str
        The backend, by its framework's import root.
    gaps : mapping of str to str, optional
        The cases that the backend is known to fail, each with the reason.
    state : callable, optional
        ``state(fn, *values) -> (fn(*state), pullback)`` for a framework that keeps trainable state
        in objects of its own, as torch does in its Parameters; by default the differentiated
        tensors are state.

    Returns
    -------
    list of Case
        Functions without arguments, which raise an error if the backend fails.

    Raises
    ------
    BackendError
        If there is no such backend, or its framework cannot be imported.
    ValueError
        If gaps names a case that does not exist.

    Examples
    --------
    >>> [case() for case in cases("numpy") if case.name == "same_tensor_twice"]
    [None]
    """
    gaps = gaps or {}
    unknown = sorted(set(gaps) - set(_bodies))
    if unknown:
        raise ValueError(f"the table of gaps names cases that do not exist: {', '.join(unknown)}")
    framework = Framework(name, state)
    return [Case(framework, case, gaps.get(case)) for case in _bodies]


def run(
    name: str, *, gaps: Mapping[str, str] | None = None, state: Gradients | None = None
) -> list[Result]:
    """Run every conformance case for one backend, and return the results.

    Parameters
    ----------
    name, gaps, state
        As in `cases`.

    Returns
    -------
    list of Result
        One for each case, in the order of their registration.

    Raises
    ------
    BackendError
        If there is no such backend, or its framework cannot be imported.

    Examples
    --------
    >>> {result.outcome for result in run("numpy", gaps={})} - {"passed", "failed"}
    set()
    """
    return [result_of(case) for case in cases(name, gaps=gaps, state=state)]


def result_of(case: Case) -> Result:
    """Run a case and return its result; only KeyboardInterrupt is raised."""
    try:
        case()
    except KeyboardInterrupt:
        raise
    except KnownGap as gap:
        return Result(case.name, "gap", str(gap))
    except BaseException as error:  # noqa: BLE001  # a failure of the backend, whatever it raises, SystemExit too
        return Result(
            case.name, "failed", reason_of(error), place_of(error, case.framework.backend)
        )
    return Result(case.name, "passed", "")
