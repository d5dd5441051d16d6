"""NumPy: the call that nearly everybody makes: arrays or numbers in, one out, and a function of
upstream as its rule.

Such a call costs the Python functions that it runs, so it is one. If something is being
differentiated, or f returns what is not plain, it goes on as any other call, with what f has
returned: f runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from sys import modules
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import numpy as np
from numpy import ndarray

from cgshim.backend import (
    ONE_TENSOR,
    Call,
    PlainForm,
    has_no_derivative,
    output_without_rule,
    run_on,
)
from cgshim_numpy._arrays import Array, is_tensor
from cgshim_numpy._autograd import derivatives, is_differentiating

_KINDS = frozenset("biufc")
_NUMBERS = frozenset(np.dtype(code).type for code in "?bhilqBHILQefdFD")
_TENSORS = _NUMBERS | {ndarray}

# the classes of what a plain function of floats returns
PLAIN = frozenset([ndarray, np.float64, np.float32, np.float16])


class PlainRules:
    """The rules of an op that are functions of upstream, or of tangents, and nothing else. Most ops
    have one code for all of them.
    """

    code: CodeType | None = None

    def __init__(self, call: Call, takes: int) -> None:
        self.convention, self.takes = call.convention, takes

    def include(self, grad_fn: Any, arguments: Any) -> bool:
        """Return True if a rule is plain."""
        if type(grad_fn) is not FunctionType:
            return False
        code = grad_fn.__code__
        if code is self.code:
            return True
        takes_no_more = not (code.co_kwonlyargcount or code.co_flags & 0x0C)
        if (
            (code.co_argcount == self.takes and takes_no_more)
            and not hasattr(grad_fn, "__wrapped__")
            and PlainForm(code, self.convention(arguments, grad_fn, ONE_TENSOR)).is_plain
        ):
            self.code = code
        return code is self.code


# autograd's count of the derivatives being taken, of which -1 is its word for none, once a call
# finds it imported
traces: Any = SimpleNamespace(top=0)


def _takes_derivative() -> bool:
    """Return True if autograd, which is imported, takes a derivative."""
    global traces
    traces = getattr(modules["autograd.tracer"], "trace_stack", traces)
    return is_differentiating()


def plan(call: Call, types: Sequence[type]) -> Callable[..., Any] | None:
    """Return what runs the calls of an op with arguments of these types; None if none of them is
    plain.
    """
    rest = {*types} - _TENSORS
    if call.takes_needs_input_grad or not rest <= {
        getattr(modules.get("autograd.numpy.numpy_boxes"), "ArrayBox", None)
    }:
        return None
    holds_boxes, arguments, is_jvp = bool(rest), call.arguments, call.kind_of_rule.is_transpose
    rules = PlainRules(call, len(arguments.specs) if is_jvp else 1)
    differentiated = None if is_jvp else rules
    without_rule = has_no_derivative(call.f)

    def output_of(
        f: Callable[..., Any], inputs: tuple[Array, ...], options: Mapping[str, Any]
    ) -> Any:
        """Return the output of f; NotImplemented if somebody differentiates, and an array holds no
        numbers.
        """
        if holds_boxes or (
            traces.top >= 0 and "autograd.tracer" in modules and _takes_derivative()
        ):
            for x in inputs:
                if type(x) is ndarray and x.dtype.kind not in _KINDS:
                    return NotImplemented
            return derivatives().output_under_autograd(
                call.with_f(f, options), inputs, differentiated
            )
        if without_rule:
            return output_without_rule(call.with_f(f, options), inputs)
        if arguments.are_tensors:
            result = run_on(call.backend, inputs, False, f, *inputs, **options)
        else:
            result = call.with_f(f, options).run(inputs)
        if type(result) is tuple and len(result) == 2:
            output, grad_fn = result
            if (type(output) is ndarray and output.dtype.kind in _KINDS) or type(
                output
            ) in _NUMBERS:
                # as nearly all are
                is_known = type(grad_fn) is FunctionType and grad_fn.__code__ is rules.code
                if is_known or rules.include(grad_fn, arguments):
                    return output
        return call.with_f(f, options).read_output(result, [*filter(is_tensor, inputs)])

    return output_of
