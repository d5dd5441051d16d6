"""The transformations of torch.func, and dual numbers.

f runs on the inputs unchanged, so its residuals are functions of them at every level. The residuals
are arguments of the Function, because each level sees other tensors than f did.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from cgshim.backend import (
    Call,
    Mapped,
    Rule,
    Tensor,
    WithBatches,
    closure_convert,
    is_differentiable,
    is_in_rule,
    refuse_captured_tangent,
    subvals,
    tensors_inside,
)
from cgshim_torch._captured import captured_by
from cgshim_torch._function import versions_of
from cgshim_torch._private import (
    batches_of,
    forward_ad,
    functorch,
    is_batched,
    is_dead,
    is_wrapped,
    primal_of,
    unwrapped,
)
from cgshim_torch._refusing import Refusal, refusal_for, refusing
from cgshim_torch._vjp import transposed, values_of


def transformed(call: Call, inputs: Sequence[Tensor]) -> Any:
    """Run f, and return its output with the gradient of its rule at every level."""
    if isinstance(call.f, WithBatches):
        return call.f.mapped(call, inputs)
    if isinstance(call.f, Mapped) and is_batched(max(inputs, key=functorch.maybe_get_level)):
        return tuple(OverBatch.apply(call.f, *inputs))
    values = [*map(values_of, inputs)]  # a batch has no version counter of its own
    versions = versions_of(values)
    result, refusals = _run_in_forward_mode(call, inputs)
    if versions != versions_of(values):
        call.refuse_writing()
    outputs, rule = call.read(result, inputs)
    variables = () if is_in_rule() else _variables_of(call, rule, outputs, inputs)
    run = TransformedRun(call, rule, inputs, variables, outputs)
    run.host_refusals = refusals
    passed = [*inputs, *variables, *run.residuals, *with_batches(outputs, [*inputs, *variables])]
    return rule.output.combine(Transformed.apply(run, *passed))


def _variables_of(
    call: Call, rule: Rule, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return the declared variables; other captured tensors are errors."""
    captured = [
        t for t in captured_by(call, outputs, inputs) if not any(t is v for v in call.variables)
    ]
    if captured:
        call.refuse_undeclared(captured)
    if call.variables:
        call.captured_variables((), inputs)
        call.require_variables(rule, call.variables)
    return call.variables


