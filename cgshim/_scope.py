"""Where a backend's rule is running: an op that is called there asks."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class RuleScope(Generic[T]):
    """The rule that is running in this thread or task, in whatever terms a backend knows it; None where none is."""

    def __init__(self, name: str) -> None:
        self._current: ContextVar[T | None] = ContextVar(name, default=None)

    @property
    def current(self) -> T | None:
        """What the innermost running rule was entered with."""
        return self._current.get()

    def run(self, entered: T, rule: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """`rule(*args, **kwargs)`, while `current` is what it is entered with."""
        token = self._current.set(entered)
        try:
            return rule(*args, **kwargs)
        finally:
            self._current.reset(token)
