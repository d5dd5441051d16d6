"""PyTorch: gradients that may be differentiated: what a rule reads is connected with the arguments.

An input that the rule reads is the input, an output the op's own output. A residual is a node of
the graph that runs f again, on connected inputs, if its derivative is really taken. That run gives
derivatives and never values: it must agree with the first one, draws no random number, and leaves
no trace. Of an f that names torch alone nobody notices another run: it comes at once, where it
gives the same numbers.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from cgshim.backend import (
    Call,
    CustomGradientError,
    Rule,
    Tensor,
    TransformationError,
    refusal,
    subvals,
)
from cgshim_torch._eager.run import Run
from cgshim_torch._graph.existing import Holdings, Reach, without_trace
from cgshim_torch._graph.reads import FLOATS, Reads, tensors_in
from cgshim_torch._graph.walk import captured, has_values, is_captured, leaf_of, own_node, since
from cgshim_torch._versions.private import (
    SingleLevelFunction,
    StopRecomputation,
    forward_ad,
    functorch,
    outside_of_modes,
    sequence_number,
)


def differentiable_gradients(
    run: Run, saved: Sequence[Tensor], upstreams: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:  # fmt: skip
    """Return the rule's gradients as functions of the inputs, the variables and the upstreams."""
    inputs, needed = run.inputs_among(saved), needed[1 : 1 + len(run.devices)]
    substitutes = _connected(run, saved, inputs)
    if run.reads_held_alone:  # then that is all, and each operation costs what it costs
        with run.holding(substitutes):
            return run.gradients(inputs, upstreams, run.variables, needed)
    turns = itertools.count()

    def placed_by_turn(reads: Reads, t: Tensor) -> Tensor:
        """Return a tensor that the rule reads, nobody knows from where, as a function of inputs and
        variables.
        """
        if any(x is None for x in inputs):
            return reads.refused(t, "f has not returned, and that may depend on an argument")
        # of a batch of torch.autograd nothing is left when that run comes; it must read the same anyway
        constants = [
            torch.ones(u.shape, dtype=u.dtype, device=u.device)
            if functorch.is_legacy_batchedtensor(u)
            else u.detach()
            for u in upstreams
        ]
        return _LazyRun.apply(run, [next(turns)], [t.detach()], constants, *inputs, *run.variables)[
            0
        ]

    known = [*upstreams, *run.variables, *[x for x in inputs if x is not None]]
    anchors = [
        t
        for t in (*saved, *run.variables, *upstreams, run.anchor)
        if t is not None and t.requires_grad
    ]
    reads = Reads(run.call, run.existing, placed_by_turn, known, anchors, run.may_hide)
    for at, (raw, substitute) in enumerate(zip(run.raw, substitutes, strict=True)):
        if at not in run.own_at:
            reads.put(substitute if raw is None else raw, substitute)
    with run.holding(substitutes), reads:
        return reads.result(run.gradients(inputs, upstreams, run.variables, needed))


