"""PyTorch, eager mode: run f, then attach its rule. `plain` does most calls; this does any.

f runs first, with gradients on and on detached inputs, so that the graph records only what f
captured. Then a Function is attached that returns aliases of f's outputs, and whose backward calls
the rule that f returned, as it is. The tensors that the rule holds are saved in autograd's own way
too: hooks and checkpoints see them, autograd notices changes in place, and there is no reference
cycle.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch

from cgshim.backend import Call, Tensor, TreeSpec
from cgshim_torch._eager.aliases import aliases_of
from cgshim_torch._eager.run import Run, named, run_once, variables_of, without_rules
from cgshim_torch._eager.second_order import differentiable_gradients
from cgshim_torch._func import transformed
from cgshim_torch._graph.existing import (
    MOST,
    NOTHING,
    Existing,
    Held,
    Holdings,
    Reach,
    existing_for,
    put,
    version_of,
    versions_of,
)
from cgshim_torch._graph.levels import is_transformed, requires_grad
from cgshim_torch._graph.reads import FLOATS, reads_now, without_derivative
from cgshim_torch._graph.walk import is_made_in, recordable, since
from cgshim_torch._versions.private import (
    SingleLevelFunction,
    alive_in,
    default_device,
    forward_ad,
    functorch,
    is_any_autocast_enabled,
    keeps_graph,
    pack_hooks,
    sequence_number,
)

Outputs = tuple[Sequence[Tensor], TreeSpec]
"""the tensors of f's output, and its spec"""


def differentiable(call: Call, inputs: Sequence[Tensor]) -> Outputs:
    """Return f's outputs, with the rule for their gradient if they can be differentiated."""
    with_its_rule = transformed if is_transformed() else attached
    outputs, spec = with_its_rule(call, inputs)
    reads = reads_now()
    if reads is not None:
        reads.knows(*outputs)
    return outputs, spec


