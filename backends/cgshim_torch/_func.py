"""PyTorch: the transformations of torch.func, and dual numbers.

f runs on the inputs as they are, so its residuals are already functions of them at every level.
torch runs the rule at other levels than f: what the rule holds is passed through torch, and the
rule then reads what came out. An output that it holds is the Function's own, so that its derivative
is the rule's at every level. Forward mode is the transpose of a rule that is linear in upstream,
and is seen to be.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_unflatten

from cgshim.backend import (
    Call,
    Mapped,
    RuleScope,
    Tensor,
    TreeSpec,
    WithBatches,
    describe,
    partition,
    refuse_captured_tangent,
    subvals,
)
from cgshim_torch._eager.run import Run, named, rules, run_once, variables_of
from cgshim_torch._eager.second_order import without_random_numbers
from cgshim_torch._graph.existing import NOTHING, Holdings, existing_for, versions_of
from cgshim_torch._graph.levels import (
    alive,
    batches_of,
    has_tangent,
    is_jvp_alone,
    is_transformed,
    level_now,
    levels,
    primal_of,
    recording_level,
    requires_grad,
    requires_grad_at_a_level,
    without_graph,
)
from cgshim_torch._graph.reads import FLOATS, Reads, reads_now, tensors_in, without_second_order
from cgshim_torch._graph.transpose import ramp, transposed_by
from cgshim_torch._graph.walk import captured, is_made_in, refuse_captured_tangents, since
from cgshim_torch._versions.private import (
    alive_in,
    apply_over_batch,
    custom_function_call,
    forward_ad,
    functorch,
    outside_of_func,
    sequence_number,
)

Tangents = tuple[Tensor | None, ...]
Refusal = Callable[[], NoReturn]
"""raises the error for the derivative of an op that has none"""


def transformed(call: Call, inputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], TreeSpec]:
    """Return f's outputs with the rule for their gradient, at every level of the active
    transformations.

    A detached output has no gradient but the rule's, so a transformation that loses the rule cannot
    return autodiff's.
    """
    if isinstance(call.f, WithBatches) and any(
        functorch.is_batchedtensor(y) for x in inputs for y in levels(x)
    ):
        return partition(call.name, call.backend, call.f.mapped(call, inputs))
    if isinstance(call.f, Mapped) and functorch.is_batchedtensor(
        max(inputs, key=functorch.maybe_get_level)
    ):
        # the innermost transformation is a vmap
        outputs = list(custom_function_call(_Mapped, call.f, *inputs))
        return partition(call.name, call.backend, outputs)
    if call.kind_of_rule.is_transpose and is_jvp_alone() and not rules.current:
        primals, tangents = zip(*[forward_ad.unpack_dual(x) for x in inputs], strict=True)
        # a batch of tangents does not tell if it has tangents of its own
        if not (
            any(map(requires_grad_at_a_level, primals))
            or any(t is not None and functorch.is_legacy_batchedtensor(t) for t in tangents)
        ):
            return _pushed(call, primals, tangents)
    # forward mode asks the rule for all gradients
    if call.takes_needs_input_grad and forward_ad._current_level < 0:
        call = call.with_needs_input_grad(
            [torch.is_grad_enabled() and requires_grad_at_a_level(x) for x in inputs]
        )
    existing, start = existing_for(call), sequence_number()
    before = [versions_of(levels(x)) for x in inputs]
    refusals: dict[int, Refusal] = {}
    in_forward_mode = (level_now(), refusals) if forward_ad._current_level >= 0 else None
    outputs, rule = call.read(_constants.run(in_forward_mode, run_once, call, inputs), inputs)
    during = since(start)
    if any(
        requires_grad_at_a_level(x) and versions_of(levels(x)) != was
        for x, was in zip(inputs, before, strict=True)
    ):
        call.refuse_writing()
    holdings = Holdings(rule.grad_fn, existing=existing.holders)
    made = [
        t
        for t in (*outputs, *[h.tensor for h in holdings.tensors])
        if t.requires_grad or functorch.is_functorch_wrapped_tensor(t)
    ]
    variables, _ = variables_of(call, rule, existing, inputs, inputs, during, made, holdings)
    run = TransformedRun(call, rule, existing, [x.device for x in inputs], holdings, variables)
    passed = run.choose(holdings, inputs, outputs, [*refusals.values()])
    if forward_ad._current_level >= 0 and not rules.current:
        refuse_captured_tangents(call, outputs, [*inputs, *run.variables])
    run.variables = ()  # they come through torch, too
    attached = named(_Transformed, call.name)(run, *passed)
    run.residuals = {}
    return attached, rule.output


def _pushed(
    call: Call, primals: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> tuple[Sequence[Tensor], TreeSpec]:
    """Return f's outputs with the tangents that jvp_fn gives, where nothing else is differentiated."""
    if call.takes_needs_input_grad:
        call = call.with_needs_input_grad([t is not None for t in tangents])
    start, before = sequence_number(), versions_of(primals)
    outputs, rule = call.read(run_once(call, primals), primals)
    if before != versions_of(primals):
        call.refuse_writing()
    zeros = lambda at: torch.zeros_like(primals[at])
    pushed = rules.run(object(), rule.tangents, tangents, outputs, zeros)
    refuse_captured_tangents(call, [t for t in (*outputs, *pushed) if t is not None], primals)
    call.require_variables(
        rule, captured(call, [*filter(requires_grad_at_a_level, outputs)], primals, since(start))
    )
    return [
        y if t is None else forward_ad.make_dual(y.detach(), t)
        for y, t in zip(outputs, pushed, strict=True)
    ], rule.output


