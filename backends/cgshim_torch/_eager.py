"""PyTorch, eager mode: run f, then attach its rule. `_plain` does most calls; this does any.

f runs first, with gradients on and on detached inputs, so that the graph records only what f captured. Then a
Function is attached that returns aliases of f's outputs, and whose backward calls the rule that f returned, as it is.
The tensors that the rule holds are saved in autograd's own way too: hooks and checkpoints see them, autograd notices
changes in place, and there is no reference cycle.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from cgshim.backend import TreeSpec
from cgshim_torch._aliases import aliases_of, give_layout, is_turned
from cgshim_torch._existing import NOTHING, Existing, Reach, names_libraries_alone, version_of
from cgshim_torch._func import transformed
from cgshim_torch._graph import is_transformed, now, recordable, requires_grad, since
from cgshim_torch._once import anchor, without_derivative
from cgshim_torch._private import forward_ad, functorch, keeps_graph, pack_hooks
from cgshim_torch._reads import FLOATS, reads_now
from cgshim_torch._residuals import Held, Holdings, holding, put
from cgshim_torch._run import Constants, Gradients, Run, named, run_once, variables_of
from cgshim_torch._second_order import differentiable_gradients
from cgshim_torch._single import SingleLevelFunction
from cgshim_torch._state import state_of

if TYPE_CHECKING:
    from types import FunctionType

    from cgshim.backend import Call

Tensor = Any
Refuse = Callable[[str], NoReturn]
Outputs = tuple[Sequence[Tensor], TreeSpec]
"""the tensors of f's output, and its spec"""


def differentiable(call: Call, inputs: Sequence[Tensor]) -> Outputs:
    """Return f's outputs, with the rule for their gradient if they can be differentiated."""
    if is_transformed():
        outputs, spec = transformed(call, inputs)
    else:
        outputs, spec = attached(call, inputs) if torch.is_grad_enabled() else unattached(call, inputs)
    reads = reads_now()
    if reads is not None:
        reads.knows(*outputs)
    return outputs, spec


def unattached(call: Call, inputs: Sequence[Tensor]) -> Outputs:
    """Return f's outputs while no gradients are recorded."""
    if call.takes_needed:
        call = call.with_needed([False] * len(inputs))
    outputs, rule = call.read(run_once(call, inputs), inputs)
    return constants(outputs, inputs), rule.output


