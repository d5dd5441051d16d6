"""NumPy: the call that nearly everybody makes: arrays or numbers in, one out, and a function of upstream as its rule.

Such a call costs the Python functions that it runs, so it is one. If something is being differentiated, or f returns
what is not plain, it goes on as any other call, with what f has returned: f runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from cgshim.backend import plain_form, runs_op
from cgshim_numpy._arrays import Array
from cgshim_numpy._outputs import output_under_autograd
from cgshim_numpy._private import ArrayBox, trace_stack

if TYPE_CHECKING:
    from cgshim.backend import Call

_KINDS = frozenset("biufc")
_NUMBERS = frozenset(np.dtype(code).type for code in "?bhilqBHILQefdFD")
_TENSORS = _NUMBERS | {np.ndarray, ArrayBox}


def plan(call: Call, types: Sequence[type]) -> Callable[..., Any] | None:
    """Return what runs the calls of an op with arguments of these types; None if none of them is plain."""
    if call.takes_needed or not _TENSORS.issuperset(types):
        return None
    holds_boxes, plain = ArrayBox in types, PlainRules(call)
    arguments = call.arguments

    @runs_op
    def output_of(f: Callable[..., Any], inputs: tuple[Array, ...], options: Mapping[str, Any]) -> Any:
        """Return the output of f; NotImplemented if an array among the inputs holds no numbers."""
        for x in inputs:
            if type(x) is np.ndarray and x.dtype.kind not in _KINDS:
                return NotImplemented
        if holds_boxes or trace_stack.top >= 0:
            this = call if f is call.f and not options else call.with_f(f, options)
            return output_under_autograd(this, inputs, plain)
        result = f(*inputs, **options) if options else f(*inputs)
        if type(result) is tuple and len(result) == 2:
            output, grad_fn = result
            is_array = type(output) is np.ndarray and output.dtype.kind in _KINDS
            if (is_array or type(output) in _NUMBERS) and plain.include(grad_fn):
                return output
        assert arguments is not None  # an op in f finds its backend by this variable
        return call.with_f(f, options).read_output(result, inputs)

    return output_of


class PlainRules:
    """The rules of an op that are functions of upstream and nothing else. Most ops have one code for all of them."""

    __slots__ = ("_arguments", "_code")

    _code: CodeType | None

    def __init__(self, call: Call) -> None:
        self._arguments = len(call.arguments.names)
        self._code = None

    def include(self, grad_fn: Any) -> bool:
        """Return True if a rule is plain."""
        if type(grad_fn) is not FunctionType or hasattr(grad_fn, "__wrapped__"):
            return False
        code = grad_fn.__code__
        if code is self._code:
            return True
        takes_one = code.co_argcount == 1 and not code.co_kwonlyargcount
        if takes_one and not code.co_flags & _TAKES_ANY and plain_form(grad_fn, self._arguments).is_plain:
            self._code = code
        return code is self._code


_TAKES_ANY = 0x04 | 0x08
"""the flags of code with *args or **kwargs"""
