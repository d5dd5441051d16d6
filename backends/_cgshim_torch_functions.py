"""PyTorch: run, then attach.

f runs first, with gradients on and, in eager mode, on detached inputs, so that the graph records what f captured and
nothing else. Then a Function is attached that returns aliases of f's outputs. It saves the inputs, the variables and
the tensors in grad_fn's closure as autograd wants them saved: hooks and checkpoints see them, in-place changes are
noticed, and nothing is held in a cycle. A derivative of the derivative runs f again, on the saved inputs, for
residuals that are functions of them.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from _cgshim_torch_graph import (
    captured,
    is_transformed,
    is_wrapped_or_requires_grad,
    now,
    refuse_captured_tangents,
    requires_grad,
)
from torch._C import _functorch as functorch
from torch._functorch.autograd_function import custom_function_call
from torch.autograd import forward_ad

from cgshim._closure import Recipe, lift

if TYPE_CHECKING:
    from cgshim._call import Call
    from cgshim._convention import Rule

Tensor = Any
Function = Callable[..., tuple[Tensor, ...]]
Gradients = tuple["list[Tensor | None]", "list[Tensor | None]"]


is_tensor = torch.is_tensor


def differentiable(call: Call, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """f's outputs, with the rule for their gradient where anything can be differentiated."""
    if is_transformed():
        return transformed(call, inputs)
    return attached(call, inputs) if torch.is_grad_enabled() else call(inputs)[0]


# --- One run of f -----------------------------------------------------------------------------------------------

_a_rule_runs: contextvars.ContextVar[bool] = contextvars.ContextVar("cgshim_torch_a_rule_runs", default=False)


def run(
    call: Call, inputs: Sequence[Tensor], may_depend: Callable[[Tensor], bool] = requires_grad
) -> tuple[list[Tensor], list[Tensor], KeptRule]:
    """f's outputs; the inputs, residuals and variables, for autograd to save; and the rule, to be put round them.

    may_depend tells of a tensor whether it can be connected with anything that is differentiated.
    """
    start = now()
    outputs, rule = call(inputs)
    saved, grad_fn_round = lift(rule.grad_fn, is_tensor, call.f, known=inputs)
    places: list[int] = []
    made = [*outputs, *saved]
    # in a rule captured tensors are constants: an op there defines the second order itself
    if any(map(may_depend, made)) and not _a_rule_runs.get():
        variables = captured(call, made, inputs, start)
        rule.require_variables(variables)
        places = _places_of(variables, saved)
    rule.grad_fn = _released
    return outputs, saved, KeptRule(call, rule, grad_fn_round, places, len(inputs), len(outputs))


def _places_of(variables: Sequence[Tensor], saved: list[Tensor]) -> list[int]:
    """Where the variables stand among the saved tensors, put there where they are not residuals too."""
    at = {id(tensor): place for place, tensor in enumerate(saved)}
    for variable in variables:
        if id(variable) not in at:
            at[id(variable)] = len(saved)
            saved.append(variable)
    return [at[id(variable)] for variable in variables]