def with_batches(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs with each batch that a leaf has.

    Otherwise torch would use the upstream gradient of an unbatched output, a sum over the batch,
    for each element.
    """
    wide = list(outputs)
    for at, y in enumerate(outputs):
        for x in leaves if is_differentiable(y.dtype) else ():
            if batches_of(x) - batches_of(wide[at]):
                zero = torch.zeros_like(x.detach().flatten()[:0], dtype=y.dtype).sum()
                wide[at] = wide[at] + zero.expand(y.shape)
    return wide


# --- Host functions in forward mode ---------------------------------------------------------------
#
# torch computes tangents while f runs, and a host function has none. Its results are constants
# in f, because the op's tangent is the rule's; only a derivative of the rule needs theirs.


class _ForwardMode(threading.local):
    level: int | None = None
    """the level of torch.func at which f runs; None outside forward mode"""
    refusals: dict[int, Refusal]
    """raise a host function's error, by the level of its missing tangent"""


_forward_mode = _ForwardMode()


def _run_in_forward_mode(call: Call, inputs: Sequence[Tensor]) -> tuple[Any, dict[int, Refusal]]:
    """Run f; return its result, and the errors of its host functions."""
    state, refusals = _forward_mode, dict[int, Refusal]()
    outer = state.level, getattr(state, "refusals", refusals)
    state.level = _level() if forward_ad._current_level >= 0 else None
    state.refusals = refusals
    try:
        return call.run(inputs), refusals
    finally:
        state.level, state.refusals = outer


def take_as_constant(refuse: Refusal) -> None:
    """Make the result of a host function a constant in f; raise an error elsewhere."""
    if _forward_mode.level is None or _level() > _forward_mode.level:
        refuse()
    _forward_mode.refusals[_level()] = refuse


def _level() -> int:
    return functorch.maybe_current_level() or 0


# --- The Function ---------------------------------------------------------------------------------


class TransformedRun:
    """One run of f: its converted rule, and the Function's tensors that fill its slots."""

    host_refusals: dict[int, Refusal]
    has_rule: bool
    """False if the rule cannot run in a vmap, because an object has its residuals"""

    def __init__(
        self, call: Call, rule: Rule, inputs: Sequence[Tensor], variables: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:  # fmt: skip
        self.call, self.rule = call, rule
        held, self.filled, opaque = closure_convert(rule.grad_fn, call.backend)
        if any(map(is_dead, held)):
            call.refuse("a pullback that grad_fn keeps must be one of op_vjp under torch.func",
                        "one of torch.func.vjp", "let f or grad_fn call op_vjp")  # fmt: skip
        self.refuse = refusal_for(call, opaque, is_wrapped)
        inside = tensors_inside(opaque, call.backend.is_tensor) if opaque else ()
        self.has_rule = not any(map(batches_of, inside))
        self.inputs, self.leaves = len(inputs), len(inputs) + len(variables)
        self.outputs = len(outputs)
        known = set(map(id, (*inputs, *variables, *outputs)))
        self.captured = self._captured_in_forward_mode()
        # a captured tensor is passed only for its tangent
        every = {id(t): t for t in (*held, *self.captured)}
        self.residuals = [t for t in every.values() if id(t) not in known]
        passed = [*inputs, *variables, *self.residuals, *outputs]
        place = {id(t): at for at, t in reversed(list(enumerate(passed)))}
        self.places = [place[id(t)] for t in held]
        self.places_of_captured = [place[id(t)] for t in self.captured]

    def _captured_in_forward_mode(self) -> list[Tensor]:
        """Return the tensors in f's closure and options, which must not have a tangent."""
        call = self.call
        if forward_ad._current_level < 0 or is_in_rule():
            return []
        found = tensors_inside([call.f, *call.options.values()], call.backend.is_tensor)
        declared = set(map(id, call.variables))
        return [t for t in found if id(t) not in declared and is_differentiable(t.dtype)]

    def rule_around(self, tensors: Sequence[Tensor]) -> Rule:
        """Return the rule with these inputs, residuals and outputs in its closure."""
        if not self.has_rule and self.refuse is not None:
            self.refuse()
        return self.rule.with_grad_fn(self.filled([tensors[at] for at in self.places]))

    def gradients(
        self, tensors: Sequence[Tensor], upstreams: Sequence[Tensor], needed: Any = None
    ) -> list[Tensor | None]:
        inputs, variables = tensors[: self.inputs], tensors[self.inputs : self.leaves]
        gradients, of_variables = self.rule_around(tensors)(inputs, upstreams, variables, needed)
        return self.checked_once([*gradients, *of_variables], [*tensors, *upstreams])

    def require_residuals(self, levels: int) -> None:
        """Raise an error if a residual lacks a host function's tangent at more levels."""
        if len(self.host_refusals) > levels and any(
            is_differentiable(t.dtype) for t in self.residuals
        ):
            next(iter(self.host_refusals.values()))()

    def checked_once(
        self, results: list[Tensor | None], sources: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradients or tangents, with an error for an unsupported derivative."""
        return results if self.refuse is None else refusing(self.refuse, results, sources)

    def tangents(
        self, tensors: Sequence[Tensor], tangents: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return the outputs' tangents by jvp_fn, or by the transpose of the rule."""
        for t, at in zip(self.captured, self.places_of_captured, strict=True):
            if tangents[at] is not None:
                self.call.refuse_captured(t)
        outputs, rule = tensors[len(tensors) - self.outputs :], self.rule_around(tensors)
        if any(t is not None for t in tangents[self.inputs : self.leaves]) and rule.jvp_fn:
            refuse_captured_tangent(self.call.name)
        if rule.jvp_fn is not None:
            pushed = rule.tangents(
                tangents[: self.inputs], outputs, lambda at: torch.zeros_like(tensors[at])
            )
            return self.checked_once(pushed, [*tensors, *[t for t in tangents if t is not None]])
        if not self.call.forward_mode:
            self.call.refuse_forward_mode("jvp, jacfwd or a dual number")
        moving = [at for at, t in enumerate(tangents[: self.leaves]) if t is not None]
        ends = [at for at, y in enumerate(outputs) if is_differentiable(y.dtype)]
        if not moving:
            return [None] * self.outputs

        def gradients(*upstreams: Tensor) -> list[Tensor]:
            zeros = [torch.zeros_like(y) for y in outputs]
            every = self.gradients(tensors, subvals(zeros, ends, upstreams))
            return [
                torch.zeros_like(tangents[at]) if every[at] is None else every[at] for at in moving
            ]

        result = transposed(
            gradients, [outputs[at] for at in ends], [tangents[at] for at in moving], self.call.refuse_nonlinear
        )  # fmt: skip
        return subvals([None] * self.outputs, ends, result)


class Transformed(torch.autograd.Function):  # type: ignore[misc]
    """Return the outputs of f, with its rule for each mode, at each level."""

    generate_vmap_rule = True

    @staticmethod
    def forward(run: TransformedRun, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([y.detach() for y in tensors[len(tensors) - run.outputs :]])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.run, *tensors = inputs
        saved = [*tensors[: len(tensors) - len(output)], *output]
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        # a pullback may be called after its level has ended
        tensors, run = [unwrapped(t) for t in ctx.saved_tensors], ctx.run
        if all(u is None for u in upstreams):  # an op around this one uses none of its outputs
            return (None,) * len(ctx.needs_input_grad)
        run.require_residuals(0)
        outputs = tensors[len(tensors) - run.outputs :]
        full = [
            torch.zeros_like(y) if u is None else u for u, y in zip(upstreams, outputs, strict=True)
        ]
        gradients = run.gradients(tensors, full, ctx.needs_input_grad[1 : 1 + run.inputs])
        return None, *gradients, *[None] * (len(tensors) - run.leaves)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        # torch computes no tangents here: outer levels need theirs
        ctx.run.require_residuals(1)
        with forward_ad._set_fwd_grad_enabled(True):
            primals = list(map(primal_of, ctx.saved_tensors))
            pushed = ctx.run.tangents(primals, tangents)
            outputs = primals[len(primals) - len(pushed) :]
            given = set(map(id, tangents))  # results are writable, so they alias no tangent
            return tuple([
                (torch.zeros_like(y) if is_differentiable(y.dtype) else None) if t is None
                else t.clone() if id(t) in given else t
                for t, y in zip(pushed, outputs, strict=True)
            ])  # fmt: skip


# --- Batching rules -------------------------------------------------------------------------------


def mapped(function: Mapped, inputs: Sequence[Tensor], /) -> list[Tensor]:
    return list(OverBatch.apply(function, *[x.detach() for x in inputs]))


class OverBatch(torch.autograd.Function):  # type: ignore[misc]
    """Run a function for one element, or by the author's batching rule for a vmap."""

    @staticmethod
    def forward(function: Mapped, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(function.run(None, (), *inputs)[0])

    @staticmethod
    def setup_context(*_: Any) -> None:
        """Save nothing: the inputs are constants."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], function: Mapped, *inputs: Tensor) -> Any:
        size, dims = info.batch_size, in_dims[1:]
        batched = [dim is not None or at in function.in_batch for at, dim in enumerate(dims)]
        moved = [
            x if not has else x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim, has in zip(inputs, dims, batched, strict=True)
        ]
        outputs, have = function.run(size, batched, *moved)
        return tuple(outputs), tuple([0 if has else None for has in have])
