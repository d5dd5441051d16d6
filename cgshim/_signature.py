"""The parameters of a function that becomes an op, and the binding of calls to them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

from cgshim._errors import CustomGradientTypeError, refusal
from cgshim._foreign import is_traced


class Parameters:
    """f's parameters: positional ones are arguments, keyword-only ones are options.

    The keyword-only parameter needs_input_grad is neither: the backend passes it.
    """

    __slots__ = (
        "_defaults", "_have_no_name", "_options", "_rest", "names", "signature", "takes_needs_input_grad",
    )  # fmt: skip

    def __init__(self, f: Callable[..., Any] | inspect.Signature) -> None:
        """Read the parameters of a function or a signature."""
        signature = f if isinstance(f, inspect.Signature) else signature_of(f)
        parameters = [p for p in signature.parameters.values() if (p.name, p.kind) != _NEEDED]
        self.takes_needs_input_grad = len(parameters) < len(signature.parameters)
        self.signature = (
            signature.replace(parameters=parameters) if self.takes_needs_input_grad else signature
        )
        """these parameters, as inspect shows them"""
        self.names = [p.name for p in parameters if p.kind in _POSITIONAL]
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        self._have_no_name = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        self._options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        # torch.compile reads these in each call, not a signature
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    @property
    def default_options(self) -> dict[str, Any]:
        """The options with default values."""
        return {name: self._defaults[name] for name in self._options if name in self._defaults}

    def names_of(self, count: int) -> list[str] | None:
        """Return the names of this many positional arguments; None if they have default values."""
        beyond = count - len(self.names)
        if beyond < 0 or (beyond and self._rest is None):
            return None
        return (
            self.names + [f"{self._rest}[{at}]" for at in range(beyond)] if beyond else self.names
        )

    def names_of_call(self, count: int, options: Collection[str]) -> list[str] | None:
        """Return the names of this many arguments in a call with these options.

        None if the call lacks one, or passes an argument by its name.
        """
        needed = {name for name in self._options if name not in self._defaults}
        is_complete = needed.issubset(options) and set(self._options).issuperset(options)
        return self.names_of(count) if is_complete else None

    def bind(
        self, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[str], tuple[Any, ...], Mapping[str, Any]]:
        """Return the names, the arguments and the options.

        The result is the same for a positional, keyword or default argument.
        """
        if not (kwargs or self._options) and (names := self.names_of(len(args))) is not None:
            return names, args, kwargs
        if self.takes_needs_input_grad and "needs_input_grad" in kwargs:
            raise refusal(CustomGradientTypeError, op, must="needs_input_grad must be left to cgshim",
                          got="one in the call", do="leave it out")  # fmt: skip
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise CustomGradientTypeError(f"{op}: {error}") from None
        bound.arguments.update(
            {name: self._defaults[name] for name in self._defaults if name not in bound.arguments}
        )
        return self.names_of(len(bound.args)) or [], bound.args, bound.kwargs


_NEEDED = ("needs_input_grad", inspect.Parameter.KEYWORD_ONLY)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def parameters_of(f: Callable[..., Any]) -> tuple[Parameters, Parameters]:
    """Return the parameters of f or of a method.

    They are cached by code, for ops that are made in each call of a function.
    """
    # torch.compile cannot read all of these
    if (
        not is_traced()
        and type(f) is FunctionType
        and not (f.__defaults__ or f.__kwdefaults__ or f.__annotations__ or f.__dict__)
    ):
        return _parameters_of_code(f.__code__)
    signature = signature_of(f)
    return Parameters(signature), Parameters(signature_of_method(signature))


@functools.lru_cache(maxsize=1024)
def _parameters_of_code(code: CodeType) -> tuple[Parameters, Parameters]:
    closure = tuple(CellType() for _ in code.co_freevars)
    signature = signature_of(FunctionType(code, {}, closure=closure))
    return Parameters(signature), Parameters(signature_of_method(signature))


def signature_of(f: Callable[..., Any]) -> inspect.Signature:
    """Return f's signature; accept any arguments for a C function without one."""
    try:
        return inspect.signature(f)
    except ValueError:
        return inspect.signature(lambda *args, **options: None)


def signature_of_method(signature: inspect.Signature) -> inspect.Signature:
    """Return a method's signature: drop the first parameter, which gets the instance.

    torch.compile would keep the first parameter in the signature of a method.
    """
    parameters = enumerate(signature.parameters.values())
    return signature.replace(
        parameters=[p for at, p in parameters if at or p.kind not in _POSITIONAL]
    )