class KeptRule:
    """The rule of a run without the tensors in its closure, which autograd keeps: what a Function has to know."""

    __slots__ = ("autocast", "call", "grad_fn_round", "inputs", "outputs", "rule", "variables")

    def __init__(
        self, call: Call, rule: Rule, grad_fn_round: Recipe, variables: list[int], inputs: int, outputs: int
    ) -> None:
        self.call = call
        self.rule = rule
        self.grad_fn_round = grad_fn_round
        self.variables = variables
        """their places among the saved tensors"""
        self.inputs = inputs
        self.outputs = outputs
        self.autocast = _autocast_state()

    def gradients(self, saved: Sequence[Tensor], upstreams: Sequence[Tensor], again: bool = False) -> Gradients:
        """What the rule says; f runs again for residuals that are functions of the saved inputs."""
        if self.autocast is not None or torch._C._is_any_autocast_enabled():
            with _autocast(self.autocast):
                return self._gradients(saved, upstreams, again)
        return self._gradients(saved, upstreams, again)

    def _gradients(self, saved: Sequence[Tensor], upstreams: Sequence[Tensor], again: bool) -> Gradients:
        rule = self._of_another_run(saved) if again else self.rule.with_grad_fn(self.grad_fn_round(saved))
        token = _a_rule_runs.set(True)
        try:
            return rule(saved[: self.inputs], upstreams, self.variables_among(saved))
        finally:
            _a_rule_runs.reset(token)

    def variables_among(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """The variables that f read."""
        return [saved[at] for at in self.variables] if self.variables else []

    def _of_another_run(self, saved: Sequence[Tensor]) -> Rule:
        inputs = saved[: self.inputs]
        _, rule = self.call(inputs)
        residuals, _ = lift(rule.grad_fn, is_tensor, self.call.f, known=inputs)
        if not all(map(_agree, residuals, saved)):
            self.call.refuse("a second order runs f again, which must give grad_fn the same tensors", "others",
                             "draw random numbers outside, and pass them as an argument")  # fmt: skip
        return rule


def _released(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a kept rule is put round the saved tensors before it is called")


def _agree(a: Tensor, b: Tensor) -> bool:
    """Whether two runs of f gave the same residual, but for the order of sums."""
    if a is b or a.is_meta or type(a) not in (torch.Tensor, torch.nn.Parameter) or a.layout is not torch.strided:
        return True
    exact = not (a.is_floating_point() or a.is_complex())
    tolerance = 0.0 if exact else 100 * torch.finfo(a.dtype).eps
    same = a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=not exact)
    return bool(same)


# --- Eager mode -------------------------------------------------------------------------------------------------


def attached(call: Call, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """f's outputs with the rule for their gradient, where anything is differentiated at all."""
    differentiated = any(map(requires_grad, inputs))
    outputs, saved, kept = run(call, [x.detach() for x in inputs] if differentiated else inputs)
    if not (differentiated or kept.variables):
        return [y.detach() if y.requires_grad else y for y in outputs]
    alive = map(functorch.unwrap_if_dead, inputs)
    return _named(_Attached, call.name)(kept, outputs, saved, *alive, *kept.variables_among(saved))


class _Attached(torch.autograd.function._SingleLevelFunction):  # type: ignore[misc]
    """Returns aliases of a run's outputs, whose gradients come from the rule of the run.

    It is applied outside of torch.func alone: Function.apply would ask for that again, at length.
    """

    @staticmethod
    def forward(
        ctx: Any, kept: KeptRule, outputs: list[Tensor], saved: list[Tensor], *differentiated: Tensor
    ) -> tuple[Tensor, ...]:
        inputs = differentiated[: kept.inputs]
        ctx.kept = kept
        ctx.save_for_backward(*inputs, *[t if t.is_leaf else t.detach() for t in saved[kept.inputs :]])
        return tuple([_alias(y, saved, inputs) for y in outputs])

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        kept, saved = ctx.kept, ctx.saved_tensors
        gradients, of_variables = kept.gradients(saved, upstreams, again=torch.is_grad_enabled())
        of_variables = map(_beside, of_variables, kept.variables_among(saved))
        return None, None, None, *map(_beside, gradients, saved), *of_variables


def _named(function: Any, op: str) -> Function:
    """A Function under the name of an op: anomaly mode and a printed grad_fn tell whose it is."""
    key = function, op
    if key not in _functions:
        _functions[key] = type(op, (function,), {}).apply  # type: ignore[attr-defined]
    return _functions[key]


_functions: dict[tuple[Any, str], Function] = {}


def _alias(output: Tensor, detached: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
    """output as a tensor of its own; as a view of the input that it shows, which autograd guards as one."""
    base = output._base if output._is_view() else None
    for hidden, x in zip(detached, inputs, strict=False):
        if output is hidden:
            return x
        if base is hidden:
            return x.as_strided(output.size(), output.stride(), output.storage_offset())
    return output.detach()


def _beside(gradient: Tensor | None, x: Tensor) -> Tensor | None:
    """gradient on x's device: what NumPy computed is not there yet."""
    return gradient if gradient is None or gradient.device == x.device else gradient.to(x.device)


# --- The transformations of torch.func, and dual numbers --------------------------------------------------------


def transformed(call: Call, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """f's outputs with the rule for their gradient, at every level of the transformations that are active.

    f runs on the inputs as they are: its residuals are functions of them at every level already. A detached output
    has no gradient but the rule's, so a transformation that lost the rule could not answer with autodiff's.
    """
    outputs, saved, kept = run(call, inputs, may_depend=is_wrapped_or_requires_grad)
    if forward_ad._current_level >= 0 and not _a_rule_runs.get():
        refuse_captured_tangents(call, outputs, inputs)
    return _named(_Transformed, call.name)(kept, *saved, *[y.detach() for y in outputs])


class _Transformed(torch.autograd.Function):  # type: ignore[misc]
    """Returns aliases of outputs, whose gradients come from a rule, inside the transformations of torch.func."""

    generate_vmap_rule = True

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Function.apply without its look at forward's signature, which takes 15 us a call and level."""
        if functorch.maybe_current_level() is None:  # dual numbers alone
            return super(torch.autograd.Function, cls).apply(*args)
        return custom_function_call(cls, *args)

    @staticmethod
    def forward(kept: KeptRule, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([y.detach() for y in tensors[len(tensors) - kept.outputs :]])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        kept, *tensors = inputs
        saved = tensors[: len(tensors) - kept.outputs]
        ctx.kept = kept
        ctx.save_for_backward(*saved)
        if forward_ad._current_level >= 0:
            ctx.zeros = [functools.partial(torch.zeros, y.shape, dtype=y.dtype, device=y.device) for y in output]
            ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        kept, saved = ctx.kept, ctx.saved_tensors
        return None, *_in_place(kept, saved, kept.gradients(saved, upstreams)), *[None] * kept.outputs

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        kept, saved = ctx.kept, ctx.saved_tensors
        if not kept.call.forward_mode:
            kept.call.refuse_forward_mode("jvp, jacfwd or a dual number")
        with forward_ad._set_fwd_grad_enabled(True):  # torch turned it off, and with it the outer levels
            here = [_primal(tensor) for tensor in saved]
            return _push_forward(kept, here, [zeros() for zeros in ctx.zeros], tangents)


def _primal(tensor: Tensor) -> Tensor:
    """tensor without its tangent at this level; torch 2.13 has no batching rule for that."""
    if functorch.is_batchedtensor(tensor):
        batched_at, level = functorch.maybe_get_bdim(tensor), functorch.maybe_get_level(tensor)
        return functorch._add_batch_dim(_primal(functorch.get_unwrapped(tensor)), batched_at, level)
    return forward_ad.unpack_dual(tensor).primal


def _in_place(kept: KeptRule, saved: Sequence[Tensor], gradients: Gradients) -> list[Tensor | None]:
    """The gradients where the tensors stand that they are the gradients of; residuals have none of their own."""
    of_inputs, of_variables = gradients
    placed: list[Tensor | None] = [*map(_beside, of_inputs, saved), *[None] * (len(saved) - kept.inputs)]
    for at, gradient in zip(kept.variables, of_variables, strict=True):
        placed[at] = _beside(gradient, saved[at])
    return placed


def _push_forward(
    kept: KeptRule, saved: Sequence[Tensor], zeros: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The tangents of the outputs: the transpose of the rule, which is linear, applied to those of the inputs."""
    given: list[Tensor] = []

    def rule(*upstreams: Tensor) -> tuple[Tensor, ...]:
        gradients = _in_place(kept, saved, kept.gradients(saved, _merged(zeros, upstreams)))
        paired = [(g, t) for g, t in zip(gradients, tangents, strict=False) if g is not None and t is not None]
        given[:] = [t for _, t in paired]
        return tuple([g for g, _ in paired])

    floats = [z for z in zeros if z.is_floating_point() or z.is_complex()]
    _, transpose = torch.func.vjp(rule, *floats)
    pushed = iter(transpose(tuple(given)) if given else floats)
    return tuple([next(pushed) if z.is_floating_point() or z.is_complex() else None for z in zeros])


def _merged(zeros: Sequence[Tensor], upstreams: Sequence[Tensor]) -> list[Tensor]:
    """The upstreams of the float outputs among the zeros of the others."""
    following = iter(upstreams)
    return [next(following) if z.is_floating_point() or z.is_complex() else z for z in zeros]


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
