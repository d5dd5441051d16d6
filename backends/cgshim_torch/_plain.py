"""PyTorch, eager mode: the call that nearly everybody makes, from its first line to its gradient.

f gets tensors of torch's own classes and returns one, and a function that holds tensors, lists of them and numbers. No
transformation is active, and f reads nothing else that is differentiated. What a small call costs is the number of
Python functions that run, so this is one function, and its gradient another. Whatever is not plain goes on in
`_eager.py`, which is for all calls, with what was done here: f runs once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cgshim.backend import (
    ONE_TENSOR,
    SIMPLE,
    PlainForm,
    gradients_of_arguments,
    plain_form,
    rule_of,
    runs_on_host,
    runs_op,
)
from cgshim_torch._eager import constants, first_gradients, with_rule
from cgshim_torch._existing import NOTHING, Existing, holds_no_tensor, holds_nothing, library_names
from cgshim_torch._graph import now
from cgshim_torch._private import (
    current_level,
    forward_ad,
    frame_callback,
    fx_is_tracing,
    is_any_autocast_enabled,
    is_dead_wrapper,
    jit_is_tracing,
    keeps_graph,
    len_dispatch_stack,
    len_function_stack,
    pack_hooks,
)
from cgshim_torch._reads import FLOATS
from cgshim_torch._residuals import Holdings
from cgshim_torch._run import Run, move_to, named, rules
from cgshim_torch._second_order import differentiable_gradients
from cgshim_torch._single import SingleLevelFunction

if TYPE_CHECKING:
    from cgshim.backend import Call

Tensor = Any

_NONE: Mapping[str, Any] = {}
_TENSORS = frozenset([torch.Tensor, torch.nn.Parameter])


class Spec(NamedTuple):
    """What a gradient must be like."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class PlainRun(NamedTuple):
    """What a plain run leaves for its gradient besides the saved tensors."""

    plan: Plan
    f: Callable[..., Any]
    options: Mapping[str, Any]
    grad_fn: FunctionType
    takes_arguments: bool
    specs: Sequence[Spec | Tensor]
    """of the inputs; what is saved tells it itself"""
    raw: Sequence[Tensor]
    """what is saved, as grad_fn holds it"""
    inputs_at: Sequence[int | None]
    """where the inputs are saved"""
    output_at: int | None
    existing: Existing

    @property
    def call(self) -> Call:
        """The call, of the f that ran."""
        return self.plan.call.with_f(self.f, self.options)


def plan(call: Call, types: Sequence[type]) -> Callable[..., Any] | None:
    """Return what runs an op with arguments of these types, in plain calls and others; None if none is plain."""
    if call.once_differentiable or call.takes_needed or runs_on_host(call.f) or not _TENSORS.issuperset(types):
        return None
    return Plan(call).output_of


