"""PyTorch: gradients that may be differentiated: what a rule reads is connected with the arguments.

An input that the rule reads is the input, an output the op's own output. A residual is a node of the graph that runs
f again, on connected inputs, if its derivative is really taken. That run gives derivatives and never values: it must
agree with the first one, draws no random number, and leaves no trace.
"""

from __future__ import annotations

import contextvars
import ctypes
import itertools
import pickle
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch

from cgshim.backend import CustomGradientError, TransformationError, sentence
from cgshim_torch._agree import agree
from cgshim_torch._existing import Footprint, Reach
from cgshim_torch._graph import captured, has_values, leaf_of, now, since
from cgshim_torch._reads import FLOATS, Reads, tensors_in
from cgshim_torch._residuals import Holdings, holding
from cgshim_torch._single import SingleLevelFunction

if TYPE_CHECKING:
    from cgshim.backend import Call, Rule
    from cgshim_torch._run import Gradients, Run

Tensor = Any


def differentiable_gradients(
    run: Run, saved: Sequence[Tensor], upstreams: Sequence[Tensor], needed: Sequence[bool]
) -> Gradients:  # fmt: skip
    """Return the rule's gradients as functions of the inputs, the variables and the upstreams."""
    inputs = run.inputs_among(saved)
    substitutes = _connected(run, saved, inputs)
    held = [(each, substitutes[at]) for each, at in zip(run.held, run.held_at, strict=True) if at is not None]
    if run.reads_variables_alone:  # then that is all, and each operation costs what it costs
        with holding([each for each, _ in held], [t for _, t in held], run.lock):
            return run.gradients(inputs, upstreams, run.variables, needed)
    turns = itertools.count()
    reads = Reads(run.call, run.existing, lambda t: _placed_by_turn(run, reads, next(turns), t, inputs, upstreams))
    reads.anchors = [
        t for t in (*saved, *run.variables, *upstreams, run.anchor) if t is not None and t.requires_grad
    ]  # fmt: skip
    reads.knows(*upstreams, *run.variables)
    reads.hides_nothing = not run.may_hide
    for at, (raw, substitute) in enumerate(zip(run.raw, substitutes, strict=True)):
        if at not in run.own_at:
            reads.put(substitute if raw is None else raw, substitute)
    for x in inputs:
        if x is not None:
            reads.knows(x)
    try:
        with holding([each for each, _ in held], [t for _, t in held], run.lock), reads:
            of_inputs, of_variables = run.gradients(inputs, upstreams, run.variables, needed)
        return reads.result(of_inputs), reads.result(of_variables)
    finally:
        reads.close()


def _connected(run: Run, saved: Sequence[Tensor], inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Return what was saved, with the residuals that f made as functions of inputs and variables."""
    connected = list(saved)
    known = {*run.inputs_at, *run.outputs_at}
    places = [at for at, t in enumerate(saved) if at not in known and t.dtype in FLOATS and not t.requires_grad]
    if places and all(x is not None for x in inputs):
        numbers = [run.held_at.index(at) for at in places]
        functions = _Residuals.apply(run, numbers, [saved[at] for at in places], *inputs, *run.variables)
        for at, function in zip(places, functions, strict=True):
            connected[at] = function
    return connected


def _placed_by_turn(
    run: Run, reads: Reads, turn: int, t: Tensor, inputs: Sequence[Tensor | None], upstreams: Sequence[Tensor]
) -> Tensor:  # fmt: skip
    """Return a tensor that the rule reads, nobody knows from where, as a function of inputs and variables."""
    if any(x is None for x in inputs):
        return reads.refused(t, "f has not returned, and that may depend on an argument")
    constants = [u.detach() for u in upstreams]
    function: Tensor = _Unplaced.apply(run, turn, t.detach(), constants, *inputs, *run.variables)
    return function


class _Residuals(SingleLevelFunction):
    """Returns aliases of residuals, whose gradients come from another run of f: from what its rule holds there."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, numbers: Sequence[int], residuals: list[Tensor], *dependencies: Tensor
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.run, ctx.numbers = run, numbers
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*residuals, *dependencies)
        return tuple([t.detach() for t in residuals])

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(ctx.numbers)
        residuals, dependencies = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        asked = [at for at, u in enumerate(upstreams) if u is not None]

        def made(run: AnotherRun) -> list[Tensor]:
            held = Holdings(run.rule.grad_fn, ctx.run.existing.holders).tensors
            if len(held) != len(ctx.run.held):
                run.refuse_others()
            return [run.checked(held[ctx.numbers[at]].tensor, residuals[at]) for at in asked]

        gradients = _derivatives(ctx.run, made, dependencies, [upstreams[at] for at in asked])
        return None, None, None, *gradients


