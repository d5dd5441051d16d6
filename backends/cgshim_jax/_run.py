"""What one run of f leaves: its outputs, the residuals, and its rule as a linear map, in one of
three ways.

- As it was written: the rule is called where a gradient is taken, on the tensors that it holds.
- Traced: it becomes a jaxpr at once. The constants of that jaxpr are all that it reads, wherever f
  saved it: an argument, one of f's outputs, which stands for the op's own, or what f's operations
  made of the arguments.
- Watched, if it cannot be traced because it branches on values: it runs at each derivative, and at
  each of its reads the argument or output of that derivative is put in the place of the one that it
  holds.
"""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.errors import UnexpectedTracerError
from jax.extend.core import ClosedJaxpr

from cgshim.backend import (
    Call,
    CustomGradientError,
    Rule,
    TransformationError,
    describe,
    refusal,
    refuse_captured_tangent,
    subvals,
)
from cgshim_jax._axes import spread
from cgshim_jax._primitives import Linear, without_derivative, without_f
from cgshim_jax._rules import (
    apply_jvp_fn,
    apply_rule,
    floats_among,
    is_differentiable,
    message_of,
    type_of_upstream,
    zeros_of,
)
from cgshim_jax._tracing import (
    Array,
    current_trace,
    eval_jaxpr,
    is_tracer,
    jaxpr_of,
    keeping_calls,
    lowered,
    reads_a_value,
    revived,
    watching,
)

T = TypeVar("T", bound="TracedRule")


def is_raised_by_jax(error: Exception) -> bool:
    """Return True if JAX has raised an error, or refuses something in our words; the author has
    not.
    """
    return isinstance(error, TransformationError) or _is_of_jax(
        traceback.extract_tb(error.__traceback__)[-1]
    )


