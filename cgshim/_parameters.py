"""The parameters of a function that becomes an op, and the binding of calls to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from cgshim._errors import CustomGradientTypeError, refusal


class Parameters:
    """f's parameters: the positional ones are arguments, with gradients; the keyword-only ones are
    options.

    A keyword-only parameter needs_input_grad is neither: f gets it from the backend.
    """

    __slots__ = (
        "_defaults",
        "_instance",
        "_options",
        "_rest",
        "_signature",
        "names",
        "takes_needs_input_grad",
    )

    def __init__(self, f: Callable[..., Any]) -> None:
        try:
            self._signature = inspect.signature(f)
        except ValueError:
            # written in C, without a signature: all that comes by position is an argument
            self._signature = inspect.signature(lambda *args, **options: None)
        needed = [p for p in self._signature.parameters.values() if (p.name, p.kind) == _NEEDED]
        self.takes_needs_input_grad = bool(needed)
        if needed:
            rest = [p for p in self._signature.parameters.values() if p is not needed[0]]
            self._signature = self._signature.replace(parameters=rest)
        parameters = self._signature.parameters.values()
        self.names = [
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        self._options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        # torch.compile reads these in each call, not a signature
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self._instance: tuple[None, ...] = ()

    def of_method(self) -> Parameters:
        """Return the parameters of a method of this function: all but the first, which takes the
        instance.

        torch.compile traces this; it would find the first one too in the signature of a method.
        """
        method = object.__new__(Parameters)
        method._signature, method._rest, method._options = (
            self._signature,
            self._rest,
            self._options,
        )
        method.names, method._defaults, method._instance = self.names[1:], self._defaults, (None,)
        method.takes_needs_input_grad = self.takes_needs_input_grad
        return method

    @property
    def signature(self) -> inspect.Signature:
        """These parameters as inspect shows them."""
        parameters = list(self._signature.parameters.values())
        if not self._instance or parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
            return self._signature
        return self._signature.replace(parameters=parameters[1:])

    def names_of(self, count: int) -> list[str] | None:
        """Return the names of this many positional arguments; None if default values belong to
        them.
        """
        beyond = count - len(self.names)
        if beyond < 0 or (beyond and self._rest is None):
            return None
        return (
            self.names + [f"{self._rest}[{at}]" for at in range(beyond)] if beyond else self.names
        )

    def are_options(self, names: Collection[str]) -> bool:
        """Return True if these are options of f, and all others have default values."""
        return all(name in self._options for name in names) and all(
            name in names or name in self._defaults for name in self._options
        )

    def bind(
        self, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[str], tuple[Any, ...], Mapping[str, Any]]:
        """Return the names, the arguments and the options; the same for a positional, keyword or
        default argument.
        """
        if not (kwargs or self._options) and (names := self.names_of(len(args))) is not None:
            return names, args, kwargs
        if self.takes_needs_input_grad and "needs_input_grad" in kwargs:
            raise refusal(CustomGradientTypeError, op, must="needs_input_grad must be left to cgshim",
                          got="one in the call", do="leave it out")  # fmt: skip
        try:
            bound = self._signature.bind(*self._instance, *args, **kwargs)
        except TypeError as error:
            raise CustomGradientTypeError(f"{op}: {error}") from None
        bound.arguments.update(
            {name: self._defaults[name] for name in self._defaults if name not in bound.arguments}
        )
        arguments = bound.args[len(self._instance) :]
        names = self.names + [
            f"{self._rest}[{at}]" for at in range(len(arguments) - len(self.names))
        ]
        return names, arguments, bound.kwargs


_NEEDED = ("needs_input_grad", inspect.Parameter.KEYWORD_ONLY)