class _Unplaced(SingleLevelFunction):
    """Returns an alias of what the rule has read in its turn; its gradient comes from another run of f and the rule."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, turn: int, t: Tensor, constants: list[Tensor], *dependencies: Tensor
    ) -> Tensor:  # fmt: skip
        ctx.run, ctx.turn, ctx.count = run, turn, len(constants)
        ctx.save_for_backward(t, *constants, *dependencies)
        return t.detach()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        t, *others = ctx.saved_tensors
        constants, dependencies = others[: ctx.count], others[ctx.count :]
        made = lambda run: [run.checked(run.read_by_the_rule(ctx.turn, constants), t)]
        return None, None, None, None, *_derivatives(ctx.run, made, dependencies, [upstream])


def _derivatives(
    run: Run, made: Callable[[AnotherRun], list[Tensor]], dependencies: Sequence[Tensor], upstreams: Sequence[Tensor]
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of the inputs and the variables, from those of what another run has made."""
    count = len(run.devices)
    with torch.enable_grad():
        again = AnotherRun(run, list(map(_own_node, dependencies[:count])), dependencies[count:])
        try:
            tensors = again.find(made)
        finally:
            again.close()
    inputs = again.inputs
    wanted = [*inputs, *dependencies[count:]]
    asked = [x for x in wanted if x.requires_grad]
    pairs = [(t, u) for t, u in zip(tensors, upstreams, strict=True) if t.requires_grad]
    if not pairs:
        return [None] * len(wanted)
    found = iter(torch.autograd.grad(
        [t for t, _ in pairs], asked, [u for _, u in pairs], create_graph=torch.is_grad_enabled(), allow_unused=True
    ))  # fmt: skip
    gradients = [next(found) if x.requires_grad else None for x in wanted]
    if all(g is None for g in gradients):
        run.call.refuse_unconnected(tensors[0], "belongs to a graph that f began itself")
    return gradients


def _own_node(x: Tensor) -> Tensor:
    """Return an input as a node of its own in the graph; a view takes no memory."""
    if not x.requires_grad:
        return x.detach()
    return x.view_as(x) if x.layout is torch.strided and not x.is_nested else x.clone()


# --- Another run --------------------------------------------------------------------------------------------------

_ANOTHER_RUN = "a second order runs f again, which must give grad_fn the same tensors"


class AnotherRun:
    """Runs f again on connected inputs, and finds what its rule reads there."""

    rule: Rule

    def __init__(self, run: Run, inputs: list[Tensor], variables: Sequence[Tensor]) -> None:
        self._run = run
        self._call: Call = run.call
        self.inputs = inputs
        self._variables = variables
        self._reads = _ReadsOfAnotherRun(
            run.call, run.existing, lambda t: self._reads.refused(t, "f kept in an earlier call")
        )
        self._reads.anchors = [t for t in (*inputs, *variables) if t.requires_grad]
        self._reads.knows(*inputs, *variables)
        self._reads.given = set(map(id, inputs))

    def find(self, made: Callable[[AnotherRun], list[Tensor]]) -> list[Tensor]:
        """Return what `made` finds in another run; all else is as it was before."""
        if self._run.changed:
            self._refuse("one that changes its arguments in place", "let f change a copy")
        reach = Reach(self._call)
        generators = list(_generators(reach)) if all(map(has_values, self.inputs)) else []
        states = [generator.get() for generator in generators]
        footprint, has_drawn = Footprint(reach), False
        try:
            found = contextvars.copy_context().run(self._found, made)
        finally:
            footprint.put_back()
            for generator, before in zip(generators, states, strict=True):
                if generator.get() != before:
                    generator.put(before)
                    has_drawn = True
            if has_drawn:
                self._refuse("one that draws random numbers", "draw them outside, and pass them as an argument")
        return found

    def _found(self, made: Callable[[AnotherRun], list[Tensor]]) -> list[Tensor]:
        state = self._run.state
        try:
            if state is None:
                return self._run.as_first(self._call_and_find, made)
            return state.run_with(self._variables, self._run.as_first, self._call_and_find, made)
        except CustomGradientError:
            raise
        except Exception as error:  # the first run did not raise it: f cannot run on differentiated inputs
            raise TransformationError(
                sentence(self._call.name, must=_ANOTHER_RUN, got=f"a {type(error).__name__} in it",
                         do="compute in the framework what grad_fn keeps, or keep arguments and outputs alone")
            ) from error  # fmt: skip

    def _call_and_find(self, made: Callable[[AnotherRun], list[Tensor]]) -> list[Tensor]:
        start = now()
        with self._reads:
            result = self._call.run(self.inputs)
        self.outputs, self.rule = self._call.read(result, self.inputs)
        during = since(start)
        found = made(self)
        if self._variables:
            read = captured(self._call, [t for t in found if t.requires_grad], self.inputs, during)
            if not {id(v) for v in read} <= {id(leaf_of(v) if v.is_leaf else v) for v in self._variables}:
                self._refuse("those of other variables", "read the same ones in every run")
        return found

    def read_by_the_rule(self, turn: int, upstreams: Sequence[Tensor]) -> Tensor:
        """Return what the rule of this run reads in its turn, of the tensors that nobody can place."""
        found: list[Tensor] = []

        def note(t: Tensor) -> Tensor:
            found.append(t)
            return t

        reads = _ReadsOfAnotherRun(self._call, self._run.existing, note)
        held = [each.tensor for each in Holdings(self.rule.grad_fn, self._run.existing.holders).tensors]
        reads.knows(*self.inputs, *held, *upstreams, *self._variables)
        try:
            with reads:
                gradients = self.rule(self.inputs, upstreams, self._variables)
            with torch._C.DisableTorchFunction():
                reads.read_each(list(gradients))
        finally:
            reads.close()
        if turn >= len(found) or any(found[turn] is y for y in self.outputs):  # in the first run it was none
            self.refuse_others()
        return found[turn]

    def checked(self, t: Tensor, first: Tensor) -> Tensor:
        """Return a tensor of this run if it agrees with that of the first, and f's operations have made it."""
        if not agree(t, first):
            self.refuse_others()
        if not self._reads.made(t):
            self._call.refuse_unconnected(first, "f does not make by operations of torch when it runs again")
        return t

    def close(self) -> None:
        self._reads.close()

    def refuse_others(self) -> NoReturn:
        self._refuse("others", "compute them from the arguments alone, or pass them as an argument")

    def _refuse(self, got: str, do: str) -> NoReturn:
        self._call.refuse(_ANOTHER_RUN, got, do)


