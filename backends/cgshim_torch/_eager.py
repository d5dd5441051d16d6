"""PyTorch, eager mode: run f, then attach its rule.

f runs first, with gradients on and on detached inputs, so that the graph records only what f captured. Then a
Function is attached that returns aliases of f's outputs. It saves the inputs, the outputs and the other tensors in
grad_fn's closure, and the variables, in autograd's own way: hooks and checkpoints see them, autograd notices in-place
changes, and there is no reference cycle. A saved output is the Function's own, so its derivative is the rule's.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from cgshim.backend import TreeSpec, refuse_hidden, search_closure
from cgshim_torch._again import connected
from cgshim_torch._buffers import buffers_among
from cgshim_torch._func import transformed
from cgshim_torch._graph import is_transformed, now, recordable, requires_grad, since
from cgshim_torch._kept import FLOATS, Gradients, Kept, Saved, called, examined, named
from cgshim_torch._once import anchor, without_derivative
from cgshim_torch._private import forward_ad, functorch, keeps_graph
from cgshim_torch._single import SingleLevelFunction

if TYPE_CHECKING:
    from cgshim.backend import Call, Rule

Tensor = Any
Refuse = Callable[[str], NoReturn]
Outputs = tuple[Sequence[Tensor], TreeSpec]
"""the tensors of f's output, and its spec"""

_version = operator.attrgetter("_version")
_is_view, _is_inference = map(operator.methodcaller, ("_is_view", "is_inference"))


def differentiable(call: Call, inputs: Sequence[Tensor]) -> Outputs:
    """Return f's outputs, with the rule for their gradient if they can be differentiated."""
    if is_transformed():
        return transformed(call, inputs)
    return attached(call, inputs) if torch.is_grad_enabled() else unattached(call, inputs)


def unattached(call: Call, inputs: Sequence[Tensor]) -> Outputs:
    """Return f's outputs while no gradients are recorded."""
    if call.takes_needed:
        call = call.with_needed([False] * len(inputs))
    outputs, rule = called(call, inputs)
    return _of_their_own(outputs, inputs), rule.output


