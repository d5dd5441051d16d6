"""PyTorch, eager mode: the call that nearly everybody makes, from its first line to its gradient.

f gets tensors of torch's own classes and returns one or a tuple of them, and a function that holds
tensors, lists of them and numbers. No transformation is active, and f reads nothing else that is
differentiated. What a small call costs is the number of Python functions that run, so this is one
function, and its gradient another. Whatever is not plain goes on in `attach.py`, which is for all
calls, with what was done here: f runs once.
"""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch

from cgshim.backend import (
    ONE_TENSOR,
    SIMPLE,
    Call,
    PlainForm,
    Tensor,
    WithBatches,
    combine_each,
    gradients_of_arguments,
    has_no_derivative,
    partition,
    runs_op,
)
from cgshim_torch._eager.attach import Attached, with_rule
from cgshim_torch._eager.run import Run, move_to, named, rules
from cgshim_torch._eager.vjp import transposed_on_values
from cgshim_torch._graph.existing import (
    NOTHING,
    Existing,
    Holdings,
    holds_nothing,
    inside,
    library_names,
)
from cgshim_torch._graph.reads import FLOATS
from cgshim_torch._graph.walk import makes_leaves
from cgshim_torch._versions.private import (
    SingleLevelFunction,
    current_level,
    default_device,
    forward_ad,
    frame_callback,
    functions_are_seen,
    fx_is_tracing,
    is_any_autocast_enabled,
    is_dead_wrapper,
    jit_is_tracing,
    len_dispatch_stack,
    len_function_stack,
    pack_hooks,
    sequence_number,
)

_NONE: Mapping[str, Any] = {}
_new = object.__new__
_TENSORS = frozenset([torch.Tensor, torch.nn.Parameter])


