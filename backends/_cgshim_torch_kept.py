"""PyTorch: one run of f, and what is kept of it for the backward pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from _cgshim_torch_graph import captured, now, requires_grad

from cgshim._convention import is_differentiable
from cgshim._residuals import Residuals
from cgshim._scope import RuleScope

if TYPE_CHECKING:
    from cgshim._call import Call
    from cgshim._convention import Rule

Tensor = Any
Gradients = tuple["list[Tensor | None]", "list[Tensor | None]"]
Function = Callable[..., tuple[Tensor, ...]]
T = TypeVar("T")

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
    start: int
    """the point in the history of the graph at which f began"""

    def is_captured(self, tensor: Tensor) -> bool:
        """Whether a tensor was there before f began, connected with something: it keeps its own derivative."""
        return tensor.requires_grad and (tensor.is_leaf or tensor.grad_fn._sequence_nr() < self.start)  # type: ignore[no-any-return]


def run(
    call: Call, inputs: Sequence[Tensor], live: Sequence[Tensor], may_depend: Callable[[Tensor], bool] = requires_grad
) -> Run:
    """Run f on inputs; what it captured, and is differentiated, is a variable of it, or refused.

    live are the inputs as they came, connected with what they are made of. may_depend tells of a tensor whether it can
    be connected with anything that is differentiated.
    """
    start = now()
    outputs, rule = call(inputs)
    return examined(call, inputs, live, start, outputs, rule, may_depend)


def examined(
    call: Call,
    inputs: Sequence[Tensor],
    live: Sequence[Tensor],
    start: int,
    outputs: list[Tensor],
    rule: Rule,
    may_depend: Callable[[Tensor], bool] = requires_grad,
) -> Run:
    """What f, which ran since start, has left behind."""
    residuals = Residuals(call, rule, is_tensor, inputs, outputs)
    variables: list[Tensor] = []
    if any(map(may_depend, outputs)) or any(map(may_depend, residuals.others)):
        in_a_rule = bool(rules.current)
        made = [*outputs, *residuals.others]
        variables = captured(call, made, live if in_a_rule else inputs, start, in_a_rule)
        rule.require_variables(variables)
    return Run(outputs, residuals, variables, start)


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
        "autocast", "call", "captured", "changed", "devices", "differentiable", "inputs", "others", "outputs",
        "residuals", "variables",
    )  # fmt: skip

    changed: bool
    """whether f wrote into its arguments"""

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
        own = self.captured.union(self.variables)
        self.differentiable = [at for at in range(self.others) if at not in own and is_differentiable(saved[at].dtype)]
        """the places of the others that are functions of the inputs and of the variables"""
        again = self.differentiable and not call.once_differentiable
        self.inputs: Sequence[int] = range(len(inputs)) if again else run.residuals.inputs
        """which inputs are saved: those that the rule keeps, or all of them where another run may be needed"""
        self.autocast = _autocast_state()

    def apart(self, saved: Sequence[Tensor]) -> Saved:
        """The saved tensors: those of the inputs, of the outputs, and the others with the variables."""
        first_output = len(self.inputs)
        first_other = first_output + len(self.residuals.outputs)
        others = saved[first_other:]
        return Saved(
            _spread(self.inputs, saved, len(self.devices)),
            _spread(self.residuals.outputs, saved[first_output:], self.outputs),
            others[: self.others],
            [others[at] for at in self.variables],
        )

    def gradients(self, saved: Saved, upstreams: Sequence[Tensor]) -> Gradients:
        """What the rule says, under autocast as it was when f ran."""
        rule = self.rule_around(saved)
        of_inputs, of_variables = self.as_first(rules.run, True, rule, saved.inputs, upstreams, saved.variables)
        if of_variables:
            of_variables = list(map(beside, of_variables, [v.device for v in saved.variables]))
        return list(map(beside, of_inputs, self.devices)), of_variables

    def hidden(self) -> list[Any]:
        """What the rule keeps in attributes of objects, where nobody can put other tensors."""
        if all(type(x) in _CONFIGURATION for x in self.residuals.objects):
            return []
        return self.residuals.hidden()

    def rule_around(self, saved: Saved) -> Rule:
        """The rule around what it kept."""
        return self.residuals.around(saved.inputs, saved.outputs, saved.others)

    def as_first(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """`function(*args, **kwargs)` under autocast as it was in the first run."""
        if self.autocast is None and not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        with _autocast(self.autocast):
            return function(*args, **kwargs)


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


def named(function: Any, op: str) -> Function:
    """A Function under the name of an op: anomaly mode and a printed grad_fn tell whose it is."""
    key = function, op
    if key not in _functions:
        _functions[key] = type(op, (function,), {}).apply  # type: ignore[attr-defined]
    return _functions[key]


_functions: dict[tuple[Any, str], Function] = {}


# --- Autocast ---------------------------------------------------------------------------------------------------

Autocast = tuple[tuple[str, torch.dtype, bool], ...]


def _autocast_state() -> Autocast | None:
    """What autocast is set to, for each kind of device; None where it is off."""
    if not torch._C._is_any_autocast_enabled():
        return None
    return tuple([(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in _device_types()])


@functools.cache
def _device_types() -> list[str]:
    return ["cpu", torch.accelerator.current_accelerator().type] if torch.accelerator.is_available() else ["cpu"]


@contextlib.contextmanager
def _autocast(state: Autocast | None) -> Iterator[None]:
    """Set autocast as it was."""
    state = state or tuple([(kind, torch.get_autocast_dtype(kind), False) for kind in _device_types()])
    with contextlib.ExitStack() as stack:
        for kind, dtype, enabled in state:
            stack.enter_context(torch.autocast(kind, dtype, enabled))
        yield
