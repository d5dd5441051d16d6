"""PyTorch: one run of f, and what a Function needs of it in the backward pass besides the saved
tensors.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from cgshim.backend import Call, Rule, RuleScope, Tensor, describe, refusal
from cgshim_torch._graph.existing import (
    Existing,
    Held,
    Holdings,
    holding,
    library_names,
    state_of,
    version_of,
)
from cgshim_torch._graph.walk import NoteLeaves, captured, is_new_leaf, makes_leaves, note_leaf
from cgshim_torch._versions.private import is_any_autocast_enabled, is_dead_wrapper

Function = Callable[..., tuple[Tensor, ...]]
Autocast = tuple[tuple[str, torch.dtype, bool], ...]
T = TypeVar("T")

rules: RuleScope[object] = RuleScope("cgshim_torch_rule")


class Run:
    """A run of f whose rule is differentiated: the rule as f returned it, and which of its tensors
    are saved.
    """

    # True if the rule holds no tensor until it runs: hooks on saved tensors look after them
    is_emptied = False
    holds_no_tensor = False  # True if the rule does not, as far as is known
    reads_held_alone = False  # True if, moreover, it makes no function
    may_run_at_once = False  # True if another run of f leaves no trace, whether it is needed or not
    names_in_f: Sequence[tuple[str, Any]] | None = None  # with what they are; None if not known
    # that existed before f ran and the rule holds, with their versions
    constants: Sequence[tuple[Tensor, int]] = ()
    variables: Sequence[Tensor] = ()
    # the places in modules of variables that are not Parameters, with the numbers of these
    state: Sequence[tuple[Held, int]] = ()
    anchor: Tensor | None = None  # an empty function of the inputs that are not saved
    autocast: Autocast = ()
    default_device: torch.device | None = None  # of torch while f ran, if one was set
    # the saved tensors as the rule holds them; None if it does not, as far as is known
    raw: list[Tensor | None]
    versions: Sequence[int] = ()  # how often each of these had been changed in place
    inputs_at: Sequence[int | None]  # where the inputs are saved
    own_at: Sequence[int] = ()  # where tensors of a graph are saved that f made for itself

    def __init__(
        self,
        call: Call,
        rule: Rule,
        existing: Existing,
        devices: Sequence[torch.device],
        holdings: Holdings,
        variables: Sequence[Tensor] = (),
    ) -> None:
        self.call = call
        self.rule = rule
        self.existing = existing
        self.devices = devices
        if variables:
            self.variables, self.state = variables, state_of(call.f, variables)
        self.held = holdings.tensors  # the tensors that the rule holds, in order
        self.held_at: list[int | None] = [None] * len(self.held)  # where each is saved
        # True if the rule can read nothing but what it holds
        self.names_libraries = not holdings.objects and library_names(rule.grad_fn) is not None
        self.lock = threading.RLock()  # while the rule holds other tensors
        if is_any_autocast_enabled():
            self.autocast = autocast_state(device_types())

    def complete(self) -> None:
        """Do nothing: a plain run becomes a whole one."""

    @functools.cached_property
    def may_hide(self) -> bool:
        """False if the rule can read nothing but what it holds, and other tensors can be put there for
        a while.
        """
        return not self.names_libraries or any(each.holder is None for each in self.held)

    def reads_no_change(self) -> bool:
        """Return True if what was changed in place, of what is saved, is not read by the first
        order.
        """
        if len(self.versions) < len(self.raw) or all(t is not None for t in self.raw):
            return False
        return all(
            t is None or version_of(t) == was
            for t, was in zip(self.raw, self.versions, strict=True)
        )

    def inputs_among(self, saved: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the inputs among what was saved, or among that as the rule holds it."""
        return [None if at is None else saved[at] for at in self.inputs_at]

    def first_gradients(
        self, saved: Sequence[Tensor], upstreams: Sequence[Tensor], needed: Sequence[bool]
    ) -> Sequence[Tensor | None]:  # fmt: skip
        """Return the gradients of inputs and variables, by the rule as it is, on the very tensors
        that it holds.
        """
        needed = needed[1 : 1 + len(self.devices)]
        if not self.is_emptied:
            inputs = self.inputs_among(self.raw) if self.rule.needs_inputs else ()
            return self.gradients(inputs, upstreams, self.variables, needed)
        own = [t.detach() if t.requires_grad else t for t in saved]
        with self.holding(own):
            return self.gradients(self.inputs_among(own), upstreams, self.variables, needed)

    def holding(self, tensors: Sequence[Tensor | None]) -> Any:
        """Let the rule hold, for a while, what has been made of the saved tensors."""
        places = zip(self.held, self.held_at, strict=True)
        return holding([(held, tensors[at]) for held, at in places if at is not None], self.lock)

    def gradients(
        self, inputs: Sequence[Tensor | None], upstreams: Sequence[Tensor], variables: Sequence[Tensor],
        needed: Sequence[bool] | None = None,
    ) -> list[Tensor | None]:  # fmt: skip
        """Return the rule's gradients of inputs and variables, under autocast and with the state of
        modules as they were when f ran.
        """
        run: Callable[..., Any] = self.rule
        if self.constants:
            run = functools.partial(_may_write, self, run)
        if self.state:
            run = functools.partial(self.with_state, variables, run)
        of_inputs, of_variables = rules.run(
            object(), self.as_first, run, inputs, upstreams, variables, needed
        )
        if of_variables:
            of_variables = move_to([v.device for v in variables], of_variables)
        return [*move_to(self.devices, of_inputs), *of_variables]

    def with_state(self, variables: Sequence[Tensor], function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)`, while modules hold these variables where f read its own."""
        with holding([(place, variables[number]) for place, number in self.state], self.lock):
            return function(*args)

    def run_again(self, inputs: Sequence[Tensor]) -> Any:
        """Run f on the default device of the first run: a backward pass has none, as torch calls it."""
        with self.default_device or contextlib.nullcontext():
            return self.call.run(inputs)

    def as_first(self, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)` under autocast as in the first run; restore the grad mode after
        it.
        """
        before, state = torch.is_grad_enabled(), self.autocast
        if not state and is_any_autocast_enabled():
            state = tuple(
                [(kind, dtype, False) for kind, dtype, _ in autocast_state(device_types())]
            )
        try:
            return under_autocast(state, function, *args) if state else function(*args)
        finally:
            if torch.is_grad_enabled() is not before:
                torch.set_grad_enabled(before)


def run_once(call: Call, inputs: Sequence[Tensor]) -> Any:
    """Run f, restore the grad mode after it, and return what it returned."""
    before, has_cache = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    # a weight that was cast before f ran would be no variable
    torch.set_autocast_cache_enabled(False)
    try:
        if before and makes_leaves(call.f):
            with NoteLeaves():
                return call.run(inputs)
        return call.run(inputs)
    finally:
        torch.set_autocast_cache_enabled(has_cache)
        if torch.is_grad_enabled() is not before:
            torch.set_grad_enabled(before)


def move_to(
    devices: Sequence[torch.device], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients on these devices: what NumPy computed is not there yet."""
    pairs = zip(gradients, devices, strict=True)
    return [g if g is None or g.device == device else g.to(device) for g, device in pairs]


