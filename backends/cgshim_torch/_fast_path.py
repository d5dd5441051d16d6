"""Fast path: calls whose arguments and outputs are plain tensors, and whose rule is a plain function.

Read this first: it is what a call of a simple op runs. `PlainCalls` runs f on detached inputs; if the
rule closes over tensors and numbers only, `Plain` attaches it. Every other call continues in
`_function.attach_to` with what f has returned, so f runs once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch

from cgshim.backend import Call, RuleSignature, Tensor, partition
from cgshim_torch._export import is_exporting
from cgshim_torch._function import CustomGradient, Run, attach_to, versions_of
from cgshim_torch._private import is_any_autocast_enabled, is_transformed


class PlainCalls:
    """Runs the calls of an op whose arguments have the same types."""

    __slots__ = ("call", "code", "count", "signature")

    def __init__(self, call: Call) -> None:
        self.call = call
        # of the last rule, because most ops have one
        self.code: CodeType | None = None
        self.count: int | None = None
        self.signature: RuleSignature | None = None

    def __call__(self, f: Any, args: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
        call = self.call.with_f(f, options)
        if not torch.is_grad_enabled() or is_transformed() or is_exporting():
            return call.backend.custom_gradient(call, args)
        inputs, differentiated = [], False
        for x in args:
            if x.requires_grad:
                x, differentiated = x.detach(), True
            inputs.append(x)
        versions = versions_of(inputs)
        try:
            result = call.run(inputs)
        finally:
            if not torch.is_grad_enabled():  # as after Function.forward
                torch.set_grad_enabled(True)
        if versions != versions_of(inputs):
            call.refuse_writing()
        signature = self.signature_of(result)
        if signature is None or not differentiated:
            return attach_to(call, args, inputs, result)
        return self.attach(call, signature, args, inputs, *result)

    def attach(
        self,
        call: Call,
        signature: RuleSignature,
        args: Sequence[Tensor],
        inputs: Sequence[Tensor],
        output: Any,
        grad_fn: FunctionType,
    ) -> Any:
        """Return the output of f with the gradient of a plain rule."""
        is_one = self.count is None
        own = dict(zip(map(id, inputs), args, strict=True))
        outputs = (output,) if is_one else output
        if not own.keys().isdisjoint(map(id, outputs)) or len(set(map(id, outputs))) < len(outputs):
            return attach_to(call, args, inputs, (output, grad_fn))
        run = Run(call, signature, args)
        residuals = run.convert(grad_fn)
        results = tuple([y.detach() for y in outputs])
        own.update(zip(map(id, outputs), results, strict=True))
        saved = run.saved_of(own, residuals, args, ())
        return Plain.apply((run, saved, results[0] if is_one else results), *args)

    def signature_of(self, result: Any) -> RuleSignature | None:
        """Return how a rule is called if it and the output are plain, and f captured nothing."""
        if type(result) is not tuple or len(result) != 2 or type(result[1]) is not FunctionType:
            return None
        output, grad_fn = result
        is_one = type(output) is torch.Tensor
        if not is_one and (type(output) is not tuple or not output):
            return None
        outputs: Any = (output,) if is_one else output
        for y in outputs:
            if type(y) is not torch.Tensor or y.requires_grad or y._is_view():
                return None
        count = None if is_one else len(output)
        if grad_fn.__code__ is not self.code or count != self.count:
            _, spec = partition(self.call.name, self.call.backend, output)
            signature = self.call.signature_of(grad_fn, spec)
            self.signature = signature if signature.is_plain else None
            self.code, self.count = grad_fn.__code__, count
        return self.signature


class Plain(CustomGradient):
    """Returns a plain output of a run of f; its backward pass is the rule."""

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        run = ctx.run
        if torch.is_grad_enabled() or is_any_autocast_enabled() or run.autocast or run.refuse:
            return CustomGradient.backward(ctx, *upstreams)
        saved = ctx.saved_tensors if ctx.saves else ()
        gradients, _ = run.signature.gradients(
            run.rebuild(saved), saved[run.count :], upstreams, run.shapes, run.dtypes
        )
        return None, *gradients
