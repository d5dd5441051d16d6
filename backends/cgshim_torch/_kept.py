"""PyTorch: one run of f, and what is kept from it for the backward pass."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from cgshim.backend import Residuals, RuleScope
from cgshim_torch._buffers import Buffers
from cgshim_torch._graph import captured, requires_grad
from cgshim_torch._leaves import depend_on, made_by
from cgshim_torch._private import is_any_autocast_enabled
from cgshim_torch._state import state_of

if TYPE_CHECKING:
    from cgshim.backend import Call, Rule

Tensor = Any
Gradients = tuple["list[Tensor | None]", "list[Tensor | None]"]
Function = Callable[..., tuple[Tensor, ...]]
T = TypeVar("T")

is_tensor = torch.is_tensor
FLOATS = frozenset(
    x for x in vars(torch).values() if isinstance(x, torch.dtype) and (x.is_floating_point or x.is_complex)
)
"""the dtypes of tensors that have gradients"""
_device = operator.attrgetter("device")

_CONFIGURATION = frozenset([torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, type(torch.mm)])
"""types whose attributes hold no tensors"""

rules: RuleScope[bool] = RuleScope("cgshim_torch_rule")


class Saved(NamedTuple):
    """What autograd has kept from a run, in the order of the run; None for tensors that are not needed."""

    inputs: Sequence[Tensor | None]
    outputs: Sequence[Tensor | None]
    others: Sequence[Tensor]
    variables: Sequence[Tensor]


def called(call: Call, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Rule]:
    """Run f, and restore the grad mode after it."""
    before = torch.is_grad_enabled()
    try:
        return call(inputs)
    finally:
        if torch.is_grad_enabled() is not before:
            torch.set_grad_enabled(before)


class Run(NamedTuple):
    """The result of one run of f: what a Function keeps from it, and the tensors that autograd saves."""

    kept: Kept
    others: list[Tensor]
    """the tensors that the rule keeps and that are neither arguments nor outputs, then further variables"""
    variables: list[Tensor]
    """what f read that is not an argument"""


def examined(
    call: Call,
    inputs: Sequence[Tensor],
    live: Sequence[Tensor],
    during: range,
    outputs: list[Tensor],
    rule: Rule,
    may_depend: Callable[[Tensor], bool] = requires_grad,
) -> Run:
    """Return what a run of f on inputs has left behind; the differentiated tensors that it captured are variables.

    live are the inputs as they came, connected with their graph. during are the numbers of the nodes of the graph that
    f made. may_depend returns True if a tensor can be connected with anything that is differentiated.
    """
    residuals = Residuals(call, rule, is_tensor, inputs, outputs)
    others, residuals.others = residuals.others, []
    variables: list[Tensor] = []
    not_made: Sequence[int] = ()
    if any(map(may_depend, outputs)) or any(map(may_depend, others)):
        variables, of_own_leaves = _variables(call, rule, inputs, live, during, outputs, others)
        not_made = [at for at, t in enumerate(others) if _is_captured(t, during) or id(t) in of_own_leaves]
    return Run(Kept(call, residuals, inputs, len(outputs), others, not_made, variables), others, variables)


def _variables(
    call: Call, rule: Rule, inputs: Sequence[Tensor], live: Sequence[Tensor], during: range, outputs: list[Tensor],
    others: list[Tensor],
) -> tuple[list[Tensor], frozenset[int]]:  # fmt: skip
    """Return the variables that f read, and the identities of the residuals that it made from its own leaves."""
    in_a_rule = bool(rules.current)
    made = [*outputs, *others]
    variables = captured(call, made, live if in_a_rule else inputs, during, in_a_rule)
    of_own_leaves: frozenset[int] = frozenset()
    if any(type(leaf) is not torch.nn.Parameter for leaf in variables):
        own = made_by(call, rule.grad_fn, variables, made, outputs, others)
        variables = [leaf for leaf in variables if not any(leaf is each for each in own)]
        of_own_leaves = frozenset(map(id, depend_on(others, own) if own else ()))
    call.require_variables(rule, variables)
    return variables, of_own_leaves


def _is_captured(tensor: Tensor, during: range) -> bool:
    """Return True if a tensor keeps its own derivative, because f did not make it."""
    return tensor.requires_grad and (tensor.is_leaf or tensor.grad_fn._sequence_nr() not in during)


def _places_of(variables: Sequence[Tensor], saved: list[Tensor]) -> list[int]:
    """Return the places of the variables among the saved tensors; append those that are not residuals."""
    at = {id(tensor): place for place, tensor in enumerate(saved)}
    for variable in variables:
        if id(variable) not in at:
            at[id(variable)] = len(saved)
            saved.append(variable)
    return [at[id(variable)] for variable in variables]


class Kept:
    """What a Function must know about a run, except the tensors, which autograd keeps."""

    __slots__ = (
        "autocast", "buffers", "call", "captured", "changed", "connected", "devices", "differentiable", "inputs",
        "others", "outputs", "residuals", "state", "variables",
    )  # fmt: skip

    changed: bool
    """True if f wrote into its arguments"""

    def __init__(
        self, call: Call, residuals: Residuals, inputs: Sequence[Tensor], outputs: int, saved: list[Tensor],
        not_made: Sequence[int], variables: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Append to saved, the other residuals of the run, the variables that are not among them."""
        self.call = call
        self.residuals = residuals
        self.devices = list(map(_device, inputs))
        self.outputs = outputs
        self.others = len(saved)
        """how many other residuals the rule has; further variables may follow them"""
        self.variables = _places_of(variables, saved) if variables else ()
        """the places of the variables among the others"""
        self.captured = not_made
        """the places of the others that f did not make"""
        self.connected = {*not_made, *self.variables}
        """the places of the others that keep their own derivatives"""
        self.differentiable = _functions_among(saved[: self.others], self.connected) if saved else ()
        """the places of the others that are functions of the inputs and of the variables"""
        again = self.differentiable and not call.once_differentiable
        self.inputs: Sequence[int] = range(len(inputs)) if again else residuals.inputs
        """which inputs are saved: those that the rule keeps, or all of them if another run may be needed"""
        self.autocast = _autocast_state() if is_any_autocast_enabled() else None
        self.state = state_of(call.f, variables) if variables else None
        self.buffers: Buffers | None = None
        """what the rule may write to"""
        self.changed = False

    def apart(self, saved: Sequence[Tensor]) -> Saved:
        """Return the saved tensors: those of the inputs, of the outputs, and the others with the variables."""
        first_output = len(self.inputs)
        first_other = first_output + len(self.residuals.outputs)
        others = saved[first_other:]
        if self.buffers is not None:
            others = self.buffers.among(others)
        return Saved(
            _spread(self.inputs, saved, len(self.devices)),
            _spread(self.residuals.outputs, saved[first_output:], self.outputs),
            others[: self.others],
            list(map(others.__getitem__, self.variables)),
        )

    def gradients(self, saved: Saved, upstreams: Sequence[Tensor]) -> Gradients:
        """Return the rule's gradients, under autocast and with the state of modules as they were when f ran."""
        run: Callable[..., Gradients] = self.rule_around(saved)
        if self.buffers is not None:
            run = functools.partial(self.buffers.written_by, run)
        if self.state is not None:
            run = functools.partial(self.state.run_with, saved.variables, run)
        of_inputs, of_variables = self.as_first(rules.run, True, run, saved.inputs, upstreams, saved.variables)
        if of_variables:
            of_variables = list(map(beside, of_variables, map(_device, saved.variables)))
        return list(map(beside, of_inputs, self.devices)), of_variables

    def hidden(self) -> list[Any]:
        """Return what the rule keeps in attributes of objects, where it cannot be replaced."""
        if all(type(x) in _CONFIGURATION for x in self.residuals.objects):
            return []
        return self.residuals.hidden()

    def rule_around(self, saved: Saved) -> Rule:
        """Return the rule around what it kept."""
        return self.residuals.around(saved.inputs, saved.outputs, saved.others)

    def as_first(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return `function(*args, **kwargs)` under autocast as in the first run; restore the grad mode after it."""
        before = torch.is_grad_enabled()
        try:
            if self.autocast is None and not is_any_autocast_enabled():
                return function(*args, **kwargs)
            with _autocast(self.autocast):
                return function(*args, **kwargs)
        finally:
            if torch.is_grad_enabled() is not before:
                torch.set_grad_enabled(before)


def _functions_among(residuals: Sequence[Tensor], connected: Collection[int]) -> list[int]:
    """Return the places of the residuals that are floats and not connected with what they depend on."""
    return [at for at, t in enumerate(residuals) if at not in connected and t.dtype in FLOATS]


def _spread(places: Sequence[int], tensors: Sequence[Tensor], count: int) -> Sequence[Tensor | None]:
    """Return a list of this length with the first of the tensors in these places."""
    if len(places) == count:
        return tensors[:count]
    spread: list[Tensor | None] = [None] * count
    for at, tensor in zip(places, tensors, strict=False):
        spread[at] = tensor
    return spread


def beside(gradient: Tensor | None, device: Any) -> Tensor | None:
    """Return gradient on a device: what NumPy computed is not there yet."""
    return gradient if gradient is None or gradient.device == device else gradient.to(device)


def _make(function: Any, op: str) -> Function:
    apply: Function = type(op, (function,), {}).apply  # type: ignore[attr-defined]
    return apply


named: Callable[[Any, str], Function] = functools.lru_cache(maxsize=1024)(_make)
"""Returns a Function under the name of an op, which anomaly mode and a printed grad_fn then show."""


# --- Autocast ---------------------------------------------------------------------------------------------------

Autocast = tuple[tuple[str, torch.dtype, bool], ...]


def _autocast_state() -> Autocast:
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