def constants(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs as constants; none is an input itself, which may require grad or be changed."""
    given = set(map(id, inputs))
    return [y.detach() if id(y) in given or y.requires_grad else y for y in outputs]


def attached(call: Call, inputs: Sequence[Tensor]) -> Outputs:
    """Return f's outputs, with the rule for their gradient if anything is differentiated."""
    if call.takes_needed:
        call = call.with_needed([functorch.unwrap_if_dead(x).requires_grad for x in inputs])
    given = [x.detach() for x in inputs]
    existing, start, versions = Existing(call), now(), list(map(version_of, given))
    return with_rule(call, inputs, given, existing, start, versions, [run_once(call, given)])


def with_rule(
    call: Call, inputs: Sequence[Tensor], given: list[Tensor], existing: Existing, start: int, versions: list[int],
    results: list[Any],
) -> Outputs:  # fmt: skip
    """Return the outputs of a run of f, with its rule for their gradient if anything is differentiated.

    given are the inputs as f saw them, and versions their versions before; nodes of its graph are numbered from start.
    results holds what f returned. Both lists are emptied: what is alive then, the rule holds.
    """
    outputs, rule = call.read(results.pop(), given)
    differentiated = any(map(requires_grad, inputs))
    holdings = Holdings(rule.grad_fn, existing.holders)
    made = _made(outputs, holdings)
    if not (differentiated or made):
        return constants(outputs, inputs), rule.output
    has_changed = versions != list(map(version_of, given))
    if has_changed:
        for x, seen, was in zip(inputs, given, versions, strict=True):
            if version_of(seen) != was and x.requires_grad and not is_turned(x, seen):
                call.refuse_writing()
        rule = rule.with_shapes_of(inputs)
        give_layout(inputs, given)
    existing.forget_changed()
    variables: list[Tensor] = []
    during = since(start)
    if made:
        variables, has_own_graph = variables_of(call, rule, existing, given, inputs, during, made, holdings)
        if not (differentiated or variables):
            return constants(outputs, inputs), rule.output
        if not has_own_graph:
            _detach(made, during)
        made.clear()
    run = Run(call, rule, existing, [x.device for x in inputs], holdings.tensors)
    run.changed = has_changed
    run.variables, run.state = variables, state_of(call.f, variables) if variables else None
    alive = list(map(functorch.unwrap_if_dead, inputs))
    aliases = aliases_of(outputs, given, alive)
    saved = _Saving(run, holdings, alive, aliases, variables, during)
    saved.choose(given, outputs)
    return named(_Attached, call.name)(run, saved.tensors, aliases, *alive, *variables), rule.output


def _made(outputs: Sequence[Tensor], holdings: Holdings) -> list[Tensor]:
    """Return the outputs and residuals that depend on what is differentiated outside of f, or in a graph of its own."""
    reads = reads_now()
    held = [each.tensor for each in holdings.tensors]
    if reads is not None:
        held = [reads.read(t) for t in held]
    return [t for t in (*outputs, *held) if t.requires_grad]


def _detach(made: Sequence[Tensor], during: range) -> None:
    """Let go of the graph that f has recorded of its variables: another run of f makes it again, if need be."""
    for t in made:
        if is_made_in(t, during) and not t._is_view():
            t.detach_()


def is_made_in(t: Tensor, during: range) -> bool:
    """Return True if a node of the graph with one of these numbers has made a tensor."""
    return t.grad_fn is not None and t.grad_fn._sequence_nr() in during


class _Saving:
    """Chooses what autograd saves from a run: what the rule holds, and what a second order needs besides."""

    def __init__(
        self, run: Run, holdings: Holdings, inputs: Sequence[Tensor], aliases: Sequence[Tensor],
        variables: Sequence[Tensor], during: range,
    ) -> None:  # fmt: skip
        self.run = run
        self._during = during
        self.tensors: list[Tensor] = []
        self._at: dict[int, int] = {}
        self._holdings = holdings
        self._inputs = inputs
        self._aliases = aliases
        self._variables = set(map(id, variables))
        self._reads = reads_now()

    def choose(self, given: list[Tensor], outputs: list[Tensor]) -> None:
        """Choose the tensors, and let go of what f saw and returned: what is alive then, something else holds."""
        run, held = self.run, [each.tensor for each in self.run.held]
        others = self._others(held, given, outputs)
        needs_inputs = run.rule.needs_inputs or self._has_residuals(others, given, outputs)
        count, is_held = len(given), set(map(id, held))
        connected = (*self._inputs, *self._aliases)
        raw = [t if id(t) in is_held or (needs_inputs and at < count) else None for at, t in enumerate(given + outputs)]
        refs = list(map(weakref.ref, given + outputs))
        given.clear()
        outputs.clear()
        known_inputs: set[int] = set()
        for at, ref in enumerate(refs):
            t = raw[at]
            if t is None:
                t = ref()  # what is alive all the same is somewhere where the rule may read it
                if t is None or t.dtype not in FLOATS:
                    continue
            place = self._save(t, connected[at])  # one tensor may come several times
            if at < count:
                run.inputs_at[at] = place
                known_inputs.add(place)
            elif place not in known_inputs:
                run.outputs_at.append(place)
        for t in others:
            at = self._save(t, t if self._reads is None else self._reads.read(t))
            if t.requires_grad and id(t) not in self._variables and (t.is_leaf or is_made_in(t, self._during)):
                run.own_at.append(at)
        run.held_at = [self._at.get(id(t)) for t in held]
        if pack_hooks(True) is not None and run.held:
            self._empty()
        self._anchor()

    def _save(self, raw: Tensor, tensor: Tensor) -> int:
        if id(raw) not in self._at:
            self._at[id(raw)] = len(self.tensors)
            self.tensors.append(recordable(tensor) if tensor.is_inference() else tensor)
            # within a rule that makes a graph, a variable of that rule holds for the time what is connected
            self.run.raw.append(raw if self._reads is None else self._reads.raw_of(raw))
        return self._at[id(raw)]

    def _others(self, held: list[Tensor], given: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return what the rule holds besides inputs and outputs; what existed before f ran is not saved."""
        known = {id(t) for t in (*given, *outputs)}
        others = [t for t in held if id(t) not in known]
        reads = self._reads
        old = [
            t for t in others
            if self.run.existing.has(t) and not t.requires_grad and (reads is None or reads.read(t) is t)
        ]  # fmt: skip
        if old:
            self.run.constants = Constants(self.run.call.name, old)
        is_old = set(map(id, old))
        return [t for t in others if id(t) not in is_old]

    def _has_residuals(self, others: Sequence[Tensor], given: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
        """Return True if the rule may read what f made of the inputs: their derivatives need the inputs."""
        if self.run.call.once_differentiable:
            return False
        if any(t.dtype in FLOATS and id(t) not in self._variables for t in others):
            return True
        existing = self.run.existing
        if any(id(x) not in existing.holders for x in self._holdings.objects):
            return True
        if existing is NOTHING:
            return False
        known = {*self._variables, *(id(t) for t in (*given, *outputs))}
        return any(
            t.dtype in FLOATS and id(t) not in known and not existing.has(t) for t in Reach(self.run.call).tensors()
        )

    def _empty(self) -> None:
        """Let the hooks alone keep the tensors: the rule is given them again when it runs."""
        run = self.run
        run.is_emptied = True
        for at, each in enumerate(run.held):
            place = run.held_at[at]
            if each.tensor.requires_grad:  # a variable, which stays anyway
                run.held_at[at] = None
            elif place is not None and each.holder is not None:
                put(each, None)
                run.held[at] = Held(None, each.holder, each.key)
                run.raw[place] = None

    def _anchor(self) -> None:
        """Connect the node with inputs that are not saved, if the rule may read what is to be refused."""
        run = self.run
        grad_fn: Any = run.rule.grad_fn
        reads_cells_alone = _reads_cells_alone(grad_fn, self._holdings)
        run.may_hide = not reads_cells_alone or any(each.holder is None for each in run.held)
        if reads_cells_alone and not run.call.once_differentiable:
            return
        missing = [x for x, at in zip(self._inputs, run.inputs_at, strict=True) if at is None and x.requires_grad]
        if missing and not any(self.tensors[at].dtype in FLOATS for at in run.outputs_at):
            run.anchor = anchor([*missing, *run.variables])


def _reads_cells_alone(grad_fn: FunctionType | Any, holdings: Holdings) -> bool:
    """Return True if a rule can read no tensor but those that were found."""
    return not holdings.objects and hasattr(grad_fn, "__code__") and names_libraries_alone(grad_fn)


class _Attached(SingleLevelFunction):
    """Returns aliases of a run's outputs, whose gradients come from the rule of the run.

    It is applied only outside of torch.func: Function.apply would check that again, which takes time.
    """

    @staticmethod
    def forward(
        ctx: Any, run: Run, saved: list[Tensor], aliases: tuple[Tensor, ...], *differentiated: Tensor
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.run = run
        ctx.save_for_backward(*saved)
        return aliases

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        saved, run = ctx.saved_tensors, ctx.run
        needed = ctx.needs_input_grad[3 : 3 + len(run.devices)]
        if run.call.once_differentiable and (torch.is_grad_enabled() or forward_ad._current_level >= 0):
            of_inputs, of_variables = _once(run, saved, upstreams, needed)
        elif torch.is_grad_enabled():
            of_inputs, of_variables = differentiable_gradients(run, saved, upstreams, needed)
        else:
            of_inputs, of_variables = first_gradients(run, saved, upstreams, needed)
        if not keeps_graph():
            ctx.run = None  # the rule and what it holds are freed with the saved tensors
        return None, None, None, *of_inputs, *of_variables


def first_gradients(
    run: Run, saved: Sequence[Tensor], upstreams: Sequence[Tensor], needed: Sequence[bool]
) -> Gradients:  # fmt: skip
    """Return the gradients of the rule as it is, on the very tensors that it holds."""
    if not run.is_emptied:
        inputs = [None if at is None else run.raw[at] for at in run.inputs_at]
        return run.gradients(inputs, upstreams, run.variables, needed)
    own = [t.detach() if t.requires_grad else t for t in saved]
    held = [(each, own[at]) for each, at in zip(run.held, run.held_at, strict=True) if at is not None]
    with holding([each for each, _ in held], [t for _, t in held], run.lock):
        return run.gradients(run.inputs_among(own), upstreams, run.variables, needed)


def _once(run: Run, saved: Sequence[Tensor], upstreams: Sequence[Tensor], needed: Sequence[bool]) -> Gradients:
    """Return the gradients of a once_differentiable rule; their derivative raises an error."""
    constant = [u.detach() for u in upstreams] if forward_ad._current_level >= 0 else upstreams
    with torch.no_grad():
        of_inputs, of_variables = first_gradients(run, saved, constant, needed)
    connected = [t for t in (*saved, *run.variables, run.anchor) if t is not None]
    both = without_derivative(run.call.refuse_second_order, [*of_inputs, *of_variables], [*upstreams, *connected])
    return both[: len(of_inputs)], both[len(of_inputs) :]
