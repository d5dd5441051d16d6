"""Calls under reverse mode, with values that are known below the derivatives.

The usual call has one derivative around values. There f runs on the values, and the backward pass of a jax.custom_vjp
calls the very function that f returned, on the tensors that it holds: nothing is traced or replaced.

Under several derivatives, or a vmap, f runs once, on the tensors below the innermost derivative, and its rule is traced
there and then. The constants of that trace are all that the rule reads, wherever f kept it: an argument, one of f's
outputs, which stands for the op's own, or what f's operations made of the arguments. The other derivatives use the
same jaxpr. A rule that cannot be traced, because it branches on values, is watched: it runs at each derivative, and at
each of its reads the tensor of that derivative is put in the place of the one that it holds.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import UnexpectedTracerError

from cgshim.backend import SIMPLE, RuleScope, place_of, subvals, tensors_inside
from cgshim_jax._primitives import Transposed, spread, without_derivative
from cgshim_jax._private import described
from cgshim_jax._rules import apply_rule, as_tensor, code_of, is_differentiable, is_tensor, message_of, of_tangents
from cgshim_jax._staged_rule import StagedRule
from cgshim_jax._tracing import (
    CONCRETIZATION_ERRORS,
    Surroundings,
    captured_by,
    holds_constants,
    is_differentiated,
    is_known,
    is_perturbed,
    is_tracer,
    lowered,
    may_be_batched,
    perturbed_by_each_derivative,
    surroundings,
    value_below_derivatives,
    watching,
)

if TYPE_CHECKING:
    from cgshim.backend import Call, Rule

Array = Any
Gradient = Array | None


class NotAsWrittenError(Exception):
    """f closes over a tensor that is being differentiated."""


class Static:
    """A residual that JAX does not look into."""

    def __init__(self, content: Any) -> None:
        self.content = content


jax.tree_util.register_pytree_node(Static, lambda static: ((), static), lambda static, _: static)


# --- One derivative ---------------------------------------------------------------------------------------------------


def closes_over_differentiated(call: Call) -> bool:
    """Return True if f is given, or holds, a tracer that is differentiated: as a variable, or in a Flax module."""
    given = [leaf for spec in call.arguments.specs for leaf in spec.static_leaves()]
    holders = [call.f, *given, *call.options.values()]
    return any(
        is_differentiated(x)
        for each in holders if type(each) not in SIMPLE
        for x in (each, *tensors_inside(each, is_tensor, _DEPTH))
    )  # fmt: skip


def run_as_written(call: Call, inputs: Sequence[Array]) -> Any:
    """Return the output under one derivative; raise NotAsWrittenError if f reads what is differentiated elsewhere."""
    places = [i for i, x in enumerate(inputs) if is_tracer(x)]
    needed = [is_perturbed(x) and is_differentiable(x) for x in inputs]
    output_spec: Any = None

    def run(values: Sequence[Array]) -> tuple[list[Array], list[Array], Rule]:
        nonlocal output_spec
        full = subvals(inputs, places, [*map(as_tensor, values)])
        outputs, rule = call(full)
        output_spec = rule.output
        return full, outputs, of_tangents(call, rule)

    def primal(*values: Array) -> list[Array]:
        return run(values)[1]

    def forward(*values: Array) -> tuple[list[Array], Any]:
        full, outputs, rule = run(values)
        return outputs, Static((rule, full if rule.needs_inputs else [], [y.aval for y in outputs]))

    def backward(residuals: Static, upstreams: Sequence[Array]) -> tuple[Gradient, ...]:
        rule, inputs_of_rule, types = residuals.content
        gradients = _gradients_by_rule(call, rule, inputs_of_rule, types, upstreams, needed)
        return tuple(gradients[i] for i in places)

    outputs = _with_vjp(call, primal, forward, backward, [inputs[i] for i in places])
    if not places and any(map(is_tracer, outputs)):
        raise NotAsWrittenError
    return output_spec.combine(outputs)


def _with_vjp(
    call: Call, primal: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any],
    arguments: list[Array],
) -> list[Array]:  # fmt: skip
    """Return the outputs at the arguments, by a jax.custom_vjp that refuses forward mode in our words."""
    count = len(arguments)
    if surroundings() is Surroundings.LINEARIZATIONS:
        op: Any = jax.custom_vjp(described(lambda *xs: primal(*xs[:count]), count + 1))
        op.defvjp(
            described(lambda *xs: forward(*xs[:count]), count + 1),
            described(lambda residuals, upstreams: (*backward(residuals, upstreams), None), 2),
        )
        arguments = [*arguments, _refusing_forward_mode(call, arguments)]
    else:
        op = jax.custom_vjp(described(primal, count))
        op.defvjp(described(forward, count), described(backward, 2))
    try:
        return list(op(*arguments))
    except UnexpectedTracerError:
        raise NotAsWrittenError from None


def _refusing_forward_mode(call: Call, arguments: Sequence[Array]) -> Array:
    """Return a zero that has no derivative in forward mode: executed, it raises the error for it.

    It serves a JAX that does not tell jax.linearize from reverse mode (before 0.9).
    """
    floats = [x for x in arguments if is_differentiable(x)]
    types, zero = [x.aval for x in floats], jnp.zeros(())
    words = message_of(call.refuse_forward_mode, "jvp, jacfwd or linearize")
    no_gradients = lambda residuals, upstreams: [jnp.zeros(kind.shape, kind.dtype) for kind in types]
    return Transposed(call.name, no_gradients, [zero.aval], lambda: words).attach([], floats, [zero])[0]


def _gradients_by_rule(
    call: Call, rule: Rule, inputs: Sequence[Array], types: Sequence[Any], upstreams: Sequence[Array],
    needed: Sequence[bool],
) -> list[Gradient]:  # fmt: skip
    """Return the gradients of the inputs, by a rule that runs as it is."""
    given = {
        at: u if is_tensor(u) else jnp.asarray(u, types[at].dtype)  # a pullback may be given Python's numbers
        for at, u in enumerate(upstreams) if is_differentiable(types[at])
    }  # fmt: skip
    try:
        gradients = apply_rule(rule, inputs, types, given, needed=needed)
    except UnexpectedTracerError:
        _refuse_captured(call, rule, inputs, types, given, needed)
        raise
    if call.once_differentiable:  # the pullback itself may be differentiated by its upstream
        words = message_of(call.refuse_second_order, "its derivative")
        return without_derivative(call.name, gradients, [*inputs, *given.values()], words)
    return gradients


def _refuse_captured(
    call: Call, rule: Rule, inputs: Sequence[Array], types: Sequence[Any], upstreams: Mapping[int, Array],
    needed: Sequence[bool],
) -> None:  # fmt: skip
    """Raise the error for a tracer that the rule reads and that is no argument, if there is one."""

    def gradients(values: Sequence[Array]) -> list[Gradient]:
        return apply_rule(rule, inputs, types, dict(zip(upstreams, values, strict=True)), needed=needed)

    for tracer in captured_by(gradients, list(upstreams.values())):
        if not is_known(tracer):
            call.refuse_captured(tracer)


# --- Several derivatives ----------------------------------------------------------------------------------------------


def run_on_levels(call: Call, inputs: Sequence[Array]) -> Any:
    """Return the output under any derivatives in reverse mode; raise NotAsWrittenError if f reads what it is not given.

    f runs on the tensors below the innermost derivative: they have values, so that Python may branch on them.
    """
    places = [i for i, x in enumerate(inputs) if is_tracer(x)]
    derivatives = perturbed_by_each_derivative(inputs)
    output_spec: Any = None

    def run(arguments: Sequence[Array]) -> tuple[list[Array], list[Array], TracedRule | WatchedRule]:
        nonlocal output_spec
        full = subvals(inputs, places, [*map(as_tensor, arguments)])
        given, reads, numbers, known = full, _Reads(), list[Any](), dict[int, Array]()
        try:
            with _connecting(call, full) as known:
                outputs, rule = _running.run(reads, call, full)
            before = reads.before
        except CONCRETIZATION_ERRORS:  # Python or NumPy reads what is differentiated: then on values
            values = [value_below_derivatives(x) for x in full]
            if not any(map(is_tracer, full)) or any(x is None for x in values):
                raise
            given, before = [*map(as_tensor, values)], _Arrays()
            with _connecting(call, given):
                outputs, rule = call(given)
        if before is not None:
            numbers = _numbers_of_python(call, rule)
        output_spec = rule.output
        rule = of_tangents(call, rule)
        if not rule.takes_needed:  # else each derivative asks for other gradients
            with contextlib.suppress(*CONCRETIZATION_ERRORS):
                traced = TracedRule(call, rule, given, outputs, before, numbers)
                if any(is_differentiated(x) and id(x) not in known for x in traced.residuals):
                    raise NotAsWrittenError
                return full, outputs, traced
        return full, outputs, WatchedRule(call, rule, given, outputs, before, numbers)

    def primal(*values: Array) -> list[Array]:
        full, outputs, _ = run(values)
        return spread(outputs, full) if may_be_batched() else outputs

    def forward(*values: Array) -> tuple[list[Array], Any]:
        full, outputs, rule = run(values)
        residuals = [*full, *rule.residuals[len(full) :]]
        if isinstance(rule, TracedRule):
            rule.residuals = []  # no tracer of f leaves it
        outputs = spread(outputs, full) if may_be_batched() else outputs
        outputs = _attached(rule, derivatives[1:], places, residuals, outputs)
        return outputs, (rule.saved(residuals), outputs, Static(rule))

    outputs = _with_vjp(call, primal, forward, _backward(derivatives[0], places), [inputs[i] for i in places])
    return output_spec.combine(outputs)


@contextlib.contextmanager
def _connecting(call: Call, inputs: Sequence[Array]) -> Iterator[dict[int, Array]]:
    """Let what runs here be differentiated by the inputs alone, and where JAX can differentiate it.

    What is read of another differentiated tracer raises NotAsWrittenError; operations without a derivative, such as
    callbacks, run on values, and to ask for their derivative is an error. Yield what was made so, by identity.
    """
    known = {id(x): x for x in inputs}

    def read(x: Array) -> Array:
        if id(x) not in known and is_differentiated(x):
            raise NotAsWrittenError
        return x

    def made(x: Array) -> None:
        known[id(x)] = x

    def stopped(results: list[Array]) -> list[Any]:
        return without_derivative(
            call.name, results, inputs, _unconnected(call, results[0], "f made by an operation without a derivative")
        )

    with watching(read, made, stopped):
        yield known


def _attached(
    rule: TracedRule | WatchedRule, derivatives: Sequence[Sequence[bool]], places: Sequence[int],
    residuals: list[Array], outputs: list[Array],
) -> list[Array]:  # fmt: skip
    """Return the outputs with the rule for their derivative at this derivative and at all below it."""
    if not derivatives:
        return outputs
    count = len(residuals)

    def primal(*values: Array) -> list[Array]:
        return list(values[count:])

    def forward(*values: Array) -> tuple[list[Array], Any]:
        below = list(values[:count])
        outputs = _attached(rule, derivatives[1:], places, below, list(values[count:]))
        return outputs, (rule.saved(below), outputs, Static(rule))

    def backward(kept: Any, upstreams: Sequence[Array]) -> tuple[Gradient, ...]:
        of_inputs = dict(zip(places, _backward(derivatives[0], places)(kept, upstreams), strict=True))
        return *(of_inputs.get(i) for i in range(count)), *[None] * len(outputs)

    return _with_vjp(rule.call, primal, forward, backward, [*residuals, *outputs])


def _backward(needed: Sequence[bool], places: Sequence[int]) -> Callable[..., tuple[Gradient, ...]]:
    def backward(kept: Any, upstreams: Sequence[Array]) -> tuple[Gradient, ...]:
        residuals, outputs, rule = kept
        gradients = rule.content.gradients(residuals, outputs, upstreams, needed)
        return tuple(gradients[i] for i in places)

    return backward


class TracedRule:
    """A rule that was traced where f ran: the constants of its jaxpr are what it reads, wherever f kept it."""

    def __init__(
        self, call: Call, rule: Rule, inputs: Sequence[Array], outputs: Sequence[Array], before: _Arrays | None,
        numbers: Sequence[Any],
    ) -> None:  # fmt: skip
        """Take the rule of a run of f on these inputs; if on values, these arrays were alive before that run."""
        self.call = call
        self.inputs = len(inputs)
        alive = _Arrays() if before is not None else None
        self.rule = StagedRule(outputs)
        captured = self.rule.stage(rule, inputs, outputs, [], known=[*inputs, *outputs])
        error: Any = self.rule.error
        if isinstance(error, CONCRETIZATION_ERRORS):
            raise error
        own = [*inputs, *(c for c in captured if not any(c is x for x in (*inputs, *outputs)))]
        self.residuals = own
        place = {id(y): len(own) + at for at, y in reversed([*enumerate(outputs)])}
        place.update({id(x): at for at, x in reversed([*enumerate(own)])})
        self.captured_at = [place[id(c)] for c in captured]
        constants = self.rule.jaxpr.constants if self.rule.jaxpr else []
        if self.rule.jaxpr and holds_constants(
            self.rule.jaxpr.jaxpr, {id(x) for x in (*inputs, *outputs) if not is_tracer(x)}
        ):
            raise NotAsWrittenError
        unknown = [
            c for c in constants
            if alive and before and is_tensor(c) and is_differentiable(c) and c in alive and c not in before
        ]  # fmt: skip
        self.refusal = next((_unconnected(call, x) for x in (*numbers, *unknown)), None)

    def saved(self, residuals: Sequence[Array]) -> list[Array | None]:
        """Return the residuals, with None for those that the backward pass does not need."""
        if self.refusal or self.call.once_differentiable:
            return list(residuals)
        needed = set(self.captured_at)
        return [x if at in needed else None for at, x in enumerate(residuals)]

    def gradients(
        self, residuals: Sequence[Array], outputs: Sequence[Array], upstreams: Sequence[Array], needed: Sequence[bool]
    ) -> list[Gradient]:
        """Return the gradients of the inputs, with these tensors in the places of those that the rule read."""
        if self.rule.error is not None:
            raise self.rule.error
        assert self.rule.jaxpr is not None
        tensors = [*residuals, *outputs]
        values = [tensors[at] for at in self.captured_at]
        given = [upstreams[at] for at in self.rule.float_at]
        found = dict(zip(self.rule.returned, self.rule.jaxpr(values, given), strict=True))
        gradients = [found.get(at) for at in range(self.inputs)]
        call, inputs = self.call, residuals[: self.inputs]
        if call.once_differentiable:
            words = message_of(call.refuse_second_order, "its derivative")
            return without_derivative(call.name, gradients, [*values, *inputs, *given], words)
        return without_derivative(call.name, gradients, inputs, self.refusal) if self.refusal else gradients


class WatchedRule:
    """A rule that runs as it was written, on other tensors than those that it holds."""

    def __init__(
        self, call: Call, rule: Rule, inputs: Sequence[Array], outputs: Sequence[Array],
        before: _Arrays | None = None, numbers: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        """Take the rule of a run of f on these inputs.

        `before` are the arrays that were alive before that run, `numbers` what the rule holds that Python has made.
        """
        self.call = call
        self.rule = rule
        self.outputs = list(outputs)
        self.before = before
        self.numbers = numbers
        known = {id(x) for x in (*inputs, *outputs)}
        held = {id(x): x for x in tensors_inside(rule.grad_fn, is_tracer, _DEPTH) if id(x) not in known}
        self.residuals = [*inputs, *held.values()]
        """the inputs, and the other tracers that the rule is found to hold"""

    def saved(self, residuals: Sequence[Array]) -> list[Array]:
        """Return the residuals: which of them the rule reads is not known."""
        return list(residuals)

    def gradients(
        self, residuals: Sequence[Array], outputs: Sequence[Array], upstreams: Sequence[Array], needed: Sequence[bool]
    ) -> list[Gradient]:
        """Return the gradients of the inputs, with these tensors in the places of those that the rule holds."""
        call = self.call
        replaced = {id(u): u for u in upstreams}
        replaced.update(zip(map(id, [*self.outputs, *self.residuals]), [*outputs, *residuals], strict=True))
        alive = _Arrays() if self.before is not None else ()
        inputs = residuals[: len(self.rule.shapes)]
        seen: list[Array] = []

        def read(x: Array) -> Array:
            if id(x) in replaced:
                return replaced[id(x)]
            if not is_tensor(x) or not is_differentiable(x):
                return x
            value = lowered(x)
            if value is x and not is_tracer(x) and self.before is not None and x not in alive:
                self.before.add(x)  # made by the rule, which may read it again at the next derivative
            if value is x and (is_tracer(x) or self.before is None or x in self.before):
                return x
            (unconnected,) = without_derivative(call.name, [value], inputs, _unconnected(call, x))
            replaced[id(x)] = unconnected
            seen.append(x)  # whose identity is not to be another's
            return unconnected

        with watching(read):
            gradients = _gradients_by_rule(call, self.rule, inputs, [y.aval for y in outputs], upstreams, needed)
        gradients = [None if g is None else read(g) for g in gradients]
        if self.numbers:
            gradients = without_derivative(call.name, gradients, inputs, _unconnected(call, self.numbers[0]))
        return gradients


def _unconnected(call: Call, x: Any, why: str = "f made of values that Python read") -> str:
    """Return the words for a tensor or number of which nobody knows how f made it."""
    place = place_of(x)
    why += f" (it is kept as {place})" if place else ""
    return message_of(lambda x: call.refuse_unconnected(x, why), x)


def _numbers_of_python(call: Call, rule: Rule) -> list[Any]:
    """Return the floats and NumPy's arrays that a rule holds and that neither f held nor its code spells out."""
    given = [leaf for spec in call.arguments.specs for leaf in spec.static_leaves()]
    before = [x for each in (call.f, given, call.options) for x in tensors_inside(each, _is_number, _DEPTH)]
    before += [x for x in (*given, *call.options.values()) if _is_number(x)]
    todo, spelled = [code_of(call.f), code_of(rule.grad_fn)], list[Any]()
    while todo:
        constants = getattr(todo.pop(), "co_consts", ())
        todo += [x for x in constants if hasattr(x, "co_consts")]
        spelled += [x for x in constants if _is_number(x)]
    known = {id(x) if isinstance(x, np.ndarray) else x for x in (*before, *spelled)}
    held = tensors_inside(rule.grad_fn, _is_number, _DEPTH)
    return [x for x in held if (id(x) if isinstance(x, np.ndarray) else x) not in known]


def _is_number(x: Any) -> bool:
    return isinstance(x, (float, complex, np.ndarray, np.inexact)) and bool(
        np.issubdtype(np.result_type(x), np.inexact)
    )


_DEPTH = 10
"""at which the parameters of a Flax module in a module lie, in a variable of a function"""


class _Reads:
    """What an f that is running under several derivatives has read of the values of what is differentiated."""

    before: _Arrays | None = None
    """the arrays that were alive before it first read one; None if it has read none"""


_running: RuleScope[_Reads] = RuleScope("cgshim_jax_reads")


def note_read() -> None:
    """Note that the running f reads a value now: what it makes of it will not be connected."""
    reads = _running.current
    if reads is not None and reads.before is None:
        reads.before = _Arrays()


class _Arrays:
    """Arrays, held weakly: those that are alive now."""

    def __init__(self) -> None:
        self._arrays = {id(x): weakref.ref(x) for x in jax.live_arrays()}

    def add(self, x: Array) -> None:
        self._arrays[id(x)] = weakref.ref(x)

    def __contains__(self, x: Array) -> bool:
        reference = self._arrays.get(id(x))
        return reference is not None and reference() is x