def _of_their_own(outputs: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs as constants; none is an input itself, which may require grad or be changed."""
    given = set(map(id, inputs))
    return [y.detach() if id(y) in given or y.requires_grad else y for y in outputs]


def attached(call: Call, inputs: Sequence[Tensor]) -> Outputs:
    """Return f's outputs, with the rule for their gradient if anything is differentiated."""
    differentiated = any(map(requires_grad, inputs))
    if call.takes_needed:
        call = call.with_needed([functorch.unwrap_if_dead(x).requires_grad for x in inputs])
    given = [x.detach() for x in inputs] if differentiated else inputs
    start, versions = now(), _versions(given)
    outputs, rule = called(call, given)
    if not (differentiated or any(map(requires_grad, outputs)) or _reads_what_requires_grad(call, rule)):
        return _of_their_own(outputs, inputs), rule.output
    changed = versions != _versions(given)
    if changed:
        _refuse_writing(call, inputs, given, versions)
        rule = rule.with_shapes_of(inputs)
        _shown_alike(inputs, given)
    kept, others, variables = examined(call, given, inputs, since(start), outputs, rule)
    if not (differentiated or variables):
        return _of_their_own(outputs, inputs), rule.output
    kept.changed = changed
    if others:
        kept.buffers = buffers_among(call, rule, others)
    alive = map(functorch.unwrap_if_dead, inputs)
    return named(_Attached, call.name)(kept, outputs, given, others, *alive, *variables), rule.output


def _reads_what_requires_grad(call: Call, rule: Rule) -> bool:
    """Return True if the rule itself reads a tensor that requires grad."""
    return any(map(requires_grad, search_closure(rule.grad_fn, torch.is_tensor, call.f).tensors))


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each tensor was changed in place."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # in inference mode torch does not count
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _refuse_writing(call: Call, inputs: Sequence[Tensor], given: Sequence[Tensor], before: Sequence[int]) -> None:
    """Raise an error if f wrote into a differentiated argument: autograd would not know of the change.

    One that f has turned in place, which also counts as a change, has another layout in memory now.
    """
    for x, seen, was, now_is in zip(inputs, given, before, _versions(given), strict=True):
        if now_is != was and x.requires_grad and not _is_turned(x, seen):
            call.refuse_writing()


def _is_turned(x: Tensor, seen: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested and _geometry(x) != _geometry(seen)


def _shown_alike(inputs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Give the inputs the layout in memory in which f left its own: it may have transposed them in place."""
    for x, seen in zip(inputs, given, strict=True):
        if x is not seen and _is_turned(x, seen):
            with torch.no_grad():
                x.set_(seen)


def _geometry(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset()


class _Attached(SingleLevelFunction):
    """Returns aliases of a run's outputs, whose gradients come from the rule of the run.

    It is applied only outside of torch.func: Function.apply would check that again, which takes time.
    """

    @staticmethod
    def forward(
        ctx: Any, kept: Kept, outputs: list[Tensor], given: Sequence[Tensor], others: list[Tensor],
        *differentiated: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.kept = kept
        inputs = differentiated[: len(given)]
        aliases = _aliases(outputs, given, inputs)
        saved = [inputs[at] for at in kept.inputs]
        if kept.residuals.outputs:
            saved += [aliases[at] for at in kept.residuals.outputs]
        if others:
            saved += _saved_others(kept, others)
        if any(map(_is_inference, saved)):
            saved = list(map(recordable, saved))
        ctx.save_for_backward(*saved)
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
            if kept.residuals.outputs:
                saved = _as_constants(saved)
            gradients, of_variables = kept.gradients(saved, upstreams, _needed(ctx))
        if kept.call.options and not (torch.is_grad_enabled() or keeps_graph()):
            kept.call = kept.call.without_options()  # to free their tensors with the saved ones
        return None, None, None, None, *gradients, *of_variables


def _needed(ctx: Any) -> Sequence[bool]:
    """Return for each input if its gradient will be used."""
    needed: Sequence[bool] = ctx.needs_input_grad[4 : 4 + len(ctx.kept.devices)]
    return needed


def _saved_others(kept: Kept, others: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the others that autograd saves; without a graph those that another run of f connects."""
    if any(map(requires_grad, others)):
        others = [t if t.is_leaf or at in kept.connected else t.detach() for at, t in enumerate(others)]
    return others if kept.buffers is None else kept.buffers.without(others)


def _by_identity(given: Sequence[Tensor], inputs: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the inputs by the identities of what f got; torch makes an object of a subclass as a view."""
    found = dict(zip(map(id, given), inputs, strict=True))
    for seen, x in zip(given, inputs, strict=True):
        if type(seen) is not torch.Tensor and seen._base is not None:
            found.setdefault(id(seen._base), x)
    return found


def _references_to_a_free_tensor() -> int:
    """Return the number of references to a tensor in one list; -1 if those of C++ do not count."""
    tensors = [torch.empty(1)]
    (alone,) = map(sys.getrefcount, tensors)
    view = tensors[0][:0]  # which holds it in C++
    (held,) = map(sys.getrefcount, tensors)
    del view
    return alone if held > alone else -1


_FREE = _references_to_a_free_tensor()


def _aliases(outputs: Sequence[Tensor], given: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the outputs as tensors of their own, or as views of what they show, so that autograd guards them.

    Outputs that nobody else holds stay as they are. given are the inputs as f saw them.
    """
    references = list(map(sys.getrefcount, outputs))
    is_bound = any(map(requires_grad, outputs)) or any(map(_is_view, outputs))  # part of a graph, or of another tensor
    if references.count(_FREE) == len(outputs) and not is_bound:
        return tuple(outputs)
    shown = _by_identity(given, inputs)
    wholes = [y._base if y._is_view() else y for y in outputs]
    if len(set(map(id, wholes))) < len(outputs):
        return _views(outputs, wholes, shown)
    pairs = zip(outputs, wholes, strict=True)
    return tuple([_view(y, whole, shown[id(whole)]) if id(whole) in shown else y.detach() for y, whole in pairs])


def _views(outputs: Sequence[Tensor], wholes: Sequence[Tensor], shown: dict[int, Tensor]) -> tuple[Tensor, ...]:
    """Return the outputs as views of inputs and of each other, so that autograd forbids changes, which others share."""
    seen, views = set(), []
    for whole in wholes:
        if id(whole) not in shown:
            shown[id(whole)] = whole.detach()
    for y, whole in zip(outputs, wholes, strict=True):
        view = _view(y, whole, shown[id(whole)])
        views.append(view.view_as(view) if id(y) in seen else view)
        seen.add(id(y))
    return tuple(views)


def _view(output: Tensor, whole: Tensor, shown: Tensor) -> Tensor:
    """Return the view of `shown` that shows what output shows of `whole`."""
    if output is whole:
        return shown
    try:
        view = output._view_func(shown)
    except RuntimeError:  # a view of the values of a sparse or nested tensor
        view = None
    if type(view) is type(output):
        return view
    return output.detach() if output.requires_grad else output


def _as_constants(saved: Saved) -> Saved:
    """Return what was saved, with detached outputs, as they were in f."""
    return saved._replace(outputs=[y if y is None else y.detach() for y in saved.outputs])


# --- Gradients that may be differentiated -----------------------------------------------------------------------


def _differentiable_gradients(ctx: Any, kept: Kept, saved: Saved, upstreams: Sequence[Tensor]) -> Gradients:
    """Return the rule's gradients as functions of the inputs, the variables and the upstreams."""
    if kept.call.once_differentiable:
        return _once(ctx, kept, saved, upstreams)
    functions = saved
    if kept.differentiable:
        functions = connected(kept, saved)
    gradients = kept.gradients(functions, upstreams, _needed(ctx))
    hidden = kept.hidden()
    if not hidden:
        return gradients
    return _refused(ctx, saved, lambda _: refuse_hidden(kept.call, hidden[0]), gradients, upstreams)


def _once(ctx: Any, kept: Kept, saved: Saved, upstreams: Sequence[Tensor]) -> Gradients:
    """Return the gradients of a once_differentiable rule; their derivative raises an error."""
    with_tangents = forward_ad._current_level >= 0
    with torch.no_grad():
        gradients = kept.gradients(
            _as_constants(saved), [u.detach() for u in upstreams] if with_tangents else upstreams, _needed(ctx)
        )
    return _refused(ctx, saved, kept.call.refuse_second_order, gradients, upstreams)


def _refused(
    ctx: Any, saved: Saved, refuse: Refuse, gradients: Gradients, upstreams: Sequence[Tensor]
) -> Gradients:  # fmt: skip
    """Return the gradients as functions of inputs, variables and upstreams, whose derivatives raise an error."""
    of_inputs, of_variables = gradients
    anchors = [ctx.anchor] if hasattr(ctx, "anchor") else [*saved.inputs, *saved.outputs, *saved.variables]
    both = without_derivative(
        refuse, [*of_inputs, *of_variables], [*upstreams, *[t for t in anchors if t is not None]]
    )  # fmt: skip
    return both[: len(of_inputs)], both[len(of_inputs) :]


def _is_connected(kept: Kept, aliases: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Return True if what is saved leads to all differentiated inputs: it has an output, or all of them."""
    if len(kept.inputs) == len(inputs) or any(aliases[at].dtype in FLOATS for at in kept.residuals.outputs):
        return True
    saved = set(kept.inputs)
    return all(at in saved or not x.requires_grad for at, x in enumerate(inputs))