class Plan:
    """Runs plain calls. What is the same in all of them is found once."""

    __slots__ = ("_apply", "_form", "_names_in_f", "_names_in_rule", "call")

    def __init__(self, call: Call) -> None:
        self.call = call
        self._apply = named(_Plain, call.name)
        self._form: PlainForm | None = None  # of the last rule: most ops have one
        function = getattr(call.f, "__func__", call.f)
        self._names_in_f = library_names(function, and_functions=True)
        if not holds_nothing(function):
            self._names_in_f = None  # it may read more than it names
        self._names_in_rule: Sequence[tuple[str, Any]] | None = None

    @runs_op
    def output_of(self, f: Callable[..., Any], args: tuple[Tensor, ...], options: Mapping[str, Any]) -> Any:
        """Return the output of f, with the rule for its gradient if an argument is differentiated."""
        if (
            frame_callback() is not None or len_function_stack() or len_dispatch_stack() or jit_is_tracing()
            or fx_is_tracing() or current_level() is not None or forward_ad._current_level >= 0
        ):  # fmt: skip
            return self.call.backend.custom_gradient(self.call.with_f(f, options), args)
        arguments = self.call.arguments  # noqa: F841  # by this name and inputs an op in f finds its backend
        recording, differentiated = torch.is_grad_enabled(), False
        inputs: Any = args
        versions: list[int] = []
        start, existing = 0, NOTHING
        if recording:
            if is_any_autocast_enabled() or pack_hooks(True) is not None:
                return self.call.backend.custom_gradient(self.call.with_f(f, options), args)
            start = now()
            try:
                for x in args:
                    differentiated = differentiated or x.requires_grad
                    versions.append(x._version)
                    if is_dead_wrapper(x):
                        return self.call.backend.custom_gradient(self.call.with_f(f, options), args)
            except RuntimeError:  # made in inference mode, where torch does not count
                return self.call.backend.custom_gradient(self.call.with_f(f, options), args)
            inputs = [*args]
            if differentiated:  # detached, so that the graph records only what f captured
                for at, x in enumerate(args):
                    inputs[at] = x.detach()
            if not self._reads_libraries_alone(f, self._names_in_f, options):
                existing = Existing(self.call.with_f(f, options))
            elif isinstance(f, MethodType):
                owner: Any = f.__self__
                existing = Existing(self.call.with_f(f, options), () if holds_no_tensor(owner) else None)
        try:
            results = [f(*inputs, **options) if options else f(*inputs)]
        finally:
            if torch.is_grad_enabled() is not recording:
                torch.set_grad_enabled(recording)
        form = self._form_of(results[0], inputs)
        if not recording:
            if form is not None:
                return results[0][0]
            return self._without_gradient(f, args, options, inputs, results)
        if form is None:
            return self._in_general(f, args, options, inputs, existing, start, versions, results)

        # What the rule holds: it is saved, as the tensor that autograd knows.
        output, grad_fn = results[0]
        inputs_at: list[int | None] = []
        raw: list[Tensor] = []
        saved: list[Tensor] = []
        others: list[Tensor] = []
        holds_output = False
        items: list[Any] = []
        for cell in grad_fn.__closure__ or ():
            try:
                x = cell.cell_contents
            except ValueError:  # a name that was never assigned
                continue
            if type(x) is list or type(x) is tuple:
                items += x
            elif type(x) not in SIMPLE:
                items.append(x)
        needs_inputs, is_plain = form.takes_arguments, True
        held = set()
        for x in items:
            if type(x) in SIMPLE or id(x) in held:
                continue
            if type(x) not in _TENSORS or x.requires_grad or x.is_inference():
                is_plain = False
                break
            held.add(id(x))
            if x is output:
                holds_output = True
                continue
            for seen in inputs:
                if x is seen:
                    break
            else:  # neither the output nor an input
                others.append(x)
                needs_inputs = needs_inputs or x.dtype in FLOATS  # its derivative is by them
        if is_plain and not differentiated:
            return output
        if is_plain:
            for at, x in enumerate(inputs):
                is_plain = is_plain and args[at]._version == versions[at]
                if needs_inputs or id(x) in held:
                    inputs_at.append(len(raw))
                    raw.append(x)
                    saved.append(args[at])
                else:
                    inputs_at.append(None)
        if is_plain and existing is not NOTHING and others:
            existing.forget_changed()
            for x in others:
                is_plain = is_plain and not existing.has(x)  # else rules may write to it
        if not is_plain or output._is_view() or not self._reads_libraries_alone(grad_fn, self._names_in_rule):
            x = seen = output = grad_fn = None  # what is alive without them, the rule holds
            for tensors in (raw, others, items):
                tensors.clear()
            return self._in_general(f, args, options, inputs, existing, start, versions, results)
        specs = inputs if len(raw) == len(inputs) else [Spec(x.shape, x.dtype, x.device) for x in inputs]
        alias, output_at = output, None
        if holds_output or existing is not NOTHING:  # else nobody holds it
            alias = output.detach()
        if holds_output:
            output_at = len(raw)
            raw.append(output)
            saved.append(alias)
        raw += others
        saved += others
        parts = self, f, options, grad_fn, form.takes_arguments, specs, raw, inputs_at, output_at, existing
        return self._apply((tuple.__new__(PlainRun, parts), saved, alias), *args)

    def _reads_libraries_alone(
        self, function: Any, names: Sequence[tuple[str, Any]] | None, options: Mapping[str, Any] = _NONE
    ) -> bool:  # fmt: skip
        """Return True if f, or its rule, can read nothing but its arguments, its variables and libraries."""
        function = getattr(function, "__func__", function)
        if names is None or not isinstance(function, FunctionType):
            return False
        for option in options.values():
            if type(option) not in SIMPLE:
                return False
        scope = function.__globals__
        for name, x in names:  # noqa: SIM110  # a generator costs as much as the rest
            if scope.get(name) is not x:
                return False
        return True

    def _form_of(self, result: Any, inputs: Sequence[Tensor]) -> PlainForm | None:
        """Return the form of the rule if f has returned a tensor that is its own and a plain function; else None."""
        if type(result) is not tuple or len(result) != 2:
            return None
        output, grad_fn = result
        if type(output) is not torch.Tensor or type(grad_fn) is not FunctionType or output.requires_grad:
            return None
        for x in inputs:
            if x is output:
                return None
        if grad_fn.__defaults__ or grad_fn.__kwdefaults__:
            return None
        form = self._form
        if form is None or form.code is not grad_fn.__code__:
            form = self._form = plain_form(grad_fn, len(inputs))
            self._names_in_rule = library_names(grad_fn)
        return form if form.is_plain else None

    def _without_gradient(
        self, f: Callable[..., Any], args: Sequence[Tensor], options: Mapping[str, Any], inputs: Sequence[Tensor],
        results: list[Any],
    ) -> Any:  # fmt: skip
        outputs, rule = self.call.with_f(f, options).read(results.pop(), inputs)
        return rule.output.combine(constants(outputs, args))

    def _in_general(
        self, f: Callable[..., Any], args: Sequence[Tensor], options: Mapping[str, Any], inputs: list[Tensor],
        existing: Existing, start: int, versions: list[int], results: list[Any],
    ) -> Any:  # fmt: skip
        """Return the output of a call that turned out not to be plain, after its run of f."""
        call = self.call.with_f(f, options)
        outputs, spec = with_rule(call, args, inputs, existing, start, versions, results)
        return spec.combine(outputs)


