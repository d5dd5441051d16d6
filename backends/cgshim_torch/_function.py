"""Eager mode: run f on detached inputs, then attach its rule to the outputs by one Function.

The rule's residuals are in `save_for_backward`: autograd frees them with the graph, notices changes
in place, and shows them to checkpoints and to hooks on saved tensors. A first derivative calls the
rule on them. A higher derivative also needs each residual as a function of the inputs: an input or
an output is one already, and for the others f runs again (`Recomputed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from cgshim._rule import RuleSignature
from cgshim.backend import (
    Call,
    Rebuild,
    Rule,
    Tensor,
    closure_convert,
    is_differentiable,
    is_in_rule,
    subvals,
)
from cgshim_torch._captured import captured_by, reached
from cgshim_torch._cut import Cut
from cgshim_torch._private import forward_ad, is_any_autocast_enabled
from cgshim_torch._refusing import Refusal, refusal_for, refusing
from cgshim_torch._tensors import alias
from cgshim_torch._vjp import differ, ramp


def attach(call: Call, inputs: Sequence[Tensor]) -> Any:
    """Run f, and return its output with the gradient of its rule."""
    recording = torch.is_grad_enabled()
    if call.takes_needs_input_grad:
        call = call.with_needs_input_grad([recording and x.requires_grad for x in inputs])
    detached = [x.detach() for x in inputs] if recording else inputs
    return attach_to(call, inputs, detached, run_checked(call, detached))


def run_checked(call: Call, inputs: Sequence[Tensor]) -> Any:
    """Run f; raise an error if it writes to its inputs, and undo a change of the grad mode."""
    versions, recording = versions_of(inputs), torch.is_grad_enabled()
    try:
        result = call.run_eagerly(inputs)
    finally:
        if torch.is_grad_enabled() is not recording:  # as after Function.forward
            torch.set_grad_enabled(recording)
    if versions != versions_of(inputs):
        call.refuse_writing()
    return result


def attach_to(call: Call, inputs: Sequence[Tensor], detached: Sequence[Tensor], result: Any) -> Any:
    """Return the output of a run of f on the detached inputs, with the gradient of its rule."""
    outputs, rule = call.read(result, detached)
    variables = _variables_of(call, rule, outputs, inputs) if torch.is_grad_enabled() else ()
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, *variables))):
        return rule.output.combine(
            [y.detach() if y.requires_grad or any(y is x for x in inputs) else y for y in outputs]
        )
    run = Run(call, rule.signature, inputs, rule.needed)
    attached, results = _attached_by_id(outputs, inputs, detached)
    attached.update((id(x), x) for x in variables)
    saved = run.convert_rule(rule.grad_fn, attached, inputs, variables)
    return rule.output.combine(CustomGradient.apply((run, saved, results), *inputs, *variables))


def _variables_of(
    call: Call, rule: Rule, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return the variables of the call: declared, or the only tensor that f captured."""
    if is_in_rule() and not call.variables:
        return ()
    captured = captured_by(call, outputs) if any(y.requires_grad for y in outputs) else ()
    if not (captured or call.variables):
        return ()
    variables = call.captured_variables(captured, inputs)
    call.require_variables(rule, variables)
    return variables


def _attached_by_id(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], detached: Sequence[Tensor]
) -> tuple[dict[int, Tensor], tuple[Tensor, ...]]:
    """Return f's inputs and outputs in attached form by id, and the results of the Function.

    The attached form of an input is the op's argument. `CustomGradient.apply` attaches the results.
    """
    arguments = dict(zip(map(id, detached), inputs, strict=True))
    attached, results = dict(arguments), []
    for y in outputs:
        result = arguments.get(id(y))  # an output may be an argument
        if result is None and id(y) in attached:
            result = y.detach().clone()  # each copy of an output may be written to
        elif result is None:
            # a view stays a view: autograd forbids writing to a view of an input
            result = y if y._is_view() and not y.requires_grad else y.detach()
            attached[id(y)] = result
        results.append(result)
    return attached, tuple(results)


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the version counters of tensors; inference tensors have none."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:
        return [0 if t.is_inference() else t._version for t in tensors]


class CustomGradient(torch.autograd.Function):  # type: ignore[misc]
    """Return the outputs of f; the backward pass is the rule."""

    @staticmethod
    def forward(ctx: Any, of_run: tuple[Run, Sequence[Tensor], Any], *primals: Tensor) -> Any:
        ctx.run, saved, results = of_run
        ctx.save_for_backward(*saved)
        return results

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        run = ctx.run
        # torch raises in a second backward pass that reads saved_tensors, even if there are none
        saved = ctx.saved_tensors if run.saves else ()
        if run.is_special or torch.is_grad_enabled() or is_any_autocast_enabled():
            return None, *run.gradients(saved, upstreams, ctx.needs_input_grad[1:])
        gradients, _ = run.signature.gradients(
            run.rebuild(saved), saved[run.residual_count :], upstreams, run.shapes, run.dtypes
        )
        return None, *gradients