def _connected(run: Run, saved: Sequence[Tensor], inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Return what was saved, with the residuals that f made as functions of inputs and variables."""
    places = [
        at
        for at, t in enumerate(saved)
        if at not in run.inputs_at and t.dtype in FLOATS and not t.requires_grad
    ]
    if not places or any(x is None for x in inputs):
        return list(saved)
    numbers, firsts = [run.held_at.index(at) for at in places], [saved[at] for at in places]
    functions: Sequence[Tensor] = ()
    if run.may_run_at_once and all(map(has_values, firsts)) and not any(map(is_captured, firsts)):
        functions = _made_at_once(run, numbers, firsts, inputs)
    if not functions:
        functions = _LazyRun.apply(run, numbers, firsts, None, *inputs, *run.variables)
    return subvals(saved, places, functions)


def _made_at_once(
    run: Run, places: Sequence[int], firsts: Sequence[Tensor], inputs: Sequence[Tensor | None]
) -> list[Tensor]:  # fmt: skip
    """Return what the rule holds at these places, made by another run of f now, as code by hand
    makes it.

    f can neither read nor write anything but its arguments: nobody notices the run. `_LazyRun`, which
    waits until the derivative is taken, and differentiates the run by itself, takes longer than
    both. Nothing if the run makes other numbers, draws random ones, or has an error: `_LazyRun` tells
    who takes the derivative.
    """
    # what names nothing, no function and no method, draws no random numbers
    generators = _generators_of_torch() if run.names_in_f else ()
    with _if_it_runs():
        with without_random_numbers(_refusing(run.call), generators):
            _, grad_fn = run.as_first(run.run_again, list(map(own_node, inputs)))
        held = Holdings(grad_fn).tensors
        residuals = [held[place].tensor for place in places]
        pairs = zip(residuals, firsts, strict=True)
        if all(t.requires_grad and torch.equal(t, first) for t, first in pairs):
            return residuals
    return []


@contextlib.contextmanager
def _if_it_runs() -> Iterator[None]:
    """Suppress an error of another run, but that by which a checkpoint ends what it recomputes."""
    try:
        yield
    except Exception as error:
        if isinstance(error, StopRecomputation):
            raise


class _LazyRun(SingleLevelFunction):
    """Returns aliases of what a rule reads, whose gradients come from another run of f.

    The rule holds them at these places; or, if there are upstreams, reads them in these turns, when
    it runs too.
    """

    @staticmethod
    def forward(
        ctx: Any, run: Run, places: list[int], tensors: list[Tensor], upstreams: list[Tensor] | None,
        *dependencies: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.run, ctx.places = run, places
        ctx.upstreams = None if upstreams is None else len(upstreams)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *(upstreams or ()), *dependencies)
        return tuple([t.detach() for t in tensors])

    @staticmethod
    def backward(ctx: Any, *of_tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        run: Run = ctx.run
        rest = iter(ctx.saved_tensors)
        firsts = list(itertools.islice(rest, len(ctx.places)))
        upstreams = None if ctx.upstreams is None else list(itertools.islice(rest, ctx.upstreams))
        inputs, variables = list(itertools.islice(rest, len(run.devices))), list(rest)
        asked = [
            (place, t, u)
            for place, t, u in zip(ctx.places, firsts, of_tensors, strict=True)
            if u is not None
        ]
        if not (torch.is_grad_enabled() or forward_ad._current_level >= 0):
            # without their graph, which the gradients do not go through: it may be long
            inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        with torch.enable_grad():
            inputs = list(map(own_node, inputs))
            made = _made_again(run, inputs, variables, asked, upstreams)
        wanted = [*inputs, *variables]
        pairs = [(t, u) for t, (_, _, u) in zip(made, asked, strict=True) if t.requires_grad]
        return None, None, None, None, *_gradients(run, pairs, wanted)


def _gradients(
    run: Run, pairs: Sequence[tuple[Tensor, Tensor]], wanted: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of inputs and variables, from those of what another run has made."""
    asked = [x for x in wanted if x.requires_grad]
    if not pairs:
        return [None] * len(wanted)
    with ending_at(asked if run.variables else ()) as arrived:
        computed = torch.autograd.grad(
            [t for t, _ in pairs],
            asked,
            [u for _, u in pairs],
            retain_graph=bool(run.variables) or torch.is_grad_enabled(),
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    of_asked = iter([arrived.get(at, gradient) for at, gradient in enumerate(computed)])
    gradients = [next(of_asked) if x.requires_grad else None for x in wanted]
    if all(g is None for g in gradients):
        run.call.refuse_unconnected(pairs[0][0], "belongs to a graph that f began itself")
    return gradients


@contextlib.contextmanager
def ending_at(tensors: Sequence[Tensor]) -> Iterator[dict[int, Tensor]]:
    """Let gradients end at these tensors, and yield those that arrive, by place: one may be made
    from another.

    autograd itself would go on, and add to the gradient of a variable what an argument was made
    from it. Beyond them there is none, and not one of zeros, which an infinite slope would make NaN.
    """
    arrived: dict[int, Tensor] = {}
    hooks = []
    for at, x in enumerate(tensors):
        if not x.is_leaf:
            node: Any = x.grad_fn
            hooks += [
                x.register_hook(functools.partial(arrived.__setitem__, at)),
                node.register_prehook(functools.partial(_without, x.output_nr)),
            ]
    try:
        yield arrived
    finally:
        for hook in hooks:
            hook.remove()


def _without(number: int, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(subvals(gradients, [number], [None]))


# --- Another run ----------------------------------------------------------------------------------

_ANOTHER_RUN = "a second order runs f again, which must give grad_fn the same tensors"


Asked = Sequence[tuple[int, Tensor, Tensor]]
"""for each tensor its place, what the first run had there, and its upstream"""


def _made_again(
    run: Run, inputs: list[Tensor], variables: Sequence[Tensor], asked: Asked, upstreams: Sequence[Tensor] | None
) -> list[Tensor]:  # fmt: skip
    """Run f again on connected inputs, and return what the rule reads there at these places; all
    else is then as it was before.
    """
    if any(map(is_captured, inputs)):
        run.call.refuse(_ANOTHER_RUN, "the capture of a CUDA graph, where nobody can compare them",
                        "let grad_fn keep arguments and outputs alone")  # fmt: skip
    find = functools.partial(_in_another_run, run, inputs, variables, asked, upstreams)
    reach = Reach(run.call)
    generators = None if all(map(has_values, inputs)) else ()
    try:
        if any(isinstance(x, _GENERATORS) for x in reach.seen.values()):
            _refuse_random_numbers(run.call)
        with without_trace(reach), without_random_numbers(_refusing(run.call), generators):
            return contextvars.copy_context().run(run.with_state, variables, run.as_first, find)
    except (CustomGradientError, StopRecomputation):
        raise
    except Exception as error:
        # the first run did not raise it: f cannot run on differentiated inputs
        raise refusal(TransformationError, run.call.name, must=_ANOTHER_RUN,
                      got=f"a {type(error).__name__} in it",
                      do="compute in the framework what grad_fn keeps, or keep arguments and outputs alone"
                      ) from error  # fmt: skip


def _in_another_run(
    run: Run, inputs: list[Tensor], variables: Sequence[Tensor], asked: Asked, upstreams: Sequence[Tensor] | None
) -> list[Tensor]:  # fmt: skip
    call, known = run.call, [*inputs, *variables]
    kept_earlier = lambda reads, t: reads.refused(t, "f kept in an earlier call")
    anchors = [t for t in known if t.requires_grad]
    reads = _ReadsOfAnotherRun(call, run.existing, kept_earlier, known, anchors)
    reads.input_ids = set(map(id, inputs))
    start = sequence_number()
    with reads:
        result = run.run_again(inputs)
    outputs, rule = call.read(result, inputs)
    made = [held.tensor for held in Holdings(rule.grad_fn, existing=run.existing.holders).tensors]
    if upstreams is not None:
        known += [*made, *outputs, *upstreams]
        made = _read_by_the_rule(run, rule, inputs, variables, upstreams, known)
    elif len(made) != len(run.held):
        made = []
    residuals = []
    for place, first, _ in asked:
        t = made[place] if place < len(made) else None
        # it was no output in the first
        if t is None or any(t is y for y in outputs) or not agree(t, first):
            call.refuse(_ANOTHER_RUN, "others",
                        "compute them from the arguments alone, or pass them as an argument")  # fmt: skip
        if not reads.made(t):
            call.refuse_unconnected(
                first, "f does not make by operations of torch when it runs again"
            )
        residuals.append(t)
    if variables:
        connected = [t for t in residuals if t.requires_grad]
        read = captured(call, connected, inputs, since(start))
        if not {id(v) for v in read} <= {id(leaf_of(v) if v.is_leaf else v) for v in variables}:
            call.refuse(_ANOTHER_RUN, "those of other variables", "read the same ones in every run")
    return residuals


def _read_by_the_rule(
    run: Run, rule: Rule, inputs: Sequence[Tensor], variables: Sequence[Tensor], upstreams: Sequence[Tensor],
    known: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    """Return what the rule of another run reads, in order, of the tensors that nobody can place."""
    residuals: list[Tensor] = []

    def note(_: Reads, t: Tensor) -> Tensor:
        residuals.append(t)
        return t

    with _ReadsOfAnotherRun(run.call, run.existing, note, known) as reads:
        gradients = rule(inputs, upstreams, variables)
        with torch._C.DisableTorchFunction():
            reads.read_each(list(gradients))
    return residuals


def pulled_back_again(
    reads: Reads, vjp: Callable[..., Any], inputs: Sequence[Tensor], outputs: Sequence[Tensor],
    upstreams: Sequence[Tensor],
) -> Sequence[Tensor] | None:  # fmt: skip
    """Return what a pullback that f has made gives to a rule that makes a graph.

    Its own graph ends at what f saw. So its function runs again, on what the rule reads in the place
    of that. None if another run is none, or has an error: who takes the derivative is told.
    """
    connected = [*map(reads.read, inputs)]
    another = _ReadsOfAnotherRun(reads.call, reads.existing, lambda _, t: reads.read(t), connected)
    another.input_ids = set(map(id, connected))
    with _if_it_runs(), without_random_numbers(_refusing(reads.call)), another:
        again, pullback = vjp(connected)
        with torch._C.DisableTorchFunction():
            is_same = all(map(agree, again, outputs))
        if is_same:
            return pullback(upstreams)  # type: ignore[no-any-return]
    return None


# --- Random numbers -------------------------------------------------------------------------------

_GENERATORS = torch.Generator, random.Random, np.random.Generator, np.random.RandomState
Generator = tuple[Callable[[], Any], Callable[[Any], Any]]
"""how to read the state of a generator of random numbers, and how to set it"""
_OF_PYTHON_AND_NUMPY: list[Generator] = [
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
]


def _generators_of_torch() -> list[Generator]:
    generators = [
        torch.default_generator,
        *(torch.cuda.default_generators if torch.cuda.is_initialized() else ()),
    ]
    return [(g.get_state, g.set_state) for g in generators]


@contextlib.contextmanager
def without_random_numbers(
    refuse: Callable[[], NoReturn], generators: Sequence[Generator] | None = None
) -> Iterator[None]:
    """Refuse a run that draws random numbers, and let the generators be as they were: all of them,
    or these.
    """
    if generators is None:
        generators = [*_generators_of_torch(), *_OF_PYTHON_AND_NUMPY]
    with outside_of_modes():  # which cannot read them
        states = [get() for get, _ in generators]
    try:
        yield
    finally:
        with outside_of_modes():
            pairs = zip(generators, states, strict=True)
            changed = [(put, was) for (get, put), was in pairs if not _is_same(get(), was)]
            for put, was in changed:
                put(was)
        if changed:
            refuse()


def _refusing(call: Call) -> Callable[[], NoReturn]:
    return functools.partial(_refuse_random_numbers, call)


def _refuse_random_numbers(call: Call) -> NoReturn:
    call.refuse(_ANOTHER_RUN, "one that draws random numbers",
                "draw them outside, and pass them as an argument")  # fmt: skip


def _is_same(now: Any, was: Any) -> bool:
    """Return True for two states that are the same; those of Python and NumPy are tuples, with an
    array in one. torch.equal takes twice as long for the 5,000 bytes of torch's.
    """
    if isinstance(was, tuple):
        return all(map(np.array_equal, now, was))
    return bool(now.numpy().tobytes() == was.numpy().tobytes())


_IN_PLACE = frozenset(
    ["__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"]
)
_UPDATES_BUFFERS = {
    torch.nn.functional.batch_norm: 1, torch.nn.functional.instance_norm: 1,
    torch.batch_norm: 3, torch.instance_norm: 3, torch.native_batch_norm: 3,
}  # fmt: skip
"""where the mean and the variance are among the arguments of what updates them in training, which the sixth says"""


def _trains(func: Any, training: Any = None, use_input_stats: Any = None, **_: Any) -> bool:
    """Return what the arguments of such a function say; by default it is what instance_norm alone
    does.
    """
    said = use_input_stats if training is None else training
    return bool(func is torch.nn.functional.instance_norm if said is None else said)


class _ReadsOfAnotherRun(Reads):
    """Refuses to write to tensors that this run has not made, before they are written to."""

    input_ids: Collection[int] = ()
    """the identities of the inputs"""

    def before_operation(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        name = getattr(func, "__name__", "")
        if name == "requires_grad_" and functorch.is_functorch_wrapped_tensor(args[0]):
            return  # torch.func has just wrapped it
        written: list[Any] = [kwargs.get("out")]
        if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
            written += args[:1]
        elif func in _UPDATES_BUFFERS and _trains(func, *args[5:6], **kwargs):
            at = _UPDATES_BUFFERS[func]
            written += [*args[at : at + 2], kwargs.get("running_mean"), kwargs.get("running_var")]
        for t in tensors_in(written):
            whole = t._base if t._is_view() and id(t) not in self.input_ids else t
            if id(whole) in self.input_ids:
                self.call.refuse(
                    _ANOTHER_RUN, "one that changes its arguments in place", "let f change a copy"
                )
            if not self.made(whole):
                got = f"one that changes in place what existed before ({name})"
                self.call.refuse(_ANOTHER_RUN, got, "let f change a copy")


# --- Do two runs agree? ---------------------------------------------------------------------------

_ULPS = 8
"""how many units in the last place the order of sums may change"""


def agree(a: Tensor, b: Tensor) -> bool:
    """Return True if tensors are equal except for the order of sums, or hold no values; False if
    not comparable.
    """
    a, b = a.detach(), b.detach()
    if type(a) is not type(b) or (a.dtype, a.layout, a.device) != (b.dtype, b.layout, b.device):
        return False
    try:
        if a.is_nested:
            parts = a.unbind(), b.unbind()
            return len(parts[0]) == len(parts[1]) and all(map(agree, *parts))
        if not has_values(a):
            return bool(a.shape == b.shape)
        if hasattr(a, "__tensor_flatten__"):
            (names, context), of_b = a.__tensor_flatten__(), b.__tensor_flatten__()
            pairs = [(getattr(a, name), getattr(b, name)) for name in names]
            return (names, context) == of_b and all(  # the mesh of a DTensor is such a part, too
                agree(p, q) if isinstance(p, torch.Tensor) else p == q for p, q in pairs
            )
        # none if one ulp is more than that
        ulps = _ULPS * torch.finfo(a.dtype).eps if a.dtype in FLOATS else 0.0
        a, b = a.to_dense(), b.to_dense()
        if a.dtype in FLOATS and a.dtype.itemsize <= 2:
            a, b = a.float(), b.float()
        with outside_of_modes():  # a graph that is made of this has no values that can be read
            torch.testing.assert_close(a, b, rtol=min(ulps, 0.05), atol=0.0, equal_nan=True)
        return True
    except (
        AssertionError,
        AttributeError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ):
        return False