class _Plain(SingleLevelFunction):
    """Returns a run's output, whose gradient comes from the rule of the run."""

    @staticmethod
    def forward(ctx: Any, given: tuple[PlainRun, list[Tensor], Tensor], *inputs: Tensor) -> Tensor:
        ctx.run, saved, output = given
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    @runs_op
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # also raises torch's errors: of a second backward pass, of changes in place
        run: PlainRun = ctx.run
        if torch.is_grad_enabled() or is_any_autocast_enabled() or forward_ad._current_level >= 0:
            return None, *_in_any_mode(ctx, run, saved, upstreams)
        arguments = run.plan.call.arguments  # by this name, inputs and upstreams an op in grad_fn finds its backend
        inputs: Sequence[Tensor] = ()
        token = rules.enter(True)
        try:
            if run.takes_arguments:
                inputs = run.raw[: len(run.specs)]
                result = run.grad_fn(*inputs, upstream=upstreams[0])
            else:
                result = run.grad_fn(*upstreams)
        finally:
            rules.leave(token)
            if torch.is_grad_enabled():
                torch.set_grad_enabled(False)
        if not keeps_graph():
            ctx.run = None  # the rule and what it holds are freed with the saved tensors
        found = result if type(result) in (tuple, list) else (result,)
        if len(found) == len(run.specs):
            for g, x in zip(found, run.specs, strict=True):
                if type(g) not in _TENSORS or g.dtype is not x.dtype or g.shape != x.shape or g.device != x.device:
                    break
            else:
                return None, *found
        shapes, dtypes, devices = zip(*[(x.shape, x.dtype, x.device) for x in run.specs], strict=True)
        return None, *move_to(devices, gradients_of_arguments(arguments, result, shapes, dtypes))


def _in_any_mode(
    ctx: Any, plain: PlainRun, saved: Sequence[Tensor], upstreams: Sequence[Tensor]
) -> Sequence[Tensor | None]:  # fmt: skip
    """Return the gradients as functions of what was saved, if they may be differentiated; or under autocast."""
    rule = rule_of(plain.call.arguments, plain.grad_fn, ONE_TENSOR, plain.specs, None)
    held = Holdings(plain.grad_fn, plain.existing.holders).tensors
    run = Run(plain.call, rule, plain.existing, [spec.device for spec in plain.specs], held)
    run.autocast = None  # that of the backward pass is another
    run.may_hide = any(each.holder is None for each in held)
    run.reads_variables_alone = not run.may_hide and _makes_no_function(plain.grad_fn.__code__)
    run.raw, run.inputs_at = [*plain.raw], [*plain.inputs_at]
    run.outputs_at = [] if plain.output_at is None else [plain.output_at]
    places = {id(t): at for at, t in enumerate(run.raw)}
    run.held_at = [places.get(id(each.tensor)) for each in held]
    needed = ctx.needs_input_grad[1:]
    gradients = differentiable_gradients if torch.is_grad_enabled() else first_gradients
    of_inputs, _ = gradients(run, saved, upstreams, needed)
    if not keeps_graph():
        ctx.run = None
    return of_inputs


@functools.lru_cache(maxsize=4096)
def _makes_no_function(code: CodeType) -> bool:
    """Return True if nothing reads the variables of a rule but its own code, which does not stop gradients."""
    stops = {"no_grad", "inference_mode", "set_grad_enabled"}
    return not stops.intersection(code.co_names) and not any(isinstance(x, CodeType) for x in code.co_consts)
