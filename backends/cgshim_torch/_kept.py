"""PyTorch: one run of f, and what is kept from it for the backward pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from cgshim.backend import Residuals, RuleScope
from cgshim_torch._buffers import Buffers
from cgshim_torch._graph import captured, requires_grad
from cgshim_torch._leaves import depend_on, made_by
from cgshim_torch._private import is_any_autocast_enabled
from cgshim_torch._state import State, state_of

if TYPE_CHECKING:
    from cgshim.backend import Call, Rule

Tensor = Any
Gradients = tuple["list[Tensor | None]", "list[Tensor | None]"]
Function = Callable[..., tuple[Tensor, ...]]
Autocast = tuple[tuple[str, torch.dtype, bool], ...]
T = TypeVar("T")

is_tensor = torch.is_tensor
FLOATS = frozenset(
    x for x in vars(torch).values() if isinstance(x, torch.dtype) and (x.is_floating_point or x.is_complex)
)
"""the dtypes of tensors that have gradients"""

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


Run = tuple["Kept", list[Tensor], list[Tensor]]
"""What a run of f left behind: what a Function keeps from it; the tensors that the rule keeps and that are neither
arguments nor outputs, then further variables; and the variables, that is, what f read that is not an argument."""


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
    kept = Kept(call, residuals, inputs, len(outputs))
    others, residuals.others = residuals.others, []
    if any(map(may_depend, outputs)) or any(map(may_depend, others)):
        variables, of_own_leaves = _variables(call, rule, inputs, live, during, outputs, others)
        not_made = [at for at, t in enumerate(others) if _is_captured(t, during) or id(t) in of_own_leaves]
        kept.connect(others, not_made, variables)
    else:
        variables = []
        if others:
            kept.connect(others)
    return kept, others, variables


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

    inputs: Sequence[int]
    """which inputs are saved: those that the rule keeps, or all of them if another run may be needed"""
    others: int = 0
    """how many other residuals the rule has; further variables may follow them"""
    variables: Sequence[int] = ()
    """the places of the variables among the others"""
    captured: Sequence[int] = ()
    """the places of the others that f did not make"""
    connected: Collection[int] = ()
    """the places of the others that keep their own derivatives"""
    differentiable: Sequence[int] = ()
    """the places of the others that are functions of the inputs and of the variables"""
    autocast: Autocast | None = None
    """what autocast was set to, if it was on"""
    state: State | None = None
    """the places in modules of variables that are not Parameters"""
    buffers: Buffers | None = None
    """what the rule may write to"""
    changed = False
    """True if f wrote into its arguments"""
    constants: Sequence[str] = ()
    """an op on the host for each level of forward mode at which its results were constants"""

    def __init__(self, call: Call, residuals: Residuals, inputs: Sequence[Tensor], outputs: int) -> None:
        self.call = call
        self.residuals = residuals
        self.inputs = residuals.inputs
        self.outputs = outputs
        self.devices = [x.device for x in inputs]
        if is_any_autocast_enabled():
            self.autocast = _autocast_state()

    def connect(self, others: list[Tensor], not_made: Sequence[int] = (), variables: Sequence[Tensor] = ()) -> None:
        """Take note of the other residuals; append to them the variables that are not among them."""
        self.others = len(others)
        if variables:
            self.variables = _places_of(variables, others)
            self.state = state_of(self.call.f, variables)
        self.captured = not_made
        self.connected = {*not_made, *self.variables}
        self.differentiable = _functions_among(others[: self.others], self.connected)
        if self.differentiable and not self.call.once_differentiable:
            self.inputs = range(len(self.devices))

    def apart(self, saved: Sequence[Tensor]) -> Saved:
        """Return the saved tensors: those of the inputs, of the outputs, and the others with the variables."""
        outputs, first_output = self.residuals.outputs, len(self.inputs)
        others = saved[first_output + len(outputs) :]
        if self.buffers is not None:
            others = self.buffers.among(others)
        return Saved(
            _spread(self.inputs, saved, len(self.devices)),
            _spread(outputs, saved[first_output:], self.outputs) if outputs else [None] * self.outputs,
            others[: self.others],
            [others[at] for at in self.variables] if self.variables else (),
        )

    def gradients(
        self, saved: Saved, upstreams: Sequence[Tensor], needed: Sequence[bool] | None = None
    ) -> Gradients:  # fmt: skip
        """Return the rule's gradients, under autocast and with the state of modules as they were when f ran."""
        run: Callable[..., Gradients] = self.residuals.around(saved.inputs, saved.outputs, saved.others)
        if self.buffers is not None:
            run = functools.partial(self.buffers.written_by, run)
        if self.state is not None:
            run = functools.partial(self.state.run_with, saved.variables, run)
        token = rules.enter(True)
        try:
            of_inputs, of_variables = self.as_first(run, saved.inputs, upstreams, saved.variables, needed)
        finally:
            rules.leave(token)
        if of_variables:
            of_variables = beside(of_variables, [v.device for v in saved.variables])
        return beside(of_inputs, self.devices), of_variables

    def hidden(self) -> list[Any]:
        """Return what the rule keeps in attributes of objects, where it cannot be replaced."""
        if all(type(x) in _CONFIGURATION for x in self.residuals.objects):
            return []
        return self.residuals.hidden()

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


def beside(gradients: Sequence[Tensor | None], devices: Sequence[Any]) -> list[Tensor | None]:
    """Return the gradients on these devices: what NumPy computed is not there yet."""
    pairs = zip(gradients, devices, strict=True)
    return [g if g is None or g.device == device else g.to(device) for g, device in pairs]


def _make(function: Any, op: str) -> Function:
    apply: Function = type(op, (function,), {}).apply  # type: ignore[attr-defined]
    return apply


named: Callable[[Any, str], Function] = functools.lru_cache(maxsize=1024)(_make)
"""Returns a Function under the name of an op, which anomaly mode and a printed grad_fn then show."""


# --- Autocast ---------------------------------------------------------------------------------------------------


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
