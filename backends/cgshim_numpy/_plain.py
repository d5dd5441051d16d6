"""NumPy: the call that nearly everybody makes: arrays or numbers in, one out, and a function of upstream as its rule.

Such a call costs the Python functions that it runs, so it is one. If something is being differentiated, or f returns
what is not plain, it goes on as any other call, with what f has returned: f runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import numpy as np

from cgshim.backend import Call, runs_op
from cgshim_numpy._arrays import Array, is_tensor
from cgshim_numpy._private import ArrayBox, trace_stack
from cgshim_numpy._run import PlainRules, output_under_autograd

_KINDS = frozenset("biufc")
_NUMBERS = frozenset(np.dtype(code).type for code in "?bhilqBHILQefdFD")
_TENSORS = _NUMBERS | {np.ndarray, ArrayBox}


def plan(call: Call, types: Sequence[type]) -> Callable[..., Any] | None:
    """Return what runs the calls of an op with arguments of these types; None if none of them is plain."""
    if call.takes_needed or not _TENSORS.issuperset(types):
        return None
    holds_boxes, arguments, rules = ArrayBox in types, call.arguments, PlainRules()

    @runs_op
    def output_of(f: Callable[..., Any], inputs: tuple[Array, ...], options: Mapping[str, Any]) -> Any:
        """Return the output of f; NotImplemented if somebody differentiates, and an array holds no numbers."""
        if holds_boxes or trace_stack.top >= 0:
            for x in inputs:
                if type(x) is np.ndarray and x.dtype.kind not in _KINDS:
                    return NotImplemented
            return output_under_autograd(call.with_f(f, options), inputs, rules)
        result = f(*inputs, **options) if options else f(*inputs)
        if type(result) is tuple and len(result) == 2:
            output, grad_fn = result
            if (type(output) is np.ndarray and output.dtype.kind in _KINDS) or type(output) in _NUMBERS:
                is_known = type(grad_fn) is FunctionType and grad_fn.__code__ is rules.code  # as nearly all are
                if is_known or rules.include(grad_fn, arguments):
                    return output
        return call.with_f(f, options).read_output(result, [*filter(is_tensor, inputs)])

    return output_of
