"""PyTorch: one run of f, and what is kept of it for the backward pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from cgshim._convention import is_differentiable
from cgshim._residuals import Residuals
from cgshim._scope import RuleScope
from cgshim_torch._buffers import NONE, Buffers
from cgshim_torch._graph import captured, now, requires_grad, since
from cgshim_torch._leaves import depend_on, made_by
from cgshim_torch._state import state_of

if TYPE_CHECKING:
    from cgshim._call import Call
    from cgshim._convention import Rule

Tensor = Any
Gradients = tuple["list[Tensor | None]", "list[Tensor | None]"]
Function = Callable[..., tuple[Tensor, ...]]
T = TypeVar("T")

_NOTHING = contextlib.nullcontext()

is_tensor = torch.is_tensor

_CONFIGURATION = frozenset([torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, type(torch.mm)])
"""types whose attributes hold no tensors"""

rules: RuleScope[bool] = RuleScope("cgshim_torch_rule")


class Saved(NamedTuple):
    """What autograd has kept of a run, in the order of the run; None where nobody needs a tensor."""

    inputs: Sequence[Tensor | None]
    outputs: Sequence[Tensor | None]
    others: Sequence[Tensor]
    variables: Sequence[Tensor]


class Run(NamedTuple):
    """One run of f: its outputs, what its rule keeps, and what it read without being given it."""

    outputs: list[Tensor]
    residuals: Residuals
    variables: list[Tensor]
    during: range
    """the numbers of the nodes of the graph that f made"""
    of_own_leaves: frozenset[int]
    """the identities of the residuals that f made of leaves of its own"""

    def is_captured(self, tensor: Tensor) -> bool:
        """Whether a tensor keeps its own derivative: f did not make it, or the rule differentiates it itself."""
        if not tensor.requires_grad:
            return False
        return tensor.is_leaf or tensor.grad_fn._sequence_nr() not in self.during or id(tensor) in self.of_own_leaves


def run(
    call: Call, inputs: Sequence[Tensor], live: Sequence[Tensor], may_depend: Callable[[Tensor], bool] = requires_grad
) -> Run:
    """Run f on inputs; what it captured, and is differentiated, is a variable of it, or refused.

    live are the inputs as they came, connected with what they are made of. may_depend tells of a tensor whether it can
    be connected with anything that is differentiated.
    """
    start = now()
    outputs, rule = called(call, inputs)
    return examined(call, inputs, live, since(start), outputs, rule, may_depend)


def called(call: Call, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Rule]:
    """f's outputs and its rule; gradients are recorded or not as before, whatever f leaves on or off."""
    before = torch.is_grad_enabled()
    try:
        return call(inputs)
    finally:
        if torch.is_grad_enabled() is not before:
            torch.set_grad_enabled(before)


def examined(
    call: Call,
    inputs: Sequence[Tensor],
    live: Sequence[Tensor],
    during: range,
    outputs: list[Tensor],
    rule: Rule,
    may_depend: Callable[[Tensor], bool] = requires_grad,
) -> Run:
    """What a run of f has left behind."""
    residuals = Residuals(call, rule, is_tensor, inputs, outputs)
    variables: list[Tensor] = []
    of_own_leaves: frozenset[int] = frozenset()
    if any(map(may_depend, outputs)) or any(map(may_depend, residuals.others)):
        in_a_rule = bool(rules.current)
        made = [*outputs, *residuals.others]
        variables = captured(call, made, live if in_a_rule else inputs, during, in_a_rule)
        if any(type(leaf) is not torch.nn.Parameter for leaf in variables):
            own = made_by(call, rule.grad_fn, variables, made, outputs, residuals.others)
            variables = [leaf for leaf in variables if not any(leaf is each for each in own)]
            of_own_leaves = frozenset(map(id, depend_on(residuals.others, own) if own else ()))
        rule.require_variables(variables)
    return Run(outputs, residuals, variables, during, of_own_leaves)


def _places_of(variables: Sequence[Tensor], saved: list[Tensor]) -> list[int]:
    """Where the variables stand among the saved tensors, put there where they are not residuals too."""
    if not variables:
        return []
    at = {id(tensor): place for place, tensor in enumerate(saved)}
    for variable in variables:
        if id(variable) not in at:
            at[id(variable)] = len(saved)
            saved.append(variable)
    return [at[id(variable)] for variable in variables]


