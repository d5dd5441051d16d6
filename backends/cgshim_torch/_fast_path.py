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

from cgshim.backend import Call, RuleSignature, Tensor, is_in_rule, partition
from cgshim_torch._function import CustomGradient, Run, attach_to
from cgshim_torch._private import is_transformed


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
        if is_transformed() or torch.compiler.is_exporting() or torch.jit.is_tracing():
            return call.backend.custom_gradient(call, args)
        if not torch.is_grad_enabled():
            return call.backend.custom_gradient(call, args)
        inputs = [x.detach() if x.requires_grad else x for x in args]
        versions = [x._version for x in inputs]
        try:
            result = call.run(inputs)
        finally:
            torch.set_grad_enabled(True)  # whatever f has set, as after Function.forward
        if versions != [x._version for x in inputs]:
            call.refuse_writing()
        signature = (
            self.signature_of(*result) if type(result) is tuple and len(result) == 2 else None
        )
        if signature is None:
            return attach_to(call, args, inputs, result)
        return self.attach(call, signature, args, inputs, result)

    def attach(
        self,
        call: Call,
        signature: RuleSignature,
        args: Sequence[Tensor],
        inputs: Sequence[Tensor],
        result: Any,
    ) -> Any:
        """Return the output of f with the gradient of a plain rule."""
        output, grad_fn = result
        outputs = (output,) if self.count is None else output
        own = dict(zip(map(id, inputs), args, strict=True))
        if not own.keys().isdisjoint(map(id, outputs)):
            return attach_to(call, args, inputs, result)
        if not any([x.requires_grad for x in args]):
            return output
        run = Run(call, signature, args)
        residuals = run.convert(grad_fn)
        results = tuple([y.detach() for y in outputs])
        for y, result in zip(outputs, results, strict=True):
            own.setdefault(id(y), result)
        saved = run.saved_of(own, residuals, args, ())
        attached = Plain.apply((run, saved, results), *args)
        return attached[0] if self.count is None else attached

    def signature_of(self, output: Any, grad_fn: Any) -> RuleSignature | None:
        """Return how a rule is called if it and the output are plain, and f captured nothing."""
        if type(grad_fn) is not FunctionType:
            return None
        is_one = type(output) is torch.Tensor
        if not is_one and (type(output) is not tuple or not output):
            return None
        for y in (output,) if is_one else output:
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
        run, saved = ctx.run, ctx.saved_tensors
        if torch.is_grad_enabled() or run.autocast is not None or run.refuse is not None:
            return None, *run.gradients(saved, upstreams, ctx.needs_input_grad[1:])
        gradients, _ = run.signature.gradients(
            run.rebuild(saved), saved[run.count :], upstreams, run.shapes, run.dtypes
        )
        return None, *gradients
