"""Find the form of a grad_fn, that is, how to call it, from its signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any, Literal, NamedTuple

from cgshim._foreign import constant_when_traced

FORMS = (
    "grad(upstream), grad(*args, upstream) or grad(d1, d2, ...), "
    "each with or without variables and needs_input_grad last"
)

_MANY = float("inf")


class Signature(NamedTuple):
    """The facts about a grad_fn's parameters: how many it takes by position, and which by name."""

    required: int
    """positional parameters without a default"""
    accepted: float
    """positional parameters in all; infinite with *args"""
    upstream_at: float | None
    """the position of a parameter called upstream: infinite if it is keyword-only, None if there is none"""
    variables: bool | None
    """None if no parameter takes the variables, True if one requires them, else False"""
    takes_needs_input_grad: bool
    """True if a parameter takes needs_input_grad"""
    named_at: float
    """how many values may come by position before one fills a parameter that is passed by name"""
    foreign: bool
    """True if it requires a keyword that no form has"""


def _read_signature(grad_fn: Callable[..., Any]) -> Signature:
    try:
        parameters = inspect.signature(grad_fn).parameters.values()
    except ValueError:
        # a function written in C without one: it gets one upstream, as most rules do
        return Signature(1, 1, None, None, False, _MANY, False)
    required, accepted, upstream_at, variables, takes_needs_input_grad = 0, 0.0, None, None, False
    named_at, foreign = _MANY, False
    for p in parameters:
        is_required = p.default is p.empty
        if p.kind is p.VAR_POSITIONAL:
            accepted = _MANY
        elif p.kind is p.VAR_KEYWORD:
            variables = variables or False
        elif p.name in _PASSED_BY_NAME:
            if p.name == "variables":
                variables = is_required
            else:
                takes_needs_input_grad = True
            if p.kind is not p.KEYWORD_ONLY:
                named_at = min(named_at, -1 if p.kind is p.POSITIONAL_ONLY else accepted)
        elif p.kind is p.KEYWORD_ONLY:
            if p.name == "upstream":
                upstream_at = _MANY
            else:
                foreign |= is_required
        else:
            if p.name == "upstream" and p.kind is not p.POSITIONAL_ONLY:
                upstream_at = accepted
            required += is_required
            accepted += 1
    return Signature(
        required, accepted, upstream_at, variables, takes_needs_input_grad, named_at, foreign
    )


_PASSED_BY_NAME = ("variables", "needs_input_grad")


Form = Literal["structured", "arguments", "flat"]
"""The three ways to pass upstream gradients to a rule: grad(upstream), structured as the output; grad(*args,
upstream=...), also structured so; and grad(d1, d2, ...), one per tensor output."""


def form_of(signature: Signature, arguments: int, outputs: int) -> Form | None:
    """Return the form of a rule with this signature; None if it fits none."""
    form = _form_by_count(signature, arguments, outputs)
    by_position = {"structured": 1, "arguments": arguments, "flat": outputs, None: 0}[form]
    return None if signature.foreign or by_position > signature.named_at else form


def _form_by_count(signature: Signature, arguments: int, outputs: int) -> Form | None:
    required, accepted, upstream_at, *_ = signature
    if upstream_at is None or upstream_at == 0:
        if (required == 1 and (accepted < _MANY or upstream_at == 0)) or (required, accepted) == (
            0,
            1,
        ):
            return "structured"
        return "flat" if upstream_at is None and required <= outputs <= accepted else None
    if upstream_at == _MANY:
        return "arguments" if required <= arguments <= accepted else None
    return "arguments" if arguments == upstream_at and required <= arguments + 1 else None


Convention = tuple[Form | None, bool | None, bool]
"""The form of a grad_fn (None if it fits none), and `variables` and `takes_needs_input_grad` of its Signature."""


def convention_of(grad_fn: Callable[..., Any], arguments: int, outputs: int) -> Convention:
    """Return the convention of grad_fn; a plain function is read once for all its closures."""
    # decorated: has other code
    if not isinstance(grad_fn, FunctionType) or hasattr(grad_fn, "__wrapped__"):
        return _read_convention(grad_fn, arguments, outputs)
    code = grad_fn.__code__
    try:
        keyword_defaults = tuple(grad_fn.__kwdefaults__ or ())
        defaults = len(grad_fn.__defaults__ or ())
    except AttributeError:
        # torch.compile hides them: assume that all but the upstream gradients have one
        keyword_defaults = code.co_varnames
        positional = code.co_varnames[: code.co_argcount]
        own = [name for name in positional if name not in _PASSED_BY_NAME]
        obvious = "upstream" in own or len(own) <= 1
        named_last = len(positional) - len(own) if list(positional[: len(own)]) == own else 0
        defaults = named_last if obvious else len(grad_fn.__defaults__ or ())
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


class PlainForm:
    """How to call the rules of one code for one output that have as few default values: with
    upstream, and with the arguments or without them.
    """

    __slots__ = ("code", "is_plain", "takes_arguments")

    def __init__(self, code: CodeType, convention: Convention) -> None:
        form, variables, takes_needs_input_grad = convention
        self.code = code
        self.is_plain = form is not None and variables is None and not takes_needs_input_grad
        self.takes_arguments = form == "arguments"
        """True for ``grad(*args, upstream=...)``, False for ``grad(upstream)``"""


def _read_convention(grad_fn: Callable[..., Any], arguments: int, outputs: int) -> Convention:
    signature = _read_signature(grad_fn)
    return (
        form_of(signature, arguments, outputs),
        signature.variables,
        signature.takes_needs_input_grad,
    )