def _is_of_jax(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(os.path.dirname(str(jax.__file__)))


_finished: weakref.WeakSet[Any] = weakref.WeakSet()
"""the traces of rules that have run: of what was made there, and something keeps, another run may read nothing"""


class TracedRule:
    """A rule as a jaxpr, from what it reads and upstreams to gradients; or the error that its
    author raises.
    """

    jaxpr: ClosedJaxpr
    reads: Sequence[int] = ()
    """the places among the residuals of what it captured"""
    error: Exception | None = None
    """what comes when a gradient is asked for"""
    needs_values = False
    """whether it comes because the rule reads values, which its trace does not have"""

    def __init__(
        self, rule: Rule, inputs: Sequence[Array], outputs: Sequence[Array], variables: Sequence[Array] = (),
        known: Sequence[Array] = (), needed: Sequence[bool] | None = None, runs_eagerly: bool = False,
    ) -> None:  # fmt: skip
        """Trace the rule; `captured` are the tracers that it reads, and which of the known tensors."""
        types = [type_of_upstream(y.aval) for y in outputs if is_differentiable(y)]

        def backward(*upstreams: Array) -> list[Array]:
            with keeping_calls() if runs_eagerly else contextlib.nullcontext():
                gradients = apply_rule(rule, inputs, outputs, upstreams, variables, needed)
            self.returned = [i for i, gradient in enumerate(gradients) if gradient is not None]
            return [gradients[i] for i in self.returned]

        asked = floats_among([*inputs, *variables])
        self._trace(rule.arguments.op, backward, types, known, rule.grad_fn, asked)

    def _trace(
        self, op: str, function: Callable[..., Any], types: Sequence[Any], known: Sequence[Array], author: Any,
        asked: list[int],
    ) -> None:  # fmt: skip
        """Trace the author's function, or keep the error that it raises whatever is asked for."""
        self.captured: list[Array] = []
        traces: list[Any] = []

        def within(*tensors: Array) -> list[Array]:
            traces.append(current_trace())
            return function(*tensors)  # type: ignore[no-any-return]

        try:
            self.jaxpr, captured = jaxpr_of(within, types, known, author)
            for x in captured:
                if getattr(x, "_trace", None) in _finished:
                    raise refusal(TransformationError, op,
                                  must="grad_fn and jvp_fn must not share what one of them computes",
                                  got=f"{describe(x)} that another run of them has made, and kept",
                                  do="compute it in f")  # fmt: skip
            self.captured = captured
        except Exception as error:  # noqa: BLE001  # the author's own may be a way to forbid gradients
            self.needs_values = reads_a_value(error)
            self.error = _without_frames(error)
            self.returned = asked
        finally:
            _finished.update(traces)

    @property
    def constants(self) -> Sequence[Any]:
        """What else it reads."""
        return self.jaxpr.consts if self.error is None else []

    def __call__(self, residuals: Sequence[Array], upstreams: Sequence[Array]) -> dict[int, Array]:
        """Return the gradients that there are, by the places of the inputs, and of the variables
        after them.
        """
        if self.error is not None:
            raise self.error
        gradients = eval_jaxpr(self.jaxpr, [*upstreams, *(residuals[at] for at in self.reads)])
        return dict(zip(self.returned, gradients, strict=True))


class TracedTangents(TracedRule):
    """A jvp_fn as a jaxpr, from what it reads and the inputs' tangents to those of the outputs."""

    def __init__(
        self,
        rule: Rule,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        known: Sequence[Array] = (),
        needed: Sequence[bool] | None = None,
    ) -> None:
        self.float_at = [at for at in floats_among(inputs) if needed is None or needed[at]]
        of_inputs = [x.aval for x in inputs]
        self.types = [type_of_upstream(of_inputs[at]) for at in self.float_at]

        def forward(*of_floats: Array) -> list[Array]:
            full = subvals([None] * len(inputs), self.float_at, of_floats)
            tangents = apply_jvp_fn(rule, full, of_inputs, outputs)
            self.returned = [at for at, tangent in enumerate(tangents) if tangent is not None]
            return [tangents[at] for at in self.returned]

        self._trace(
            rule.arguments.op, forward, self.types, known, rule.jvp_fn, floats_among(outputs)
        )

    def push(
        self, residuals: Sequence[Array], tangents: Mapping[int, Array], outputs: Sequence[Any]
    ) -> list[Array]:
        """Return the tangents of outputs of these types from those of some inputs."""
        full = [
            tangents.get(at, zeros_of(kind))
            for at, kind in zip(self.float_at, self.types, strict=True)
        ]
        output_tangents = self(residuals, full)
        return _with_zeros([output_tangents.get(at) for at in range(len(outputs))], outputs)


def _with_zeros(tangents: Sequence[Array | None], outputs: Sequence[Any]) -> list[Array]:
    """Return the tangents of outputs of these types, those of floats alone, with zeros for None."""
    types = [(at, type_of_upstream(outputs[at])) for at in floats_among(outputs)]
    return [
        zeros_of(kind) if tangents[at] is None else spread(tangents[at], kind) for at, kind in types
    ]


def _without_frames(error: Exception) -> Exception:
    """Return the error without its frames, which would keep tracers alive; a note tells where it
    was raised.
    """
    frames = traceback.extract_tb(error.__traceback__)
    origin = next((x for x in reversed(frames) if not _is_of_jax(x)), frames[-1])
    if hasattr(error, "add_note") and not isinstance(error, CustomGradientError):
        error.add_note(f'Raised by the rule, in "{origin.filename}", line {origin.lineno}')
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def trace_rule(
    rule: Rule, inputs: Sequence[Array], outputs: Sequence[Array], known: Sequence[Array],
    variables: Sequence[Array] = (), *, places: Sequence[int], choices: Iterable[Sequence[int]],
    is_pushed: bool, runs_eagerly: bool = False,
) -> tuple[dict[Any, TracedRule], dict[Any, TracedTangents]]:  # fmt: skip
    """Return the traces of a rule, none if all modes use its jvp_fn, and those of its jvp_fn, if it
    has one.

    Each is traced for all arguments, and as it is for each choice of those that are differentiated,
    if it asks. What cannot run again runs for all.
    """

    def for_each(trace: Callable[..., T], takes_needs_input_grad: bool) -> dict[Any, T]:
        each: dict[Any, T] = {None: trace(needed=None)}
        for picked in choices if takes_needs_input_grad else ():
            of_choice = trace(needed=_needed(places, picked, len(inputs)))
            if of_choice.error is None:
                each[picked] = of_choice
        return each

    rules: dict[Any, TracedRule] = {}
    forwards: dict[Any, TracedTangents] = {}
    if not is_pushed:
        pull = functools.partial(
            TracedRule, rule, inputs, outputs, variables, known, runs_eagerly=runs_eagerly
        )
        rules = for_each(pull, rule.takes_needs_input_grad)
    if rule.jvp_fn:
        push = functools.partial(TracedTangents, rule, inputs, outputs, known)
        forwards = for_each(push, rule.jvp_takes_needs_input_grad)
    return rules, forwards


def traced(
    call: Call,
    rules: Mapping[Any, TracedRule],
    arguments: Sequence[Array],
    outputs: Sequence[Array],
    forwards: Mapping[Any, TracedTangents],
    variables: Sequence[Array] = (),
) -> tuple[list[Array], Callable[[Sequence[int | None]], Linear]]:
    """Return the residuals that are neither arguments nor outputs, and what makes the linear map by
    traced rules.

    That is called with the place of each argument's gradient among those of the rule. More
    arguments than these may come after them. The rule of the key None serves where none was traced
    for the arguments that are differentiated.
    """
    known = {id(x) for x in (*arguments, *outputs)}
    each: list[TracedRule] = [*rules.values(), *forwards.values()]
    captured = {id(x): x for rule in each for x in rule.captured}
    if call.once_differentiable:  # a rule that reads none of these has no derivative, either
        refusal = message_of(call.refuse_second_order, "its derivative")
        (anchor,) = without_derivative(call, [jnp.zeros(0)], [*arguments, *variables], refusal)
        captured[id(anchor)] = anchor
    extra_residuals = [x for identity, x in captured.items() if identity not in known]
    # places of arguments count from the first, the others' from the last: more may come in between
    rest = [*extra_residuals, *outputs]
    place = {id(x): at - len(rest) for at, x in reversed([*enumerate(rest)])}
    place |= {id(x): at for at, x in reversed([*enumerate(arguments)])}
    reads = [place[identity] for identity in captured]
    for rule in each:
        rule.reads = [reads.index(place[id(x)]) for x in rule.captured]
        rule.captured = []  # no tracer of f leaves it
    types = [y.aval for y in outputs]

    def linear(gradient_of: Sequence[int | None]) -> Linear:
        def gradients(
            residuals: list[Array], upstreams: list[Array], picked: Sequence[int]
        ) -> list[Array | None]:
            rule: Any = rules.get(picked, rules[None])
            by_place = rule(residuals, upstreams)
            return [by_place.get(gradient_of[at]) for at in picked]

        def push(
            residuals: list[Array], tangents: list[Array], picked: Sequence[int]
        ) -> list[Array]:
            forward = forwards.get(picked, forwards[None])
            own = {gradient_of[at]: t for at, t in zip(picked, tangents, strict=True)}
            if not own.keys() <= set(forward.float_at):
                refuse_captured_tangent(call.name)
            return forward.push(residuals, own, types)  # type: ignore[arg-type]

        returned = {at for rule in rules.values() for at in rule.returned}
        gives = {at for at, gradient in enumerate(gradient_of) if gradient in returned}
        if forwards:
            gives = {at for at, gradient in enumerate(gradient_of) if gradient is not None}
        return Linear(call, gradients, types, reads, gives, push if forwards else None, not rules)

    return extra_residuals, linear


def written(
    call: Call, rule: Rule, inputs: Sequence[Array], outputs: Sequence[Array], places: Sequence[int]
) -> Linear:
    """Return a linear map by the rule as it was written, or by its jvp_fn alone if it is the
    transpose of that. It keeps nothing but what the rule holds.
    """
    gives = [at for at, i in enumerate(places) if is_differentiable(inputs[i])]
    of_inputs, types = [x.aval for x in inputs], [y.aval for y in outputs]
    inputs = list(inputs) if rule.needs_inputs else []

    def call_rule(upstreams: Sequence[Array], picked: Sequence[int]) -> list[Array | None]:
        needed = _needed(places, picked, len(rule.shapes))
        by_input = apply_rule(rule, inputs, types, upstreams, needed=needed)
        return [by_input[places[at]] for at in picked]

    def gradients(
        _: list[Array], upstreams: list[Array], picked: Sequence[int]
    ) -> list[Array | None]:
        try:
            return call_rule(upstreams, picked)
        except UnexpectedTracerError:
            present = lambda *us: [g for g in call_rule(us, picked) if g is not None]
            for x in jaxpr_of(present, [u.aval for u in upstreams])[1]:
                call.refuse_captured(x)
            raise

    push: Any = rule.jvp_fn and _pushing(rule, of_inputs, types, places)
    is_pushed = rule.is_transpose and not call.once_differentiable
    return Linear(
        without_f(call), push if is_pushed else gradients, types, [], gives, push, is_pushed
    )


def _pushing(
    rule: Rule, inputs: Sequence[Any], outputs: Sequence[Any], places: Sequence[int]
) -> Any:
    """Return the map by the jvp_fn as it was written, from inputs to outputs of these types."""

    def push(_: list[Array], tangents: Sequence[Array], picked: Sequence[int]) -> list[Array]:
        full = subvals([None] * len(inputs), [places[at] for at in picked], tangents)
        return _with_zeros(apply_jvp_fn(rule, full, inputs, outputs), outputs)

    return push


def _needed(places: Sequence[int], picked: Iterable[int], count: int) -> list[bool]:
    needed = {places[at] for at in picked}
    return [i in needed for i in range(count)]


def watched(
    call: Call, rule: Rule, inputs: Sequence[Array], outputs: Sequence[Array], places: Sequence[int],
    unconnected: Callable[[Any], str],
) -> Linear:  # fmt: skip
    """Return a linear map by the rule as it was written, on the arguments and outputs of each
    derivative.
    """
    held = [*(inputs[i] for i in places), *outputs]
    types = [y.aval for y in outputs]

    def reading(residuals: list[Array]) -> Callable[[Array], Array]:
        # an argument that f returns is the argument
        own = {id(x): y for x, y in reversed([*zip(held, residuals, strict=True)])}

        def read(x: Array) -> Array:
            value = own.get(id(x), x)
            if value is x and is_tracer(x) and (value := lowered(x)) is not x:
                arguments = residuals[: len(places)]
                (value,) = without_derivative(call, [value], arguments, unconnected(x))
            return value

        return read

    def gradients(
        residuals: list[Array], upstreams: list[Array], picked: Sequence[int]
    ) -> list[Array | None]:
        read, current = reading(residuals), subvals(inputs, places, residuals[: len(places)])
        needed = _needed(places, picked, len(inputs))
        with _watching(call.name, held, read):
            by_input = apply_rule(rule, current, residuals[len(places) :], upstreams, needed=needed)
        return [None if g is None else read(g) for g in (by_input[places[at]] for at in picked)]

    pushing = _pushing(rule, [x.aval for x in inputs], types, places)

    def push(residuals: list[Array], tangents: list[Array], picked: Sequence[int]) -> list[Array]:
        read = reading(residuals)
        with _watching(call.name, held, read):
            return [*map(read, pushing(residuals, tangents, picked))]

    return Linear(
        call, gradients, types, range(len(held)), range(len(places)), push if rule.jvp_fn else None
    )


@contextlib.contextmanager
def _watching(op: str, held: Sequence[Array], read: Callable[[Array], Array]) -> Iterator[None]:
    """Run a rule that holds these tensors, and what f made of them, and whose reads are these."""
    try:
        with revived(held), watching(read):
            yield
    except UnexpectedTracerError:  # the tracers of a batch are gone
        raise refusal(TransformationError, op,
                      must="the rule of an op under vmap must be one that JAX can trace",
                      got="a branch on a value",
                      do="write it as jnp.where or jax.lax.cond") from None  # fmt: skip