def constants(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs as constants; none is an input itself, which may require grad or be
    changed.
    """
    input_ids = set(map(id, inputs))
    return [y.detach() if id(y) in input_ids or y.requires_grad else y for y in outputs]


def attached(call: Call, inputs: Sequence[Tensor]) -> Outputs:
    """Return f's outputs, with the rule for their gradient if anything is differentiated."""
    recording = torch.is_grad_enabled()
    if call.takes_needs_input_grad:
        call = call.with_needs_input_grad(
            [recording and functorch.unwrap_if_dead(x).requires_grad for x in inputs]
        )
    detached = [x.detach() for x in inputs] if recording else [*inputs]
    existing = existing_for(call) if recording else NOTHING
    start, versions = sequence_number(), versions_of(detached)
    return with_rule(call, inputs, detached, existing, start, versions, [run_once(call, detached)])


def with_rule(
    call: Call, inputs: Sequence[Tensor], detached: list[Tensor], existing: Existing, start: int, versions: list[int],
    results: list[Any],
) -> Outputs:  # fmt: skip
    """Return the outputs of a run of f, with its rule for their gradient if anything is
    differentiated.

    detached are the inputs as f saw them, and versions their versions before; nodes of its graph are
    numbered from start. results holds what f returned. Both lists are emptied: what is alive then,
    the rule holds.
    """
    outputs, rule = call.read(results.pop(), detached)
    if not torch.is_grad_enabled():
        return constants(outputs, inputs), rule.output
    differentiated = any(map(requires_grad, inputs))
    holdings = Holdings(rule.grad_fn, existing=existing.holders)
    made = _made(outputs, holdings)
    if not (differentiated or made):
        return constants(outputs, inputs), rule.output
    if versions != versions_of(detached) and any(
        version_of(seen) != was and (x.requires_grad or x.shape != seen.shape)
        for x, seen, was in zip(inputs, detached, versions, strict=True)
    ):
        call.refuse_writing()
    existing.forget_changed()
    variables: list[Tensor] = []
    during = since(start)
    if made:
        variables, has_own_graph = variables_of(
            call, rule, existing, detached, inputs, during, made, holdings
        )
        # f's graph of the variables is let go: another run of f makes it again, if need be
        if not has_own_graph:
            for t in made:
                if is_made_in(t, during) and not t._is_view():
                    t.detach_()
        made.clear()
    if not (differentiated or variables):
        return constants(outputs, inputs), rule.output
    run = Run(call, rule, existing, [x.device for x in inputs], holdings, variables)
    run.default_device = default_device()
    alive = [*map(functorch.unwrap_if_dead, inputs)]
    aliases = aliases_of(outputs, detached, alive)
    saved = _saved(run, holdings, detached, outputs, alive, aliases, during)
    return named(Attached, call.name)((run, saved, aliases), *alive, *variables), rule.output


def _made(outputs: Sequence[Tensor], holdings: Holdings) -> list[Tensor]:
    """Return the outputs and residuals that depend on what is differentiated outside of f, or in a
    graph of its own.
    """
    reads = reads_now()
    tensors = [each.tensor for each in holdings.tensors]
    held = tensors if reads is None else map(reads.read, tensors)
    return [t for t in (*outputs, *held) if t.requires_grad]


# --- What autograd saves --------------------------------------------------------------------------


def _saved(
    run: Run, holdings: Holdings, detached: list[Tensor], outputs: list[Tensor], inputs: Sequence[Tensor],
    aliases: Sequence[Tensor], during: range,
) -> list[Tensor]:  # fmt: skip
    """Return what autograd saves: what the rule holds, and what a second order needs besides.

    What f saw and returned is let go: what is alive then, something holds from where the rule may
    read it.
    """
    held, count, reads = [each.tensor for each in run.held], len(detached), reads_now()
    known, is_variable = set(map(id, (*detached, *outputs))), set(map(id, run.variables))
    residuals = _residuals(run, [t for t in held if id(t) not in known])
    needs_inputs = run.rule.needs_inputs or _may_read_residuals(
        run, holdings, residuals, known | is_variable
    )
    has_hooks = pack_hooks(True) is not None
    read = [*held]  # in a first order
    if run.rule.needs_inputs and not has_hooks:
        read += detached
    is_read = set(map(id, read))
    # what the rule does not hold is gone as soon as these lists are empty, or somebody else reads it
    seen = [t if id(t) in is_read else weakref.ref(t) for t in (*detached, *outputs)]
    detached.clear()
    outputs.clear()
    entries: dict[int, tuple[Tensor | None, Tensor]] = {}  # by the identity of what f saw
    keys: list[int] = []
    for number, (t, tensor) in enumerate(zip(seen, (*inputs, *aliases), strict=True)):
        if type(t) is weakref.ref and ((t := alive_in(t)) is None or t.dtype not in FLOATS):
            t = None
        key = -number - 1 if t is None else id(t)
        keys.append(key)
        if t is not None:
            entries.setdefault(key, (t, tensor))
        elif number < count and needs_inputs:
            entries[key] = None, tensor
    for t in residuals:
        entries.setdefault(id(t), (t, t if reads is None else reads.read(t)))
    at = {key: place for place, key in enumerate(entries)}
    run.raw = [t for t, _ in entries.values()]
    if reads is not None:
        # within a rule that makes a graph, a variable of that rule holds for the time what is
        # connected
        run.raw = [None if t is None else reads.raw_of(t) for t in run.raw]
    saved = [recordable(t) if t.is_inference() else t for _, t in entries.values()]
    run.inputs_at = [at.get(key) for key in keys[:count]]
    run.own_at = [
        at[id(t)] for t in residuals
        if t.requires_grad and id(t) not in is_variable and (t.is_leaf or is_made_in(t, during))
    ]  # fmt: skip
    run.held_at = [at.get(id(t)) for t in held]
    if has_hooks:
        _empty(run)
    else:
        run.versions = [0 if t is None or t.is_inference() else t._version for t in run.raw]
    holds_saved = run.is_emptied or any(t is not None for t in run.raw)
    run.holds_no_tensor = not (holds_saved or run.constants)
    _anchor(run, inputs)
    return saved


def _residuals(run: Run, residuals: list[Tensor]) -> list[Tensor]:
    """Return what the rule holds besides inputs and outputs, but for what existed before f ran, which
    is not saved.
    """
    if not residuals:
        return residuals
    reads = reads_now()
    old = {
        id(t): t for t in residuals
        if run.existing.has(t) and not t.requires_grad and (reads is None or reads.read(t) is t)
    }  # fmt: skip
    run.constants = [(t, without_rules(t)) for t in old.values()]
    return [t for t in residuals if id(t) not in old]


def _may_read_residuals(
    run: Run, holdings: Holdings, residuals: Sequence[Tensor], known: Collection[int]
) -> bool:
    """Return True if the rule may read what f made of the inputs: their derivatives need the
    inputs. Known are the identities of inputs, outputs and variables.
    """
    if run.call.once_differentiable:
        return False
    existing = run.existing
    if any(t.dtype in FLOATS and id(t) not in known for t in residuals) or any(
        id(x) not in existing.holders for x in holdings.objects
    ):
        return True
    if existing is NOTHING:
        return False
    return any(
        t.dtype in FLOATS and id(t) not in known and not existing.has(t)
        for t in Reach(run.call, most=MOST).tensors
    )


def _empty(run: Run) -> None:
    """Let the hooks alone keep the tensors: the rule gets them back, also as arguments, when it runs."""
    run.is_emptied = run.rule.needs_inputs or any(at is not None for at in run.held_at)
    shared = Reach(run.call).seen  # f may have put what its rule holds where other code sees it
    for at, (each, place) in enumerate(zip(run.held, run.held_at, strict=True)):
        if each.tensor.requires_grad:  # a variable, which stays anyway
            run.held_at[at] = None
        elif place is not None and each.holder is not None and id(each.outermost) not in shared:
            put(each, None)
            run.held[at] = Held(None, each.holder, each.key)
            run.raw[place] = None


def _anchor(run: Run, inputs: Sequence[Tensor]) -> None:
    """Connect the node with inputs that are not saved, if the rule may read what is to be refused."""
    if run.names_libraries and not run.call.once_differentiable:
        return
    missing = [
        x for x, at in zip(inputs, run.inputs_at, strict=True) if at is None and x.requires_grad
    ]
    if missing:
        connected = [*missing, *run.variables]
        (run.anchor,) = without_derivative(
            run.call.refuse_second_order, [torch.empty(0)], connected
        )


# --- The Function ---------------------------------------------------------------------------------


class Attached(SingleLevelFunction):
    """Returns aliases of a run's outputs, whose gradients come from the rule of the run."""

    @staticmethod
    def forward(ctx: Any, made: tuple[Run, list[Tensor], Any], *differentiated: Tensor) -> Any:
        ctx.run, saved, aliases = made  # one argument, for torch looks into each, there and back
        ctx.save_for_backward(*saved)
        return aliases

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        run: Run = ctx.run
        # then it may run again, as by hand
        saves_nothing = run is not None and run.holds_no_tensor
        try:
            is_read = not saves_nothing or (torch.is_grad_enabled() and run.raw)
            saved = ctx.saved_tensors if is_read else ()
        except RuntimeError:  # of a second backward pass, or of a change in place
            if run is None or torch.is_grad_enabled() or not run.reads_no_change():
                raise
            saved = ()
        if torch.is_grad_enabled() or is_any_autocast_enabled() or forward_ad._current_level >= 0:
            gradients = _in_any_mode(run, saved, upstreams, ctx.needs_input_grad)
        else:
            gradients = run.first_gradients(saved, upstreams, ctx.needs_input_grad)
        if not (saves_nothing or keeps_graph()):
            ctx.run = None  # the rule and what it holds are freed with the saved tensors
        return None, *gradients


def _in_any_mode(
    run: Run, saved: Sequence[Tensor], upstreams: Sequence[Tensor], needed: Sequence[bool]
) -> Sequence[Tensor | None]:  # fmt: skip
    """Return the gradients of inputs and variables, as functions of what was saved if they may be
    differentiated.
    """
    run.complete()
    if run.call.once_differentiable and (torch.is_grad_enabled() or forward_ad._current_level >= 0):
        constant = [u.detach() for u in upstreams] if forward_ad._current_level >= 0 else upstreams
        with torch.no_grad():
            gradients = Run.first_gradients(run, saved, constant, needed)
        connected = [t for t in (*upstreams, *saved, *run.variables, run.anchor) if t is not None]
        return without_derivative(run.call.refuse_second_order, gradients, connected)
    gradients_of = differentiable_gradients if torch.is_grad_enabled() else Run.first_gradients
    return gradients_of(run, saved, upstreams, needed)
