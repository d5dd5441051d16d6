"""Which of a backend's rules is running: an op that is called in it asks."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class RuleScope(Generic[T]):
    """The rule that is running in this thread or task, in the backend's own terms; None if none is."""

    def __init__(self, name: str) -> None:
        self._current: ContextVar[T | None] = ContextVar(name, default=None)
        self.enter: Callable[[T], Token[T | None]] = self._current.set
        """Lets `current` be what it is called with, until `leave` is called with what this returns."""
        self.leave: Callable[[Token[T | None]], None] = self._current.reset
        """Lets `current` be what it was."""

    @property
    def current(self) -> T | None:
        """The value with which the innermost running rule was entered."""
        return self._current.get()

    def run(self, entered: T, rule: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return ``rule(*args, **kwargs)``, run while `current` is ``entered``."""
        token = self._current.set(entered)
        try:
            return rule(*args, **kwargs)
        finally:
            self._current.reset(token)