class TransformedRun(Run):
    """A run of f under torch.func, which passes on inputs, variables, what the rule holds besides,
    and outputs.
    """

    made: dict[int, Tensor] | None = None
    """what the rule makes of what it is passed, while it runs in forward mode before those of the levels within"""
    made_at: int | None = None
    """the level of torch.func at which it does"""
    remembered: Sequence[weakref.ref[Tensor]] = ()
    """what it made then: if it still reads it at those levels, their derivatives miss these tangents"""
    residuals: Mapping[int, Tensor] = {}
    """with their graph, by their places among what is passed: the innermost level saves these"""

    def choose(
        self, holdings: Holdings, inputs: Sequence[Tensor], outputs: Sequence[Tensor], refusals: Sequence[Refusal]
    ) -> list[Tensor]:  # fmt: skip
        """Return what is passed through torch, and choose what of it is saved.

        There is a refusal for each level of forward mode at which an op without a derivative
        returned constants.
        """
        self.level, self.refusals = level_now(), refusals
        known = set(map(id, (*inputs, *self.variables, *outputs)))
        residuals = list({id(t): t for t, _, _ in self.held if id(t) not in known}.values())
        passed = [*inputs, *self.variables, *residuals, *outputs]
        at = {id(t): place for place, t in reversed(list(enumerate(passed)))}
        self.held_at = [at[id(t)] for t, _, _ in self.held]
        with_graph = Holdings(*holdings.pullbacks).tensors if holdings.pullbacks else ()
        self.with_graph_at = [at[id(t)] for t, _, _ in with_graph if t.requires_grad]
        self.is_partial = all(map(_is_partial, holdings.pullbacks))
        self.leaves, self.outputs = len(inputs) + len(self.variables), len(outputs)
        self.holds_floats = bool(holdings.objects) or any(
            t.dtype in FLOATS and not self.existing.has(t) for t in residuals
        )
        """whether the rule holds what f made, or what nobody knows"""
        self.shown = [(weakref.ref(t), at[id(t)]) for t in passed] if self.may_hide else []
        needs_inputs = self.rule.needs_inputs or self.call.once_differentiable
        self.saved_at = {*self.held_at, *range(0 if needs_inputs else len(inputs), self.leaves)}
        wide = _with_batches(outputs, passed[: self.leaves])
        passed = passed[: len(passed) - self.outputs]
        # Else torch would visit the graph of all that f did for each first order, and find in it what
        # f has changed in place, or an inner rule that raises an error.
        if residuals and not holdings.pullbacks and (level := recording_level()) is not None:
            self.residuals = dict(enumerate(residuals, self.leaves))
            passed[self.leaves :] = cut = [without_graph(t, level) for t in residuals]
            if (reads := reads_now()) is not None:  # of a rule that calls this op
                pairs = zip(residuals, cut, strict=True)
                reads.knows(*[without for t, without in pairs if reads.made(t)])
        return [*passed, *[y.detach() for y in wide]]

    def gradients_from(
        self, tensors: Sequence[Tensor | None], upstreams: Sequence[Tensor], needed: Sequence[bool] | None = None
    ) -> list[Tensor | None]:  # fmt: skip
        """Return the rule's gradients of inputs and variables where it holds these tensors."""
        # a pullback is called when its level is over: torch would mistake that for the next one
        tensors = [t if t is None else alive(t) for t in tensors]
        inputs, variables = tensors[: len(self.devices)], tensors[len(self.devices) : self.leaves]
        with self.holding(tensors), self._reads(tensors, upstreams):
            return self.gradients(inputs, upstreams, variables, needed)

    def tangents_from(
        self,
        tensors: Sequence[Tensor | None],
        zeros: Sequence[Tensor],
        tangents: Sequence[Tensor | None],
    ) -> tuple[Tensor | None, ...]:
        """Return the author's tangents of the outputs, which are like zeros, where jvp_fn holds
        these tensors.
        """
        count = len(self.devices)
        if any(t is not None for t in tangents[count : self.leaves]):
            refuse_captured_tangent(self.call.name)
        shapes, dtypes = self.rule.shapes, self.rule.dtypes
        zeros_at = lambda at: torch.zeros(shapes[at], dtype=dtypes[at], device=self.devices[at])
        present = [t for t in tangents if t is not None]
        with self.holding(tensors), self._reads(tensors, present):
            pushed = rules.run(
                object(), self.as_first, self.rule.tangents, tangents[:count], zeros, zeros_at
            )
        pairs = zip(pushed, zeros, strict=True)
        return tuple([z if t is None and z.dtype in FLOATS else t for t, z in pairs])

    def _reads(
        self, tensors: Sequence[Tensor | None], upstreams: Sequence[Tensor]
    ) -> AbstractContextManager[Any]:
        """Let the rule read these tensors also where it may hold those that f saw, and nobody
        knows.
        """
        with_graph = [*map(tensors.__getitem__, self.with_graph_at)]
        if not (self.is_partial and all(t is None or t.requires_grad for t in with_graph)):
            self.call.refuse(
                "a pullback of torch.func.vjp that grad_fn keeps must have its own graph where it is called",
                "forward mode, a vmap within the derivative, or a function that reads what depends on its arguments",
                "let f or grad_fn call op_vjp",
            )
        is_within = bool(self.remembered) and forward_ad._current_level >= 0
        if not (self.may_hide or is_within or self.made is not None):
            return contextlib.nullcontext()
        reads = _ReadsOfFunc(self, [*upstreams, *[t for t in tensors if t is not None]])
        for ref, at in self.shown:
            if (raw := alive_in(ref)) is not None:
                reads.put(raw, tensors[at])
        return reads

    def remembering(
        self, push: Callable[..., Tangents], tensors: Sequence[Tensor | None], *args: Any
    ) -> Tangents:
        """Return the tangents that `push` gives, and note what the rule made for them and keeps, if
        it runs at other levels after this.

        torch takes the tangents of the outer level first, without the level within. A Jacobian that
        is computed once and kept would be a constant in the Hessian.
        """
        is_last = self.level <= level_now() and not any(
            t is not None and t.requires_grad for t in tensors
        )
        if is_last and not self.may_hide:
            return push(tensors, *args)
        made: dict[int, Tensor] = {}
        self.made, self.made_at = made, level_now()
        try:
            pushed = push(tensors, *args)
        finally:
            self.made = self.made_at = None
        if not is_last:
            returned = set(map(id, pushed))
            left = [weakref.ref(t) for key, t in made.items() if key not in returned]
            self.remembered = [*self.remembered, *left]
        return pushed

    def refuse_constants(self, beside: int) -> None:
        """Raise an error if a tangent is missing in what the rule holds, at more levels than those
        `beside` it.
        """
        if len(self.refusals) > beside and self.holds_floats:
            self.refusals[0]()


