"""Fast path: calls with plain tensors as arguments and outputs, and a plain function as rule.

Read this first: a call of a simple op runs it. `PlainCalls` runs f on detached inputs, and
attaches a rule that closes over only tensors and numbers. Every other call continues in
`_function.attach_to` with f's result, so f runs once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch

from cgshim._pytree import partition
from cgshim._rule import RuleSignature
from cgshim.backend import Call, Tensor
from cgshim_torch._export import is_exporting
from cgshim_torch._function import CustomGradient, Run, attach_to, run_checked
from cgshim_torch._private import is_transformed


class PlainCalls:
    """Run the calls of an op with tensors as arguments, whose types are the same."""

    __slots__ = ("call", "code", "output_count", "signature")

    def __init__(self, call: Call) -> None:
        self.call = call
        # of the last grad_fn: in most ops all have the same code
        self.code: CodeType | None = None
        self.output_count: int | None = None  # None for an output that is no tuple
        self.signature: RuleSignature | None = None

    def __call__(self, f: Any, args: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
        call = self.call.with_f(f, options)
        if is_transformed() or is_exporting():
            return call.backend.custom_gradient(call, args)
        recording = torch.is_grad_enabled()
        detached, attached, is_constant = [], {}, True
        for x in args:
            given = x
            if recording and x.requires_grad:
                given, is_constant = x.detach(), False
            detached.append(given)
            attached[id(given)] = x
        result = run_checked(call, detached)
        signature = self.signature_of(result, attached)
        if signature is None:
            return attach_to(call, args, detached, result)
        output, grad_fn = result
        if is_constant:
            return output
        # f may keep its output, and apply attaches a result in place
        if self.output_count is None:
            results = attached[id(output)] = output.detach()
        else:
            results = tuple([y.detach() for y in output])
            attached.update(zip(map(id, output), results, strict=True))
        run = Run(call, signature, args)
        saved = run.convert_rule(grad_fn, attached, args)
        return CustomGradient.apply((run, saved, results), *args)

    def signature_of(self, result: Any, attached: Mapping[int, Tensor]) -> RuleSignature | None:
        """Return how to call a rule if it and the output are plain.

        None if f captured something or returned an argument.
        """
        if type(result) is not tuple or len(result) != 2 or type(result[1]) is not FunctionType:
            return None
        output, grad_fn = result
        if type(output) is torch.Tensor:
            outputs, count = result[:1], None
        elif type(output) is tuple and len(set(map(id, output))) == len(output) > 0:
            outputs, count = output, len(output)
        else:
            return None
        for y in outputs:
            if type(y) is not torch.Tensor or y.requires_grad or y._is_view() or id(y) in attached:
                return None
        if grad_fn.__code__ is not self.code or count != self.output_count:
            _, spec = partition(self.call.name, self.call.backend, output)
            signature = self.call.signature_of(grad_fn, spec)
            self.signature = signature if signature.is_plain else None
            self.code, self.output_count = grad_fn.__code__, count
        return self.signature
