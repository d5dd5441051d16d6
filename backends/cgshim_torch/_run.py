"""PyTorch: one run of f, and what a Function needs of it in the backward pass besides the saved tensors."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from cgshim.backend import RuleScope, describe, sentence
from cgshim_torch._existing import Existing, version_of
from cgshim_torch._graph import captured
from cgshim_torch._private import is_any_autocast_enabled
from cgshim_torch._residuals import Held, Holdings
from cgshim_torch._state import State

if TYPE_CHECKING:
    from cgshim.backend import Call, Rule

Tensor = Any
Gradients = tuple["list[Tensor | None]", "list[Tensor | None]"]
Function = Callable[..., tuple[Tensor, ...]]
Autocast = tuple[tuple[str, torch.dtype, bool], ...]
T = TypeVar("T")

rules: RuleScope[bool] = RuleScope("cgshim_torch_rule")


class Run:
    """A run of f whose rule is differentiated: the rule as f returned it, and which of its tensors are saved."""

    changed = False
    """True if f wrote into its arguments"""
    state: State | None = None
    """the places in modules of variables that are not Parameters"""
    constants: Constants | None = None
    """what existed before f ran and its rule holds"""
    is_emptied = False
    """True if the rule holds none of its tensors until it runs: hooks on saved tensors look after them"""
    reads_variables_alone = False
    """True if all that the rule can read is in variables and lists that it holds, and it makes no function"""
    may_hide = True
    """False if the rule can read nothing but variables and lists that can hold other tensors for a while"""
    anchor: Tensor | None = None
    """an empty function of the inputs that are not saved"""

    def __init__(
        self, call: Call, rule: Rule, existing: Existing, devices: Sequence[torch.device], held: list[Held]
    ) -> None:
        self.call = call
        self.rule = rule
        self.existing = existing
        self.devices = devices
        self.held = held
        """the tensors that the rule holds, in order"""
        self.held_at: list[int | None] = [None] * len(held)
        """where each is saved"""
        self.raw: list[Tensor | None] = []
        """the saved tensors as the rule holds them"""
        self.inputs_at: list[int | None] = [None] * len(devices)
        """where the inputs are saved"""
        self.outputs_at: list[int] = []
        """where outputs are saved"""
        self.own_at: list[int] = []
        """where tensors of a graph are saved that f made for itself"""
        self.variables: Sequence[Tensor] = ()
        self.lock = threading.RLock()
        """held while the rule holds other tensors"""
        self.autocast = autocast_state() if is_any_autocast_enabled() else None

    def inputs_among(self, saved: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the inputs that were saved."""
        return [None if at is None else saved[at] for at in self.inputs_at]

    def gradients(
        self, inputs: Sequence[Tensor | None], upstreams: Sequence[Tensor], variables: Sequence[Tensor],
        needed: Sequence[bool] | None = None,
    ) -> Gradients:  # fmt: skip
        """Return the rule's gradients, under autocast and with the state of modules as they were when f ran."""
        run: Callable[..., Gradients] = self.rule
        if self.constants is not None:
            run = functools.partial(self.constants.written_by, run)
        if self.state is not None:
            run = functools.partial(self.state.run_with, variables, run)
        token = rules.enter(True)
        try:
            of_inputs, of_variables = self.as_first(run, inputs, upstreams, variables, needed)
        finally:
            rules.leave(token)
        if of_variables:
            of_variables = move_to([v.device for v in variables], of_variables)
        return move_to(self.devices, of_inputs), of_variables

    def as_first(self, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)` under autocast as in the first run; restore the grad mode after it."""
        before = torch.is_grad_enabled()
        try:
            if self.autocast is None and not is_any_autocast_enabled():
                return function(*args)
            with _autocast(self.autocast):
                return function(*args)
        finally:
            if torch.is_grad_enabled() is not before:
                torch.set_grad_enabled(before)


def run_once(call: Call, inputs: Sequence[Tensor]) -> Any:
    """Run f, restore the grad mode after it, and return what it returned."""
    before = torch.is_grad_enabled()
    try:
        return call.run(inputs)
    finally:
        if torch.is_grad_enabled() is not before:
            torch.set_grad_enabled(before)


def move_to(devices: Sequence[torch.device], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients on these devices: what NumPy computed is not there yet."""
    pairs = zip(gradients, devices, strict=True)
    return [g if g is None or g.device == device else g.to(device) for g, device in pairs]


def _make(function: Any, op: str) -> Function:
    apply: Function = type(op, (function,), {}).apply  # type: ignore[attr-defined]
    return apply


named: Callable[[Any, str], Function] = functools.lru_cache(maxsize=1024)(_make)
"""Returns a Function under the name of an op, which anomaly mode and a printed grad_fn then show."""


# --- Variables --------------------------------------------------------------------------------------------------


def variables_of(
    call: Call, rule: Rule, existing: Existing, inputs: Sequence[Tensor], live: Sequence[Tensor], during: range,
    made: list[Tensor], holdings: Holdings,
) -> tuple[list[Tensor], bool]:  # fmt: skip
    """Return the variables that f read, in the order in which it did, and if it has a graph of its own.

    made are the tensors on which an output or the rule depends, live the inputs as they came, connected with their
    graph, and during the numbers of the nodes of the graph that f made.
    """
    in_a_rule = bool(rules.current)
    leaves = captured(call, made, live if in_a_rule else inputs, during, in_a_rule)
    variables = [leaf for leaf in leaves if not _is_made_by_f(leaf, existing, holdings, leaves, made)]
    call.require_variables(rule, variables)
    return variables, len(variables) < len(leaves)


def _is_made_by_f(leaf: Tensor, existing: Existing, holdings: Holdings, *ours: Any) -> bool:
    """Return True for a leaf that f has made to differentiate something itself: nothing but its rule holds it."""
    if isinstance(leaf, torch.nn.Parameter) or existing.has(leaf):
        return False
    known = {*holdings.seen, *map(id, holdings.tensors), *map(id, ours)}
    return all(id(x) in known for x in gc.get_referrers(leaf) if type(x).__name__ != "frame")


# --- What existed before f ran ------------------------------------------------------------------------------------


class Constants:
    """Tensors of a rule that existed before f ran: a mask, a table, a moving average that rules write to.

    After the rule of a first call has written to one, autograd would refuse the rule of a second call. So they are not
    saved with the others: rules may write to them, and any other change raises an error, as for saved tensors.
    """

    def __init__(self, op: str, tensors: Sequence[Tensor]) -> None:
        self._op = op
        self._tensors = [(t, _version_without_rules(t)) for t in tensors]

    def written_by(self, rule: Callable[..., T], *args: Any) -> T:
        """Return `rule(*args)`, which may write to them."""
        for t, version in self._tensors:
            if _version_without_rules(t) != version:
                raise RuntimeError(
                    sentence(self._op, must="a tensor that grad_fn keeps must not be changed in place but by rules",
                             got=f"{describe(t)} that was", do="keep a copy of it")
                )  # fmt: skip
        before = [version_of(t) for t, _ in self._tensors]
        try:
            return rule(*args)
        finally:
            for (t, _), version in zip(self._tensors, before, strict=True):
                if version_of(t) != version:
                    _written[t] = _written.get(t, 0) + version_of(t) - version


_written: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""how often rules have written to a tensor"""


def _version_without_rules(t: Tensor) -> int:
    return version_of(t) - (int(_written.get(t, 0)) if _written else 0)


# --- Autocast ---------------------------------------------------------------------------------------------------


def autocast_state() -> Autocast:
    """Return what autocast is set to, for each kind of device."""
    return tuple([(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in device_types()])


@functools.cache
def device_types() -> list[str]:
    """Return the kinds of devices for which autocast is set."""
    return ["cpu", torch.accelerator.current_accelerator().type] if torch.accelerator.is_available() else ["cpu"]


@contextlib.contextmanager
def _autocast(state: Autocast | None) -> Iterator[None]:
    """Set autocast as it was."""
    state = state or tuple([(kind, torch.get_autocast_dtype(kind), False) for kind in device_types()])
    with contextlib.ExitStack() as stack:
        for kind, dtype, enabled in state:
            stack.enter_context(torch.autocast(kind, dtype, enabled))
        yield
