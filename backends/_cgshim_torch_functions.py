"""PyTorch, eager mode: run, then attach.

f runs first, with gradients on and on detached inputs, so that the graph records what f captured and nothing else.
Then a Function is attached that returns aliases of f's outputs. It saves the inputs, the outputs and the other tensors
in grad_fn's closure, and the variables, as autograd wants them saved: hooks and checkpoints see them, in-place changes
are noticed, and nothing is held in a cycle. A saved output is the Function's own, so its derivative is the rule's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from _cgshim_torch_again import connected
from _cgshim_torch_graph import is_transformed, now, requires_grad
from _cgshim_torch_kept import Gradients, Kept, Saved, examined, named
from _cgshim_torch_once import anchor, without_derivative
from _cgshim_torch_transformed import transformed
from torch._C import _functorch as functorch
from torch.autograd import forward_ad

from cgshim._closure import lift
from cgshim._convention import is_differentiable
from cgshim._residuals import refuse_hidden

if TYPE_CHECKING:
    from cgshim._call import Call

Tensor = Any
Refuse = Callable[[str], NoReturn]


def differentiable(call: Call, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """f's outputs, with the rule for their gradient where anything can be differentiated."""
    if is_transformed():
        return transformed(call, inputs)
    return attached(call, inputs) if torch.is_grad_enabled() else call(inputs)[0]


def attached(call: Call, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """f's outputs with the rule for their gradient, where anything is differentiated at all."""
    differentiated = any(map(requires_grad, inputs))
    given = [x.detach() for x in inputs] if differentiated else inputs
    start, versions = now(), _versions(given)
    outputs, rule = call(given)
    if not differentiated and not any(map(requires_grad, (*outputs, *lift(rule.grad_fn, torch.is_tensor, call.f)[0]))):
        return outputs
    first = examined(call, given, inputs, start, outputs, rule)
    if not (differentiated or first.variables):
        return [y.detach() if y.requires_grad else y for y in outputs]
    others, first.residuals.others = first.residuals.others, []
    kept = Kept(call, first, given, others)
    kept.changed = versions != _versions(given)
    alive = map(functorch.unwrap_if_dead, inputs)
    return named(_Attached, call.name)(kept, outputs, given, others, *alive, *first.variables)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each tensor was changed in place."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # in inference mode torch does not count
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


class _Attached(torch.autograd.function._SingleLevelFunction):  # type: ignore[misc]
    """Returns aliases of a run's outputs, whose gradients come from the rule of the run.

    It is applied outside of torch.func alone: Function.apply would ask for that again, at length.
    """

    @staticmethod
    def forward(
        ctx: Any, kept: Kept, outputs: list[Tensor], given: Sequence[Tensor], others: list[Tensor],
        *differentiated: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.kept = kept
        inputs = differentiated[: len(given)]
        by_identity = dict(zip(map(id, given), inputs, strict=True))
        aliases = tuple([_alias(y, by_identity) for y in outputs])
        ctx.save_for_backward(
            *[inputs[at] for at in kept.inputs],
            *[aliases[at] for at in kept.residuals.outputs],
            *[t if t.is_leaf or at in kept.captured else t.detach() for at, t in enumerate(others)],
        )
        if not _is_connected(kept, aliases, inputs) and (kept.call.once_differentiable or kept.hidden()):
            with torch.enable_grad():
                ctx.anchor = anchor(differentiated)
        return aliases

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.kept
        saved = kept.apart(ctx.saved_tensors)
        if torch.is_grad_enabled():
            gradients, of_variables = _differentiable_gradients(ctx, kept, saved, upstreams)
        elif kept.call.once_differentiable and forward_ad._current_level >= 0:
            gradients, of_variables = _once(ctx, kept, saved, upstreams)
        else:
            gradients, of_variables = kept.gradients(_as_constants(saved), upstreams)
        return None, None, None, None, *gradients, *of_variables


def _alias(output: Tensor, inputs: dict[int, Tensor]) -> Tensor:
    """output as a tensor of its own; as a view of the input that it shows, which autograd guards as one.

    The inputs stand under the identities of those that f was given.
    """
    if id(output) in inputs:
        return inputs[id(output)]
    base = output._base if output._is_view() else None
    return output._view_func(inputs[id(base)]) if base is not None and id(base) in inputs else output.detach()


def _as_constants(saved: Saved) -> Saved:
    """What was saved, with outputs that are connected with nothing, as they were in f."""
    return saved._replace(outputs=[y if y is None else y.detach() for y in saved.outputs])


# --- Gradients that may be differentiated -----------------------------------------------------------------------


def _differentiable_gradients(ctx: Any, kept: Kept, saved: Saved, upstreams: Sequence[Tensor]) -> Gradients:
    """What the rule says, as functions of the inputs, the variables and the upstreams."""
    if kept.call.once_differentiable:
        return _once(ctx, kept, saved, upstreams)
    functions = saved
    if kept.differentiable:
        functions = connected(kept, saved)
    gradients = kept.gradients(functions, upstreams)
    hidden = kept.hidden()
    if not hidden:
        return gradients
    return _refused(ctx, saved, lambda _: refuse_hidden(kept.call, hidden[0]), gradients, upstreams)


def _once(ctx: Any, kept: Kept, saved: Saved, upstreams: Sequence[Tensor]) -> Gradients:
    """What a rule says that is once_differentiable: a derivative of it is refused."""
    with_tangents = forward_ad._current_level >= 0
    with torch.no_grad():
        gradients = kept.gradients(
            _as_constants(saved), [u.detach() for u in upstreams] if with_tangents else upstreams
        )
    return _refused(ctx, saved, kept.call.refuse_second_order, gradients, upstreams)


def _refused(
    ctx: Any, saved: Saved, refuse: Refuse, gradients: Gradients, upstreams: Sequence[Tensor]
) -> Gradients:  # fmt: skip
    """The gradients as functions of the inputs, the variables and the upstreams, whose derivatives are refused."""
    of_inputs, of_variables = gradients
    anchors = [ctx.anchor] if hasattr(ctx, "anchor") else [*saved.inputs, *saved.outputs, *saved.variables]
    both = without_derivative(
        refuse, [*of_inputs, *of_variables], [*upstreams, *[t for t in anchors if t is not None]]
    )  # fmt: skip
    return both[: len(of_inputs)], both[len(of_inputs) :]


def _is_connected(kept: Kept, aliases: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Whether what is saved is connected with all the inputs that are differentiated: an output, or all of them."""
    if len(kept.inputs) == len(inputs) or any(is_differentiable(aliases[at].dtype) for at in kept.residuals.outputs):
        return True
    saved = set(kept.inputs)
    return all(at in saved or not x.requires_grad for at, x in enumerate(inputs))