_IN_PLACE = frozenset(["__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"])
_UPDATES_BUFFERS = (torch.nn.functional.batch_norm, torch.nn.functional.instance_norm, torch.batch_norm)


class _ReadsOfAnotherRun(Reads):
    """Refuses to write to tensors that this run has not made, before they are written to."""

    given: Collection[int] = ()
    """the identities of the inputs"""

    def before_operation(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        name = getattr(func, "__name__", "")
        written: list[Any] = [kwargs.get("out")]
        if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
            written += args[:1]
        elif func in _UPDATES_BUFFERS and (
            args[5:6] == (True,) or kwargs.get("training") or kwargs.get("use_input_stats")
        ):
            written += [*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var")]
        for t in tensors_in(written):
            whole = t._base if t._is_view() and id(t) not in self.given else t
            if id(whole) in self.given:
                self.call.refuse(_ANOTHER_RUN, "one that changes its arguments in place", "let f change a copy")
            if not self.made(whole):
                got = f"one that changes in place what existed before ({name})"
                self.call.refuse(_ANOTHER_RUN, got, "let f change a copy")


# --- Random numbers -----------------------------------------------------------------------------------------------


class Generator(NamedTuple):
    """How to read the state of a generator of random numbers, and how to set it."""

    get: Callable[[], Any]
    put: Callable[[Any], Any]


def _generators(reach: Reach) -> Iterator[Generator]:
    """Yield the generators of the process, and those that f can name."""
    if reach.roots or not _TAKES_NO_NUMBERS.issuperset(reach.libraries()):
        yield Generator(random.getstate, random.setstate)
        yield Generator(_state_of_numpy, _set_state_of_numpy)
    yield _of_torch(torch.default_generator)
    if torch.cuda.is_initialized():
        yield from map(_of_torch, torch.cuda.default_generators)
    for x in itertools.chain(reach.roots, *map(reach.values_of, reach.containers())):
        if isinstance(x, torch.Generator):
            yield _of_torch(x)
        elif isinstance(x, random.Random):
            yield Generator(x.getstate, x.setstate)
        elif isinstance(x, np.random.RandomState):
            yield _of_numpy(x._bit_generator)
        elif isinstance(x, np.random.Generator):
            yield _of_numpy(x.bit_generator)


def _of_torch(generator: Any) -> Generator:
    return Generator(
        lambda: generator.get_state().numpy().tobytes(),
        lambda state: generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    )


def _of_numpy(generator: Any) -> Generator:
    return Generator(
        lambda: pickle.dumps(generator.state), lambda state: setattr(generator, "state", pickle.loads(state))
    )


_TAKES_NO_NUMBERS = frozenset(["torch", "math", "cgshim", "cgshim_torch", "builtins"])
"""libraries that draw no number from the generators of Python and NumPy"""


def _state_of_numpy() -> bytes:
    """Return the state of NumPy's own generator, from memory: to ask for it takes 45 us."""
    generator: Any = np.random.mtrand._rand._bit_generator
    if type(generator) is not np.random.MT19937:
        return pickle.dumps(generator.state)
    return ctypes.string_at(generator.ctypes.state_address, _SIZE_OF_STATE)


def _set_state_of_numpy(state: bytes) -> None:
    generator: Any = np.random.mtrand._rand._bit_generator
    if type(generator) is not np.random.MT19937:
        generator.state = pickle.loads(state)
    else:
        ctypes.memmove(generator.ctypes.state_address, state, _SIZE_OF_STATE)


_SIZE_OF_STATE = 625 * 4
"""of the Mersenne Twister: 624 numbers, and the place among them"""