class Spec(NamedTuple):
    """What a gradient must be like."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class PlainRun(Run):
    """What a plain run leaves for its gradient. It is a whole `Run` only if that may be
    differentiated.
    """

    plan: Plan
    f: Callable[..., Any] | None = None  # if not that of the plan
    options: Mapping[str, Any] = _NONE
    existing = NOTHING
    grad_fn: FunctionType
    form: PlainForm
    specs: Sequence[Spec | Tensor]
    """of the inputs; what is saved tells it itself"""

    def complete(self) -> None:
        """Be what any run is."""
        if hasattr(self, "rule"):
            return
        grad_fn, plan = self.grad_fn, self.plan
        call = plan.call if self.f is None else plan.call.with_f(self.f, self.options)
        rule = call.rule_of(grad_fn, self.form.output, self.specs)
        holdings = Holdings(grad_fn, existing=self.existing.holders)
        devices = [spec.device for spec in self.specs]
        Run.__init__(self, call, rule, self.existing, devices, holdings)
        self.autocast = ()  # that of the backward pass is another
        self.reads_held_alone = not self.may_hide and _makes_no_function(grad_fn.__code__)
        self.names_in_f = plan.names_in_f
        self.may_run_at_once = self.f is None and plan.names_torch_alone()
        places = {id(t): at for at, t in enumerate(self.raw)}
        self.held_at = [places.get(id(each.tensor)) for each in self.held]

    @runs_op
    def first_gradients(
        self, saved: Sequence[Tensor], upstreams: Sequence[Tensor], needed: Sequence[bool]
    ) -> Sequence[Tensor | None]:  # fmt: skip
        """Return the gradients of the inputs, by the rule as it is."""
        # by this name, inputs and upstreams an op in grad_fn finds its backend
        arguments, form = self.plan.call.arguments, self.form
        upstream = upstreams[0] if form.output is ONE_TENSOR else tuple(upstreams)
        inputs: Any = ()
        token = rules.enter(True)
        try:
            if form.takes_arguments:
                inputs = self.raw[: len(self.specs)]
                if self.plan.is_jvp:
                    result = transposed_on_values(self.grad_fn, inputs, upstream, needed[1:])
                    if result is None:
                        self.complete()
                        return Run.first_gradients(self, saved, upstreams, needed)
                    return result
                if not arguments.are_tensors:
                    inputs = combine_each(arguments.specs, inputs)
                result = self.grad_fn(*inputs, upstream=upstream)
            elif form.is_flat:
                result = self.grad_fn(*upstreams)
            else:
                result = self.grad_fn(upstream)
        finally:
            rules.leave(token)
            if torch.is_grad_enabled():
                torch.set_grad_enabled(False)
        gradients = result if type(result) in (tuple, list) else (result,)
        if len(gradients) == len(self.specs):
            for g, x in zip(gradients, self.specs, strict=True):
                if g is not None and (
                    type(g) not in _TENSORS
                    or g.dtype is not x.dtype
                    or g.shape != x.shape
                    or g.device != x.device
                ):
                    break
            else:
                return gradients
        shapes, dtypes, devices = zip(
            *[(x.shape, x.dtype, x.device) for x in self.specs], strict=True
        )
        return move_to(devices, gradients_of_arguments(arguments, result, shapes, dtypes))


def plan(call: Call, types: Sequence[type]) -> Callable[..., Any] | None:
    """Return what runs an op with arguments of these types, in plain calls or not; None if none is
    plain.
    """
    if (
        call.once_differentiable
        or call.takes_needs_input_grad
        or has_no_derivative(call.f)
        or not _TENSORS.issuperset(types)
        or (call.kind_of_rule.is_transpose and not call.arguments.are_tensors)
    ):
        return None
    return Plan(call).output_of


class Plan:
    """Runs plain calls. What is the same in all of them is computed once."""

    __slots__ = ("_apply", "_form", "call", "is_jvp", "makes_leaves", "names_in_f")

    def __init__(self, call: Call) -> None:
        self.makes_leaves = makes_leaves(call.f)
        self.call, self.is_jvp = call, call.kind_of_rule.is_transpose
        self._apply = named(Attached, call.name)
        self._form: PlainForm | None = None  # of the last rule: most ops have one
        function = _function_of(call.f)
        # what holds anything may read more than it names
        is_open = not holds_nothing(function)
        self.names_in_f = None if is_open else library_names(function, and_functions=True)

    @runs_op
    def output_of(
        self, f: Callable[..., Any], args: tuple[Tensor, ...], options: Mapping[str, Any]
    ) -> Any:
        """Return the output of f, with the rule for its gradient if an argument is differentiated."""
        arguments = self.call.arguments  # by this name and inputs an op in f finds its backend
        recording, differentiated = torch.is_grad_enabled(), False
        is_plain = not (
            frame_callback() is not None or (len_function_stack() and functions_are_seen())
            or len_dispatch_stack() or jit_is_tracing() or fx_is_tracing() or current_level() is not None
            or forward_ad._current_level >= 0
            or (recording and (
                is_any_autocast_enabled() or pack_hooks(True) is not None or self.makes_leaves
            ))
        )  # fmt: skip
        start, existing, bare = sequence_number(), NOTHING, None
        inputs: list[Tensor] = []
        versions: list[int] = []
        try:
            for x in args:
                if not is_plain or is_dead_wrapper(x):
                    is_plain = False
                    break
                if recording:
                    versions.append(x._version)
                    if x.requires_grad:
                        # so that the graph records only what f captured
                        differentiated, x = True, x.detach()
                inputs.append(x)
        except RuntimeError:  # of inference mode
            is_plain = False
        if not is_plain:
            return self.call.backend.custom_gradient(self.call.with_f(f, options), args)
        if type(f) is WithBatches:
            f = cast(Any, f).held_function  # nothing maps the call
        if differentiated and len(args) > 1:
            for at, x in enumerate(args):  # constants, too: f may turn them in place
                if inputs[at] is x:
                    inputs[at] = x.detach()
        if recording:
            if (self.names_in_f != () or options) and not self._reads_libraries_alone(
                f, self.names_in_f, options
            ):
                existing = Existing(self.call.with_f(f, options))
            elif type(f) is MethodType:
                instance = cast(Any, f).__self__
                bare = instance if _holds_numbers(instance) else None
                existing = (
                    Existing(self.call.with_f(f, options))
                    if bare is None
                    else Existing(None, (id(instance),))
                )
        try:
            if arguments.are_tensors:
                results = [f(*inputs, **options) if options else f(*inputs)]
            else:
                results = [self.call.with_f(f, options).run(inputs)]
        finally:
            if torch.is_grad_enabled() is not recording:
                torch.set_grad_enabled(recording)
        result: Any = results[0]
        output: Any = None
        y: Any = None
        grad_fn: Any = None
        outputs: Sequence[Any] = ()
        form, is_one = None, False
        if type(result) is tuple and len(result) == 2:
            output, grad_fn = result
            is_one = type(output) is torch.Tensor
            if is_one or (type(output) is tuple and self._are_apart(output, inputs)):
                outputs = (output,) if is_one else output
            for y in outputs:
                if y.requires_grad or y.__dict__:
                    outputs = ()
            if (
                outputs
                and type(grad_fn) is FunctionType
                and not (grad_fn.__defaults__ or grad_fn.__kwdefaults__)
            ):
                form = self._form
                if (
                    form is None
                    or form.code is not grad_fn.__code__
                    or is_one is not (form.output is ONE_TENSOR)
                    or form.output.count != len(outputs)
                ):
                    form = self._new_form(grad_fn, output)
                # where a gradient is taken, the loop below asks for this, too
                if not form.is_plain or (not differentiated and _is_among(inputs, output)):
                    form = None
        if form is None:
            # what is alive then, the rule holds
            x = y = result = output = outputs = grad_fn = None  # type: ignore[assignment]
            return self._in_general(f, args, options, inputs, existing, start, versions, results)
        if not recording:
            return output

        # What the rule holds: it is saved, as the tensor that autograd knows.
        items: list[Any] = []
        for cell in grad_fn.__closure__ or ():
            try:
                x = cell.cell_contents
            except ValueError:  # a name that was never assigned
                continue
            if type(x) is list or type(x) is tuple:
                items += x
            else:
                items.append(x)
        held, known = set(), set(map(id, (*inputs, *outputs)))
        residuals, needs_inputs = [], form.takes_arguments
        for x in items:
            if type(x) not in _TENSORS:
                if type(x) in SIMPLE or (
                    bare is not None and x is bare and _shows_numbers(x, form.names)
                ):
                    continue
                is_plain = False
                break
            if id(x) in held:
                continue
            held.add(id(x))
            if x.requires_grad:
                is_plain = False
                break
            if id(x) not in known:
                is_plain = is_plain and not x.is_inference()
                residuals.append(x)
                needs_inputs = needs_inputs or x.dtype in FLOATS  # its derivative is by them
        if is_plain and not differentiated:
            return output
        raw: list[Tensor | None] = []
        saved: list[Tensor] = []
        inputs_at: list[int | None] = []
        for x, arg, version in zip(inputs, args, versions):  # noqa: B905  # strict takes time
            is_plain = is_plain and arg._version == version and x is not output
            is_held = id(x) in held or form.takes_arguments
            if is_held or needs_inputs:
                inputs_at.append(len(raw))
                raw.append(x if is_held else None)
                saved.append(arg)
            else:
                inputs_at.append(None)
        if existing is not NOTHING and residuals:
            existing.forget_changed()
            for x in residuals:
                is_plain = is_plain and not existing.has(x)  # else rules may write to it
        if is_plain and form.names != ():
            is_plain = self._reads_libraries_alone(grad_fn, form.names)
        if not is_plain or y._is_view():  # the last output: none of a tuple is a view
            x = y = result = output = outputs = grad_fn = None  # type: ignore[assignment]
            for tensors in (raw, residuals, items):
                tensors.clear()
            return self._in_general(f, args, options, inputs, existing, start, versions, results)
        run = _new(PlainRun)
        run.specs = (
            inputs
            if len(raw) == len(inputs)
            else [Spec(x.shape, x.dtype, x.device) for x in inputs]
        )
        aliases = []
        for y in outputs:
            alias = y
            if existing is not NOTHING or id(y) in held:  # else nobody holds it
                alias = y.detach()
            if id(y) in held:
                raw.append(y)
                saved.append(alias)
            aliases.append(alias)
        raw += residuals
        saved += residuals
        run.plan, run.grad_fn, run.form = self, grad_fn, form
        run.raw, run.inputs_at = raw, inputs_at
        run.holds_no_tensor = not raw
        if existing is not NOTHING or options:
            run.f, run.options, run.existing = f, options, existing
        if needs_inputs:
            run.versions = [0 if t is None else t._version for t in raw]
            run.default_device = default_device()
        return self._apply((run, saved, aliases[0] if is_one else tuple(aliases)), *args)

    def _reads_libraries_alone(
        self, function: Any, names: Sequence[tuple[str, Any]] | None, options: Mapping[str, Any] = _NONE
    ) -> bool:  # fmt: skip
        """Return True if f, or its rule, can read nothing but its arguments, its variables and
        libraries.
        """
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

    def names_torch_alone(self) -> bool:
        """Return True if f can do nothing but operations on its arguments: another run of it leaves
        no trace.
        """
        if self.names_in_f is None:
            return False
        # with what f has assigned there
        scope = _function_of(self.call.f).__globals__
        return all(
            x in _TORCH or (name not in scope and _is_pure(name)) for name, x in self.names_in_f
        )

    def _are_apart(self, outputs: tuple[Any, ...], inputs: Sequence[Tensor]) -> bool:
        """Return True for floats none of which shows what another, or an input, does."""
        for y in outputs:
            if type(y) is not torch.Tensor or y.dtype not in FLOATS or y._is_view():
                return False
        each = set(map(id, (*outputs, *inputs)))
        return not self.is_jvp and len(each) == len(outputs) + len(inputs)

    def _new_form(self, grad_fn: FunctionType, output: Any) -> PlainForm:
        """Return the form of a rule that is not the one before, for an output like this."""
        call = self.call
        _, spec = partition(call.name, call.backend, output)
        form = PlainForm(grad_fn.__code__, call.convention(call.arguments, grad_fn, spec))
        form.output = spec
        form.names = library_names(grad_fn)
        self._form = form  # whole: another thread may take it
        return form

    def _in_general(
        self, f: Callable[..., Any], args: Sequence[Tensor], options: Mapping[str, Any], inputs: list[Tensor],
        existing: Existing, start: int, versions: list[int], results: list[Any],
    ) -> Any:  # fmt: skip
        """Return the output of a call that proved not to be plain, after its run of f."""
        outputs, spec = with_rule(
            self.call.with_f(f, options), args, inputs, existing, start, versions, results
        )
        self.makes_leaves = makes_leaves(f)
        return spec.combine(outputs)


# --- A gradient that is known already -------------------------------------------------------------


class EmbedGradient(SingleLevelFunction):
    """Returns a value with the gradient that is known for it, for op_embed_gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, None, Tensor]:
        return None, None, upstream * ctx.saved_tensors[0]