class Run:
    """One run of f, for the backward pass. It holds no residual.

    The Function saves the residuals, then the variables, and the inputs if the rule or a second run
    needs them. It saves an input or an output in its attached form.
    """

    rebuild: Rebuild
    refuse: Refusal | None = None
    """raises the error for a derivative of the gradient"""
    autocast: tuple[str, torch.dtype] | None = None
    variable_count: int = 0
    made: Sequence[int] = ()
    """the indices of the residuals that f made: no inputs, outputs or variables"""
    order: Sequence[int] = ()
    """which saved tensor each of them is, if one stands for several; else empty"""
    is_special: Any = False
    """true if a first derivative needs `gradients`, and not only the rule"""

    def __init__(
        self,
        call: Call,
        signature: RuleSignature,
        inputs: Sequence[Tensor],
        needed: Sequence[bool] | None = None,
    ) -> None:
        self.call, self.signature, self.needed = call, signature, needed
        self.shapes, self.dtypes = [x.shape for x in inputs], [x.dtype for x in inputs]
        if is_any_autocast_enabled() and inputs:
            kind = inputs[0].device.type
            if torch.is_autocast_enabled(kind):
                self.autocast = kind, torch.get_autocast_dtype(kind)

    def convert_rule(
        self,
        grad_fn: Any,
        attached: dict[int, Tensor],
        inputs: Sequence[Tensor],
        variables: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """Convert the rule, and return the tensors that the backward pass needs.

        attached has the attached form of f's inputs, outputs and variables by id.
        """
        call = self.call
        saved, self.rebuild, opaque = closure_convert(grad_fn, call.backend, call.constants)
        self.residual_count = len(saved)
        made: list[int] = []
        for at, t in enumerate(saved):
            known = attached.get(id(t))
            if known is not None:
                saved[at] = known
            elif is_differentiable(t.dtype):
                made.append(at)
        self.made = made
        if variables:
            self.variable_count = len(variables)
            for at in self.made:  # else the graph of the variables in f stays alive
                if saved[at].requires_grad and not _leaves_besides([saved[at]], variables):
                    saved[at] = saved[at].detach()
            saved += variables
        if opaque or call.once_differentiable:
            is_lost = lambda t: not (t.requires_grad and t.is_leaf)
            self.refuse = refusal_for(call, opaque, is_lost)
        if self.signature.form == "arguments" or (self.made and self.refuse is None):
            saved += inputs
        if self.refuse is not None:
            # empty functions of the inputs: the gradient depends on unsaved inputs too
            saved += [x.reshape(-1)[:0].clone() for x in inputs if x.requires_grad]
        self.saves = bool(saved)
        if len(saved) > 1 and len(set(map(id, saved))) < len(saved):
            once = {id(t): t for t in saved}  # hooks that copy get each tensor once
            places = [*once]
            self.order = [places.index(id(t)) for t in saved]
            saved = [*once.values()]
        self.is_special = (
            self.needed or variables or self.autocast or self.refuse or self.order
            or call.kind_of_rule.is_transpose
        )  # fmt: skip
        return saved

    def gradients(
        self, saved: Sequence[Tensor], upstreams: Sequence[Tensor], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the rule's gradients of inputs and variables, which autograd may record."""
        saved, input_count = [saved[at] for at in self.order] or saved, len(self.shapes)
        residuals, rest = saved[: self.residual_count], saved[self.residual_count :]
        variables, inputs = rest[: self.variable_count], rest[self.variable_count :][:input_count]
        further = torch.is_grad_enabled() or forward_ad._current_level >= 0
        if further and self.made and self.refuse is None:
            residuals = connected(self, residuals, inputs, variables)
        rule = self.call.kind_of_rule(
            self.signature, self.needed, self.shapes, self.dtypes, self.rebuild(residuals)
        )
        with (
            self.autocast_of_f(upstreams),
            torch.set_grad_enabled(torch.is_grad_enabled() and self.refuse is None),
        ):
            gradients, of_variables = rule(inputs, upstreams, variables, needed[:input_count])
        every = [*gradients, *of_variables]
        if further and self.refuse is not None:
            return refusing(self.refuse, every, [*saved, *upstreams])
        return every

    def autocast_of_f(self, tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Return a context with the autocast under which f ran."""
        if self.autocast is None and not (is_any_autocast_enabled() and tensors):
            return nullcontext()
        off = (tensors[0].device.type, None, False)
        return torch.autocast(*(self.autocast or off))  # type: ignore[no-any-return]


# --- Higher derivatives ---------------------------------------------------------------------------


def connected(
    run: Run, residuals: Sequence[Tensor], inputs: Sequence[Tensor], variables: Sequence[Tensor]
) -> list[Tensor]:
    """Return the residuals, with those that f made as functions of the inputs."""
    firsts = [residuals[at] for at in run.made]
    if any(t.requires_grad for t in firsts):  # a graph within f, such as a pullback's
        inputs = _differentiable(inputs)
        again = made_again(run, firsts, inputs)
        require_connected(run, again, inputs, variables)
    else:
        again = Recomputed.apply(run, len(firsts), *firsts, *inputs, *variables)
    return subvals(residuals, run.made, again)


class Recomputed(torch.autograd.Function):  # type: ignore[misc]
    """Return residuals; f runs again if, and only if, their derivative is taken."""

    @staticmethod
    def forward(ctx: Any, run: Run, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run, ctx.count = run, count
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple([t.detach() for t in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        run, saved = ctx.run, ctx.saved_tensors  # a checkpoint unpacks them only once
        firsts, sources = saved[: ctx.count], saved[ctx.count :]
        inputs, variables = sources[: len(run.shapes)], sources[len(run.shapes) :]
        cut = Cut()
        further = torch.is_grad_enabled()
        if variables:
            inputs = [cut(x) if further else x.detach() for x in inputs]
        inputs = _differentiable(inputs)
        again = made_again(run, firsts, inputs)
        # f reads its own variables, but a checkpoint or a hook saves copies
        f_variables = run.call.variables or captured_by(run.call, again, inputs)
        known = [*inputs, *(f_variables if len(f_variables) == len(variables) else variables)]
        wanted = [at for at in range(len(known)) if ctx.needs_input_grad[2 + ctx.count + at]]
        used = [at for at, u in enumerate(upstreams) if u is not None]
        require_connected(
            run,
            [y if at in used else None for at, y in enumerate(again)],
            inputs,
            known[len(inputs) :],
        )
        used = [at for at in used if again[at].requires_grad]
        gradients: Any = [None] * len(wanted)
        if used:
            with cut:
                gradients = torch.autograd.grad(
                    [again[at] for at in used],
                    [known[at] for at in wanted],
                    [upstreams[at] for at in used],
                    retain_graph=True,  # the graph of the inputs
                    create_graph=further,
                    allow_unused=True,
                )
        return None, None, *[None] * ctx.count, *subvals([None] * len(known), wanted, gradients)


def made_again(run: Run, firsts: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run f again, as a checkpoint does, and return the residuals that it makes."""
    residuals = _made_residuals(run, inputs)
    if len(residuals) != len(firsts) or differ(firsts, residuals):
        run.call.refuse_unconnected(firsts[0], "another run of f does not make again")
    return residuals


def _made_residuals(run: Run, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run f on inputs, and return the residuals that it makes; none if their number differs."""
    call = run.call
    with torch.enable_grad(), run.autocast_of_f(inputs):
        _, rule = call(inputs)
    residuals = closure_convert(rule.grad_fn, call.backend, call.constants).residuals
    return [residuals[at] for at in run.made] if len(residuals) == run.residual_count else []


def require_connected(
    run: Run,
    residuals: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    variables: Sequence[Tensor],
) -> None:
    """Raise an error for a residual that is neither a function of known tensors nor a constant."""
    apart = [t if t is not None and not t.requires_grad else None for t in residuals]
    if any(t is not None for t in apart):
        _require_constants(run, apart, inputs, variables)
    for t in residuals:
        if t is not None and _leaves_besides([t], [*inputs, *variables]):
            run.call.refuse_unconnected(
                t, "f made of other tensors than its arguments and variables"
            )


def _leaves_besides(tensors: Sequence[Tensor], known: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves that tensors depend on besides known tensors."""
    return [leaf for leaf in reached(tensors, known) if all(leaf is not x for x in known)]


def _require_constants(
    run: Run,
    residuals: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    variables: Sequence[Tensor],
) -> None:
    """Raise an error for a residual without a graph that changes with the inputs.

    A mask such as ``(x > 0).to(x.dtype)`` changes at most on one side of the inputs: its derivative
    is 0, as in a hand-written Function. f runs again on both sides to check that.
    """
    # moved inputs show nothing about variables: with these, every residual here is an error
    below, above = [
        [] if variables else _made_residuals(run, [_moved(x, sign) for x in inputs])
        for sign in (-1.0, 1.0)
    ]
    for at, t in enumerate(residuals):
        if t is not None and (
            not len(below) == len(above) == len(residuals)
            or not (below[at].shape == above[at].shape == t.shape)
            or not bool(((below[at] == t) | (above[at] == t) | t.isnan()).all())
        ):
            run.call.refuse_unconnected(t, "f made where autograd does not see")


def _moved(x: Tensor, sign: float) -> Tensor:
    """Return an input close to x, with a different ratio to x in each element."""
    if not is_differentiable(x.dtype):
        return x
    x = x.detach()
    step = sign * torch.finfo(x.dtype).eps ** 0.5
    return x + step * ramp(x, 0) * torch.where(x == 0, torch.ones_like(x), x)


def _differentiable(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs as separate tensors that require grad, so that f's results do too."""
    with torch.enable_grad():
        return [
            alias(x)
            if x.requires_grad or not is_differentiable(x.dtype)
            else x.detach().requires_grad_()
            for x in inputs
        ]
