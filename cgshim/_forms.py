"""Find the form of a grad_fn (how to call it) from its signature."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any, Literal

from cgshim._foreign import constant_when_traced

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
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _form_of(
    signature: inspect.Signature, keywords: dict[str, Any], arguments: int, outputs: int
) -> Form | None:
    """Return the form of a rule with this signature and these keywords; None if it fits none."""
    parameters = signature.parameters.values()
    if any(p.name in keywords and p.kind is p.POSITIONAL_ONLY for p in parameters):
        return None  # a keyword upstream would go to **kwargs
    own = [p for p in parameters if p.name not in keywords]
    positional = [p for p in own if p.kind in _BY_POSITION]
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