def embed_gradient(value: Tensor, gradient: Tensor, x: Tensor, /) -> Tensor | None:
    """Return a number with its gradient with respect to x, if the call is plain; else None.

    As they are constants, a derivative of the gradient is zero.
    """
    is_plain = _TENSORS.issuperset((type(value), type(gradient), type(x))) and not (
        frame_callback() is not None or (len_function_stack() and functions_are_seen())
        or len_dispatch_stack() or jit_is_tracing() or fx_is_tracing() or current_level() is not None
        or forward_ad._current_level >= 0
        or gradient.is_inference() or is_dead_wrapper(x)
    )  # fmt: skip
    return EmbedGradient.apply(value.detach(), gradient.detach(), x) if is_plain else None


_TORCH = torch, torch.nn.functional
_STOPS = frozenset(["no_grad", "inference_mode", "set_grad_enabled"])
_PURE = frozenset(
    [
        "abs",
        "all",
        "any",
        "float",
        "int",
        "len",
        "max",
        "min",
        "pow",
        "range",
        "round",
        "sum",
        "zip",
    ]
)


def _holds_numbers(x: Any) -> bool:
    """Return True for an object that holds numbers and names alone."""
    return SIMPLE.issuperset(map(type, inside(x)))


def _shows_numbers(x: Any, names: Sequence[tuple[str, Any]] | None) -> bool:
    """Return True for an object that shows nothing but numbers under these names: none is of its
    class, which may hold anything.
    """
    kind: Any = type(x)
    return (
        names is not None
        and not hasattr(kind, "__getattr__")
        and kind.__getattribute__ is object.__getattribute__
        and not any(hasattr(kind, name) for name, _ in names)
        and _holds_numbers(x)
    )


def _is_among(tensors: Sequence[Tensor], t: Tensor) -> bool:
    """Return True for a tensor that is one of these."""
    return any(each is t for each in tensors)


def _function_of(f: Any) -> Any:
    """Return what runs where nothing maps the call, without the object of a method."""
    f = f.held_function if isinstance(f, WithBatches) else f
    return getattr(f, "__func__", f)


def _is_pure(name: str) -> bool:
    """Return False for the name of what stops gradients, of a module to import, and of what a
    built-in function does.

    An attribute of a tensor may have the same name: it is not known from its name alone, so it
    counts as that, too.
    """
    return (
        name not in _STOPS
        and name not in sys.modules
        and (name in _PURE or not hasattr(builtins, name))
    )


@functools.lru_cache(maxsize=4096)
def _makes_no_function(code: CodeType) -> bool:
    """Return True if nothing reads the variables of a rule but its own code, which does not stop
    gradients.
    """
    return not _STOPS.intersection(code.co_names) and not any(
        isinstance(x, CodeType) for x in code.co_consts
    )