@functools.lru_cache(maxsize=1024)
def _named(function: Any, op: str) -> Function:
    """Return a Function under the name of an op, which anomaly mode and a printed grad_fn then
    show.
    """
    return type(op, (function,), {}).apply  # type: ignore[attr-defined,no-any-return]


# pyright does not take a Function's class for hashable
named: Callable[[Any, str], Function] = _named


def variables_of(
    call: Call, rule: Rule, existing: Existing, inputs: Sequence[Tensor], live: Sequence[Tensor], during: range,
    made: list[Tensor], holdings: Holdings,
) -> tuple[list[Tensor], bool]:  # fmt: skip
    """Return the variables that f read, in the order in which it did, and if it has a graph of its
    own.

    made are the tensors on which an output or the rule depends, live the inputs as they came,
    connected with their graph, and during the numbers of the nodes of the graph that f made.
    """
    in_a_rule = bool(rules.current)
    leaves = captured(call, made, live if in_a_rule else inputs, during, in_a_rule)
    variables = [
        leaf
        for leaf in leaves
        if not _is_made_by_f(call, leaf, during, existing, holdings, leaves, made)
    ]
    call.require_variables(rule, variables)
    return variables, len(variables) < len(leaves)


def _is_made_by_f(
    call: Call, leaf: Tensor, during: range, existing: Existing, holdings: Holdings, *ours: Any
) -> bool:
    """Return True for a leaf that f has made to differentiate something itself: nothing but its
    rule holds it.
    """
    if is_dead_wrapper(leaf):  # of a torch.func.vjp in f, which is over
        return True
    if isinstance(leaf, torch.nn.Parameter) or existing.has(leaf):
        return False
    if (is_new := is_new_leaf(leaf, during)) is not None:
        return is_new
    if gc.get_freeze_count():  # who holds it may be frozen, which get_referrers does not look at
        return False
    known = {*holdings.seen, *map(id, holdings.tensors), *map(id, ours)}
    holders = [x for x in gc.get_referrers(leaf) if type(x).__name__ != "frame"]
    is_made = all(id(x) in known for x in holders)
    note_leaf(leaf, call.f if is_made else None)
    return is_made


# --- What existed before f ran --------------------------------------------------------------------

_written: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""how often rules have written to a tensor"""


def without_rules(t: Tensor) -> int:
    """Return how often a tensor was changed in place, but for what rules have written."""
    return version_of(t) - (int(_written.get(t, 0)) if _written else 0)


def _may_write(run: Run, rule: Callable[..., T], *args: Any) -> T:
    """Return `rule(*args)`, which may write to tensors that existed before f ran: a table, a moving
    average.

    After the rule of a first call has, autograd would refuse the rule of a second call. So they are
    not saved with the other residuals, and any other change of them raises an error here, as for
    saved tensors.
    """
    for t, version in run.constants:
        if without_rules(t) != version:
            raise refusal(RuntimeError, run.call.name,
                          must="a tensor that grad_fn keeps must not be changed in place but by rules",
                          got=f"{describe(t)} that was", do="keep a copy of it")  # fmt: skip
    before = [(t, version_of(t)) for t, _ in run.constants]
    try:
        return rule(*args)
    finally:
        for t, version in before:
            if version_of(t) != version:
                _written[t] = _written.get(t, 0) + version_of(t) - version


# --- Autocast -------------------------------------------------------------------------------------


@functools.cache
def device_types() -> list[str]:
    """Return the kinds of devices for which autocast is set."""
    return (
        ["cpu", torch.accelerator.current_accelerator().type]
        if torch.accelerator.is_available()
        else ["cpu"]
    )


def autocast_state(kinds: Sequence[str]) -> Autocast:
    """Return what autocast is set to, for each of these kinds of devices."""
    return tuple([
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds
    ])  # fmt: skip


def under_autocast(state: Autocast, function: Callable[..., T], *args: Any) -> T:
    """Return `function(*args)`, under autocast as it was. Dynamo traces this, too."""
    if not state:
        return function(*args)
    with torch.autocast(*state[0], cache_enabled=False):
        return under_autocast(state[1:], function, *args)