class Kept:
    """What a Function has to know of a run, but for the tensors, which autograd keeps."""

    __slots__ = (
        "autocast", "buffers", "call", "captured", "changed", "connected", "devices", "differentiable", "inputs",
        "others", "outputs", "residuals", "state", "variables",
    )  # fmt: skip

    changed: bool
    """whether f wrote into its arguments"""
    buffers: Buffers
    """the others that the rule may write to"""

    def __init__(self, call: Call, run: Run, inputs: Sequence[Tensor], saved: list[Tensor]) -> None:
        """saved are the other residuals of the run, to which the variables are added that are none of them."""
        self.call = call
        self.residuals = run.residuals
        self.devices = [x.device for x in inputs]
        self.outputs = len(run.outputs)
        self.others = len(saved)
        """how many other residuals the rule has; further variables may follow them"""
        self.variables = _places_of(run.variables, saved)
        """the places of the variables among the others"""
        self.captured = frozenset([at for at in range(self.others) if run.is_captured(saved[at])])
        """the places of the others that f did not make"""
        self.connected = self.captured.union(self.variables)
        """the places of the others that keep their own derivatives"""
        self.differentiable = [
            at for at in range(self.others) if at not in self.connected and is_differentiable(saved[at].dtype)
        ]
        """the places of the others that are functions of the inputs and of the variables"""
        again = self.differentiable and not call.once_differentiable
        self.inputs: Sequence[int] = range(len(inputs)) if again else run.residuals.inputs
        """which inputs are saved: those that the rule keeps, or all of them where another run may be needed"""
        self.autocast = _autocast_state()
        self.state = state_of(call.f, run.variables) if run.variables else None
        self.buffers = NONE

    def apart(self, saved: Sequence[Tensor]) -> Saved:
        """The saved tensors: those of the inputs, of the outputs, and the others with the variables."""
        first_output = len(self.inputs)
        first_other = first_output + len(self.residuals.outputs)
        others = saved[first_other:]
        if self.buffers:
            others = self.buffers.among(others)
        return Saved(
            _spread(self.inputs, saved, len(self.devices)),
            _spread(self.residuals.outputs, saved[first_output:], self.outputs),
            others[: self.others],
            [others[at] for at in self.variables],
        )

    def gradients(self, saved: Saved, upstreams: Sequence[Tensor]) -> Gradients:
        """What the rule says, under autocast as it was when f ran."""
        rule = self.rule_around(saved)
        run = functools.partial(self.buffers.written_by, rule) if self.buffers else rule
        with self.with_state(saved):
            of_inputs, of_variables = self.as_first(rules.run, True, run, saved.inputs, upstreams, saved.variables)
        if of_variables:
            of_variables = list(map(beside, of_variables, [v.device for v in saved.variables]))
        return list(map(beside, of_inputs, self.devices)), of_variables

    def with_state(self, saved: Saved) -> contextlib.AbstractContextManager[None]:
        """The modules that f read hold what they held then."""
        return self.state.put_back(saved.variables) if self.state else _NOTHING

    def hidden(self) -> list[Any]:
        """What the rule keeps in attributes of objects, where nobody can put other tensors."""
        if all(type(x) in _CONFIGURATION for x in self.residuals.objects):
            return []
        return self.residuals.hidden()

    def rule_around(self, saved: Saved) -> Rule:
        """The rule around what it kept."""
        return self.residuals.around(saved.inputs, saved.outputs, saved.others)

    def as_first(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """`function(*args, **kwargs)` under autocast as it was in the first run; the grad mode is restored after it."""
        before = torch.is_grad_enabled()
        try:
            if self.autocast is None and not torch._C._is_any_autocast_enabled():
                return function(*args, **kwargs)
            with _autocast(self.autocast):
                return function(*args, **kwargs)
        finally:
            if torch.is_grad_enabled() is not before:
                torch.set_grad_enabled(before)


def _spread(places: Sequence[int], tensors: Sequence[Tensor], count: int) -> Sequence[Tensor | None]:
    """The first of the tensors, each at its place among this many."""
    if len(places) == count:
        return tensors[:count]
    spread: list[Tensor | None] = [None] * count
    for at, tensor in zip(places, tensors, strict=False):
        spread[at] = tensor
    return spread


def beside(gradient: Tensor | None, device: Any) -> Tensor | None:
    """gradient on a device: what NumPy computed is not there yet."""
    return gradient if gradient is None or gradient.device == device else gradient.to(device)


def _make(function: Any, op: str) -> Function:
    apply: Function = type(op, (function,), {}).apply  # type: ignore[attr-defined]
    return apply


named: Callable[[Any, str], Function] = functools.lru_cache(maxsize=1024)(_make)
"""A Function under the name of an op: anomaly mode and a printed grad_fn tell whose it is."""


# --- Autocast ---------------------------------------------------------------------------------------------------

Autocast = tuple[tuple[str, torch.dtype, bool], ...]


def _autocast_state() -> Autocast | None:
    """What autocast is set to, for each kind of device; None where it is off."""
    if not torch._C._is_any_autocast_enabled():
        return None
    return tuple([(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in device_types()])


@functools.cache
def device_types() -> list[str]:
    """The kinds of devices that autocast is set for."""
    return ["cpu", torch.accelerator.current_accelerator().type] if torch.accelerator.is_available() else ["cpu"]


@contextlib.contextmanager
def _autocast(state: Autocast | None) -> Iterator[None]:
    """Set autocast as it was."""
    state = state or tuple([(kind, torch.get_autocast_dtype(kind), False) for kind in device_types()])
    with contextlib.ExitStack() as stack:
        for kind, dtype, enabled in state:
            stack.enter_context(torch.autocast(kind, dtype, enabled))
        yield