def _is_partial(pullback: FunctionType) -> bool:
    """Return True if the graph that a pullback of torch.func has below its level gives what it gives.

    At its own level the graph ends at the arguments. What else the function reads may be made of
    them, too: below, where the rule runs, the gradients are of that as well.
    """
    names = inspect.getclosurevars(pullback).nonlocals
    outputs, inputs = names["flat_primals_out"], names["flat_diff_primals"]
    below, of = map(functorch.unwrap_if_dead, outputs), [*map(functorch.unwrap_if_dead, inputs)]
    upstreams = [ramp(y, at) for at, y in enumerate(outputs)]
    connected = [(y, u) for y, u in zip(below, upstreams, strict=True) if y.requires_grad]
    if not connected:
        return True  # there is none, which is refused where it is called
    gradients = pullback(tree_unflatten(upstreams, names["primals_out_spec"]))
    there = torch.autograd.grad(
        [y for y, _ in connected], of, [u for _, u in connected], retain_graph=True, materialize_grads=True
    )  # fmt: skip
    pairs = [
        [levels(g)[-1] for g in each] for each in zip(tree_leaves(gradients), there, strict=True)
    ]
    with outside_of_func():
        return all(torch.equal(*pair) for pair in pairs)


def _with_batches(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs with each batch that a leaf has, where they may be differentiated.

    torch takes the upstream gradient of an output without the batch, which is a sum over it, for
    that of each member; and its tangent is the sum of theirs.
    """
    wide = list(outputs)
    if not (forward_ad._current_level >= 0 or any(map(requires_grad_at_a_level, leaves))):
        return wide
    for at, y in enumerate(outputs):
        for x in leaves:
            if y.dtype in FLOATS and batches_of(x) - batches_of(wide[at]):
                zero = torch.zeros_like(x.detach().flatten()[:0], dtype=y.dtype).sum()
                wide[at] = wide[at] + zero.expand(y.shape)  # a batch of none adds no number
    return wide


class _ReadsOfFunc(Reads):
    """Substitutes what was passed through torch; all else is connected at each level by itself."""

    refuses_cut = False
    asks = False
    """True while the operation only asks something of a tensor, as an op that the rule calls does of each level: of
    that very one, which may lie within what is read in the place of another"""
    depends = False
    """True if the operation has read what the rule was passed, or what was made of it"""

    def __init__(self, run: TransformedRun, passed: Sequence[Tensor]) -> None:
        self._made: dict[int, Tensor] = {} if run.made is None else run.made
        known = [*passed, *self._made.values()]
        super().__init__(run.call, NOTHING, _ReadsOfFunc._read_dual, known, may_hide=run.may_hide)
        self._passed = set(map(id, passed))
        self._level = level_now() if run.made_at is None else run.made_at
        remembered = run.remembered if forward_ad._current_level >= 0 else ()
        self._remembered = {id(alive_in(ref)) for ref in remembered} - self._passed

    def knows(self, *tensors: Tensor) -> None:
        super().knows(*tensors)
        self._made.update((id(t), t) for t in tensors)

    def before_operation(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        self.asks, self.depends = func in _ASKS, False

    def read(self, t: Tensor) -> Tensor:
        if self.asks:
            return t
        key = id(t)
        if key in self._remembered:
            self.call.refuse_kept(t)
        self.depends = (
            self.depends or key in self._passed or key in self._made or key in self._substitutes
        )
        return super().read(t) if self._may_hide else t  # else it holds all that it reads

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # fmt: skip
        result = super().__torch_function__(func, types, args, kwargs)
        self.asks = False
        if self.depends:
            self._made.update((id(t), t) for t in tensors_in(result))
        return result

    def _read_wrapped(self, t: Tensor) -> Tensor:
        """Return t, unless it is of a batch that is over, or has the graph of a level that is to come.

        Of several levels that are over, torch would unwrap one alone.
        """
        if not any(map(self._is_of_rule, levels(t))):
            for level in levels(t):
                if functorch.is_batchedtensor(level):
                    self._refuse_kept(t, "under vmap")
                highest = level_now() if level.grad_fn is None else self._level
                if functorch.maybe_get_level(level) > highest:
                    self._refuse_kept(t, "in forward mode")
        return self._read_dual(alive(t))

    def _is_of_rule(self, level: Tensor) -> bool:
        """Return True for what the rule was passed or has made, also where this mode does not see it."""
        return id(level) in self._known or is_made_in(level, since(self._start))

    def _read_dual(self: Any, t: Tensor) -> Tensor:
        """Return t, unless it is a dual number, of which the rule of a tangent needs the primal."""
        if has_tangent(t):
            self._refuse_kept(t, "in forward mode")
        return t

    def _refuse_kept(self, t: Tensor, where: str) -> NoReturn:
        self.call.refuse(
            f"what grad_fn keeps of f {where} must be in variables, lists, dicts or namespaces",
            f"{describe(t)} elsewhere",
            "keep it there, or let f return it as an output",
        )


_ATTRIBUTES = ("requires_grad", "is_leaf", "grad_fn", "output_nr", "_version")
_ASKS = {torch.Tensor.is_inference, *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES)}
"""operations that tell of a tensor, and read no number of it"""


class _Transformed(torch.autograd.Function):  # type: ignore[misc]
    """Returns aliases of outputs, whose gradients come from a rule, inside the transformations of
    torch.func.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Do Function.apply without its look at forward's signature, which takes 15 us per call and
        level.
        """
        if functorch.maybe_current_level() is None:  # only dual numbers
            return super(torch.autograd.Function, cls).apply(*args)
        return custom_function_call(cls, *args)

    @staticmethod
    def forward(run: TransformedRun, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([y.detach() for y in tensors[len(tensors) - run.outputs :]])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], run: TransformedRun, *tensors: Tensor) -> Any:
        """Do what torch does by generate_vmap_rule; but where only batches are around the call,
        nothing is recorded.
        """
        is_recorded = torch.is_grad_enabled() and any(map(requires_grad, tensors))
        if not (is_recorded or is_transformed()):
            return _Transformed.forward(run, *tensors), in_dims[len(in_dims) - run.outputs :]
        return apply_over_batch(_Transformed, info, in_dims, run, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        run, *passed = inputs
        tensors = [*passed[: len(passed) - run.outputs], *output]
        # at the innermost level: at each other there are fewer
        if run.residuals and level_now() == run.level:
            tensors = subvals(tensors, [*run.residuals], [*run.residuals.values()])
        saved = [t if run.may_hide or at in run.saved_at else None for at, t in enumerate(tensors)]
        ctx.run = run
        ctx.save_for_backward(*saved)
        if forward_ad._current_level >= 0:
            ctx.zeros = [
                functools.partial(torch.zeros, y.shape, dtype=y.dtype, device=y.device)
                for y in output
            ]
            ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        run: TransformedRun = ctx.run
        tensors = ctx.saved_tensors
        if forward_ad._current_level >= 0:
            run.refuse_constants(beside=0)
        gradients = run.gradients_from(
            tensors, upstreams, ctx.needs_input_grad[1 : 1 + len(run.devices)]
        )
        given = without_second_order(run.call, gradients, [*tensors[: run.leaves], *upstreams])
        return None, *given, *[None] * (len(tensors) - run.leaves)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        run: TransformedRun = ctx.run
        push = run.tangents_from
        if run.rule.jvp_fn is None:
            push = functools.partial(_push_forward, run)
            if not run.call.forward_mode:
                run.call.refuse_forward_mode("jvp, jacfwd or a dual number")
        run.refuse_constants(beside=1)  # the level whose tangents these are
        # torch has disabled it, also for the outer levels
        with forward_ad._set_fwd_grad_enabled(True):
            tensors = [t if t is None else primal_of(t) for t in ctx.saved_tensors]
            pushed = run.remembering(push, tensors, [zeros() for zeros in ctx.zeros], tangents)
            if any(t is not None and functorch.is_legacy_batchedtensor(t) for t in pushed):
                return pushed  # a batch of torch.autograd.functional would not record a Function
            of = [*tensors[: run.leaves], *tangents]
            return tuple(without_second_order(run.call, pushed, of))


# --- Rules for batches ----------------------------------------------------------------------------


def mapped(function: Mapped, inputs: Sequence[Tensor], /) -> list[Tensor]:
    return list(custom_function_call(_Mapped, function, *[x.detach() for x in inputs]))


def run_again(run: Callable[[], Any], refuse: Callable[..., NoReturn], /) -> Any:
    """Run for a derivative what has run for the value; refuse what draws random numbers again."""
    with without_random_numbers(refuse):
        return run()


class _Mapped(torch.autograd.Function):  # type: ignore[misc]
    """Returns what a function returns for one element, or for the batch of a vmap."""

    @staticmethod
    def forward(function: Mapped, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(function.run(None, (), *inputs)[0])

    @staticmethod
    def setup_context(*_: Any) -> None:
        """Keep nothing: the inputs are constants."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], function: Mapped, *inputs: Tensor) -> Any:
        size, dims = info.batch_size, in_dims[1:]
        batched = [dim is not None or at in function.in_batch for at, dim in enumerate(dims)]
        moved = [
            x if not has else x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim, has in zip(inputs, dims, batched, strict=True)
        ]
        outputs, have = function.run(size, batched, *moved)
        return tuple(outputs), tuple([0 if has else None for has in have])


# --- Forward mode ---------------------------------------------------------------------------------


def _push_forward(
    run: TransformedRun,
    tensors: Sequence[Tensor | None],
    zeros: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Apply the transpose of the rule to the inputs' tangents; return the outputs' tangents, which
    are like zeros.
    """
    floats = [at for at, z in enumerate(zeros) if z.dtype in FLOATS]
    nonzero = [t for t in tangents[: run.leaves] if t is not None]
    if not (floats and nonzero):
        return tuple([z if z.dtype in FLOATS else None for z in zeros])

    def gradients(*upstreams: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(
            run.gradients_from(tensors, subvals(zeros, floats, upstreams)), tangents, strict=False
        )
        return tuple([torch.zeros_like(t) if g is None else g for g, t in pairs if t is not None])

    outputs = [zeros[at] for at in floats]
    vjp = lambda fn, points: torch.func.vjp(fn, *points)
    pushed = transposed_by(
        vjp, gradients, outputs, nonzero, outputs[0], run.call.refuse_nonlinear,
        "gradients at two upstreams",
    )  # fmt: skip
    return tuple(subvals([None] * len(zeros), floats, pushed))


# --- Ops without a derivative, in forward mode ----------------------------------------------------
#
# What such an op returns within f is a constant, because the rule has the tangent. torch computes all
# tangents as f runs, and nobody may use them. So only those are refused that can be used: outside of
# an op at once, and within one if the rule's own derivative needs what f made.

_constants: RuleScope[tuple[int, dict[int, Refusal]] | None] = RuleScope("cgshim_torch_constants")
"""the innermost level of torch.func around f; and a refusal for each level with a tangent of the op's arguments"""


def take_as_constant(refuse: Refusal) -> None:
    """Note that what such an op returns is a constant at this level; refuse if it may not be one."""
    constants = _constants.current
    if constants is None or level_now() > constants[0]:
        refuse()
    constants[1][level_now()] = refuse
