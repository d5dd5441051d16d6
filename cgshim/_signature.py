"""Signatures: bind the calls of an op to f's parameters, and read how to call a grad_fn."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any, Literal

from cgshim._errors import CustomGradientTypeError, refusal
from cgshim._foreign import constant_when_traced, is_traced


class Parameters:
    """f's parameters: positional ones are arguments, keyword-only ones are options.

    The keyword-only parameter needs_input_grad is neither: the backend passes it.
    """

    __slots__ = (
        "_defaults", "_options", "_rest", "default_options", "names", "signature", "takes_needs_input_grad",
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
        self._options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        # torch.compile reads these in each call, not a signature
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.default_options = {n: x for n, x in self._defaults.items() if n in self._options}
        """the options with default values"""

    def names_of(self, count: int) -> list[str] | None:
        """Return the names of this many positional arguments; None if they have default values."""
        beyond = count - len(self.names)
        if beyond < 0 or (beyond and self._rest is None):
            return None
        return (
            self.names + [f"{self._rest}[{at}]" for at in range(beyond)] if beyond else self.names
        )

    def bind(
        self, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[str], tuple[Any, ...], Mapping[str, Any]]:
        """Return the names, the arguments and the options.

        The result is the same for a positional, keyword or default argument.
        """
        names = self.names_of(len(args))
        if not kwargs and names is not None and len(self.default_options) == len(self._options):
            return names, args, self.default_options
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


# --- How to call a grad_fn ------------------------------------------------------------------------

FORMS = (
    "grad(upstream), grad(*args, upstream) or grad(d1, d2, ...), "
    "each with or without variables and needs_input_grad last"
)

_PASSED_BY_NAME = ("variables", "needs_input_grad")


Form = Literal["structured", "arguments", "flat"]
"""The three ways to pass upstream gradients to a rule: grad(upstream), structured as the output; grad(*args,
upstream=...), also structured so; and grad(d1, d2, ...), one per tensor output."""


Convention = tuple[Form | None, bool | None, bool]
"""The form of a grad_fn, None if it fits none; None if no parameter of it takes the variables, True if one requires
them, else False; and True if a parameter takes needs_input_grad."""


def convention_of(grad_fn: Callable[..., Any], arguments: int, outputs: int) -> Convention:
    """Return the convention of grad_fn; closures of one plain function share one reading."""
    # a decorated function has other code
    if not isinstance(grad_fn, FunctionType) or hasattr(grad_fn, "__wrapped__"):
        return _read_convention(grad_fn, arguments, outputs)
    code = grad_fn.__code__
    try:
        keyword_defaults = tuple(grad_fn.__kwdefaults__ or ())
        defaults = len(grad_fn.__defaults__ or ())
    except AttributeError:
        # torch.compile hides the names: assume that only upstream gradients lack a default
        keyword_defaults = code.co_varnames
        positional = code.co_varnames[: code.co_argcount]
        own = [name for name in positional if name not in _PASSED_BY_NAME]
        taken = "upstream" if "upstream" in own else own[0] if own else None
        beyond = positional[positional.index(taken) + 1 :] if taken else positional
        if taken == "upstream" or len(own) <= 1 or outputs == 1 or len(own) < outputs:
            defaults = len(beyond)  # the rule gets one upstream gradient, or one tree of them
        elif len(own) > outputs or "variables" in positional:
            return _read_convention(grad_fn, arguments, outputs)  # where torch.compile supports it
        else:
            defaults = len(grad_fn.__defaults__ or ())
    return _convention_of_code(code, defaults, keyword_defaults, arguments, outputs)


@constant_when_traced
def _convention_of_code(*key: Any) -> Convention:
    return _remembered_convention(*key)


@functools.lru_cache(maxsize=4096)
def _remembered_convention(
    code: CodeType, defaults: int, keyword_defaults: tuple[str, ...], arguments: int, outputs: int
) -> Convention:
    closure = tuple([CellType() for _ in code.co_freevars])
    like_it = FunctionType(code, {}, "", (None,) * defaults, closure)
    like_it.__kwdefaults__ = dict.fromkeys(keyword_defaults)
    return _read_convention(like_it, arguments, outputs)


def _read_convention(grad_fn: Callable[..., Any], arguments: int, outputs: int) -> Convention:
    try:
        signature = inspect.signature(grad_fn)
    except ValueError:
        # a C function without a signature gets one upstream, as most rules do
        return "structured", None, False
    parameters = signature.parameters.values()
    keywords = {p.name: p for p in parameters if p.name in _PASSED_BY_NAME and p.kind not in _REST}
    variables = False if any(p.kind is p.VAR_KEYWORD for p in parameters) else None
    if "variables" in keywords:
        variables = keywords["variables"].default is inspect.Parameter.empty
    form = _form_of(signature, keywords, arguments, outputs)
    return form, variables, "needs_input_grad" in keywords


_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _form_of(
    signature: inspect.Signature, keywords: dict[str, Any], arguments: int, outputs: int
) -> Form | None:
    """Return the form of a rule with this signature and these keywords; None if it fits none."""
    parameters = signature.parameters.values()
    if any(p.name in keywords and p.kind is p.POSITIONAL_ONLY for p in parameters):
        return None  # a keyword upstream would go to **kwargs
    own = [p for p in parameters if p.name not in keywords]
    positional = [p for p in own if p.kind in _POSITIONAL]
    required = sum(p.default is p.empty for p in positional)
    most = math.inf if any(p.kind is p.VAR_POSITIONAL for p in own) else len(positional)
    upstream = next((p for p in own if p.name == "upstream" and p.kind in _BY_NAME), None)
    form: Form = "flat"
    if upstream is None:
        if (required == 1 and most < math.inf) or (required == 0 and most == 1):
            form = "structured"
    elif upstream in positional[:1]:
        if not (required == 1 or most == 1):
            return None
        form = "structured"
    elif upstream.kind is upstream.KEYWORD_ONLY or positional.index(upstream) == arguments:
        form, keywords = "arguments", {**keywords, "upstream": None}
    else:
        return None
    count = {"structured": 1, "arguments": arguments, "flat": outputs}[form]
    try:
        signature.bind(*[None] * count, **keywords)
    except TypeError:
        return None
    return form
