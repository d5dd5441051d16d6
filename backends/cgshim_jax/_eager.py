"""Calls under reverse mode alone: below the derivatives every value is known.

f runs once, on these values: it may branch on them and leave JAX. Each derivative that surrounds the call is a level,
and each level is a jax.custom_vjp. Its backward pass is the rule, with the arguments and the outputs of that level, so
that the next derivative goes through the rule again. The other tensors that the rule keeps are functions of the
arguments through f's own operations, which were not recorded. Inner levels return them as further outputs. If one of
them is differentiated, f runs again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.errors import UnexpectedTracerError

from cgshim.backend import Residuals, convert_closure, refuse_another_run, refuse_hidden, run_again, subvals
from cgshim_jax._primitives import Transposed, without_derivative
from cgshim_jax._private import described
from cgshim_jax._rules import apply_rule, as_tensor, is_differentiable, is_tensor, message_of, of_tangents
from cgshim_jax._tracing import (
    Surroundings,
    captured_by,
    is_known,
    is_perturbed,
    is_tracer,
    surroundings,
    value_of,
)

if TYPE_CHECKING:
    from cgshim.backend import Call

Array = Any
Gradient = Array | None


class NotEagerError(Exception):
    """f captured a tensor that is being differentiated."""


def run_eagerly(call: Call, inputs: Sequence[Array]) -> Any:
    """Return the output, differentiated by the rule; raise NotEagerError if that cannot be done."""
    traced = frozenset(i for i, x in enumerate(inputs) if is_tracer(x))
    eager_call = _EagerCall(call, traced, may_be_linearized=surroundings() is Surroundings.LINEARIZATIONS)
    try:
        outputs, _ = eager_call.differentiated(inputs, is_inner=False)
    except UnexpectedTracerError:
        raise NotEagerError from None
    if not traced and any(map(is_tracer, outputs)):
        raise NotEagerError
    return eager_call.residuals.rule.output.combine(outputs)


class _EagerCall:
    """One call under reverse mode."""

    residuals: Residuals
    """what the rule keeps, taken out of it"""
    types: list[Any]
    """the types of the outputs"""
    depends: bool = False
    """True if the other residuals may depend on the arguments"""
    hidden: Array | None = None
    """a float tensor in an object that the rule keeps: an outer derivative cannot see it"""
    has_inner_levels: bool = False

    def __init__(self, call: Call, traced: frozenset[int], *, may_be_linearized: bool) -> None:
        self.call = call
        self.traced = traced
        """which inputs are tracers"""
        self.may_be_linearized = may_be_linearized
        """True if the derivative may be that of jax.linearize, which a custom_vjp does not have"""

    def differentiated(self, inputs: Sequence[Array], is_inner: bool) -> tuple[list[Array], list[Array]]:
        """Return the outputs and, at an inner level, the other residuals, with their derivatives at this level."""
        self.has_inner_levels |= is_inner
        places = [i for i, x in enumerate(inputs) if is_tracer(x)]
        needed = [is_perturbed(x) and is_differentiable(x) for x in inputs]
        arguments = [inputs[i] for i in places]
        if self.may_be_linearized:
            arguments.append(_refusing_forward_mode(self.call, arguments))
        count = len(arguments)

        def level_below(values: Sequence[Array]) -> tuple[list[Array], list[Array], list[Array]]:
            full = _filled(inputs, places, values[: len(places)])
            return full, *(
                self.run_f(full) if surroundings() is Surroundings.NOTHING else self.differentiated(full, True)
            )

        def value(*values: Array) -> tuple[list[Array], list[Array]]:
            _, outputs, others = level_below(values)
            return outputs, others if is_inner else []

        def forward(*given: Any) -> tuple[tuple[list[Array], list[Array]], Any]:
            full, outputs, others = level_below([x.value for x in given] if is_inner else given)
            return (outputs, others if is_inner else []), self.saved(full, outputs, others, is_inner)

        def backward(residuals: Any, upstreams: Sequence[Any]) -> tuple[Gradient, ...]:
            gradients = _Backward(self, places, needed)(*residuals, *upstreams)
            return *[gradients[i] for i in places], *[None] * (count - len(places))

        op: Any = jax.custom_vjp(described(value, count))
        op.defvjp(described(forward, count), described(backward, count), symbolic_zeros=is_inner)
        outputs, others = op(*arguments)
        return list(outputs), list(others)

    def run_f(self, inputs: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        """Run f, once, and return its outputs and the other residuals."""
        inputs = [_alias(x) if i in self.traced else x for i, x in enumerate(inputs)]
        outputs, rule = self.call(inputs)
        rule = of_tangents(self.call, rule)
        self.types = [y.aval for y in outputs]
        self.residuals = Residuals(self.call, rule, is_tensor, inputs, outputs)
        others, self.residuals.others = self.residuals.others, []
        if not all(map(is_known, others)):
            raise UnexpectedTracerError("grad_fn keeps a tracer that is no argument")
        if self.has_inner_levels:
            constants = {id(x) for x in convert_closure(self.call.f, is_tensor)[0]} if others else set()
            self.depends = any(is_differentiable(x) and id(x) not in constants for x in others)
            self.hidden = next(iter(self.residuals.hidden()), None)
            if self.hidden is not None:
                others = [*others, jnp.zeros(())]  # stands for it: to differentiate this is an error
        return outputs, others

    def saved(
        self, inputs: Sequence[Array], outputs: Sequence[Array], others: Sequence[Array], is_inner: bool
    ) -> tuple[list[Array | None], list[Array | None], Sequence[Array]]:
        """Return the inputs, outputs and other tensors, with None for those that the backward pass does not need."""
        runs_again = is_inner and self.depends and not self.call.once_differentiable
        needed = range(len(inputs)) if runs_again else self.residuals.inputs
        return (
            [x if i in needed else None for i, x in enumerate(inputs)],
            [y if i in self.residuals.outputs else None for i, y in enumerate(outputs)], others,
        )  # fmt: skip


class _Backward:
    """The backward pass of one level."""

    def __init__(self, eager_call: _EagerCall, places: Sequence[int], needed: Sequence[bool]) -> None:
        self.eager_call = eager_call
        self.call = eager_call.call
        self.places = places
        """the inputs that are tracers at this level"""
        self.needed = needed
        """whether the derivative of this level is taken of each input"""

    def __call__(
        self, inputs: list[Array | None], outputs: list[Array | None], others: list[Array], of_outputs: Sequence[Any],
        of_others: Sequence[Any] = (),
    ) -> list[Gradient]:  # fmt: skip
        """Return the gradients of the inputs."""
        types = self.eager_call.types
        gradients: list[Gradient] = [None] * len(inputs)
        if not of_others or any(map(_is_asked_for, of_outputs)):
            upstreams = {at: _instantiated(u) for at, u in enumerate(of_outputs) if is_differentiable(types[at])}
            gradients = self.by_rule(inputs, outputs, others, upstreams)
        if any(map(_is_asked_for, of_others)):
            by_f = self.by_another_run(inputs, outputs, others, of_others)
            gradients = [b if a is None else a if b is None else a + b for a, b in zip(gradients, by_f, strict=True)]
        return gradients

    def by_rule(
        self, inputs: list[Array | None], outputs: list[Array | None], others: list[Array],
        upstreams: dict[int, Array],
    ) -> list[Gradient]:  # fmt: skip
        """Return the gradients that the rule makes of the outputs' upstreams."""
        rule = self.eager_call.residuals.around(inputs, outputs, others)
        try:
            gradients = apply_rule(rule, inputs, self.eager_call.types, upstreams, needed=self.needed)
        except UnexpectedTracerError:
            self.refuse_captured(rule, inputs, upstreams)
            raise
        if self.call.once_differentiable:
            words = message_of(self.call.refuse_second_order, "its derivative")
            of = [x for x in (*inputs, *outputs, *others, *upstreams.values()) if x is not None]
            return without_derivative(self.call.name, gradients, of, words)
        if self.eager_call.hidden is not None:
            return _with_derivative_by_hidden(self.call.name, gradients, others[-1])
        return gradients

    def by_another_run(
        self, inputs: list[Array | None], outputs: list[Array | None], others: list[Array], upstreams: Sequence[Any]
    ) -> list[Gradient]:
        """Return the gradients of the inputs through the other residuals: through f's own operations."""
        call, hidden = self.call, self.eager_call.hidden
        if call.once_differentiable:
            call.refuse_second_order("its derivative")
        if hidden is not None:
            if _is_asked_for(upstreams[-1]):
                refuse_hidden(call, hidden)
            others, upstreams = others[:-1], upstreams[:-1]
        first = self.eager_call.residuals.around(inputs, outputs, others)

        def again(*values: Array) -> list[Array]:
            full = _filled([x if x is None else _alias(x) for x in inputs], self.places, values)
            return run_again(call, full, first, is_tensor, self.agree)

        found, pullback = jax.vjp(again, *(inputs[i] for i in self.places))
        gradients = pullback([_cotangent(u, y) for u, y in zip(upstreams, found, strict=True)])
        of_input = dict(zip(self.places, gradients, strict=True))
        return [g if g is not None and is_differentiable(g) else None for g in map(of_input.get, range(len(inputs)))]

    def agree(self, a: Array, b: Array) -> bool:
        """Return True if two tensors are the same up to the order of sums."""
        same = value_of(_agree(a, b))
        if same is None:
            refuse_another_run(self.call, "values that are not known yet", "differentiate twice within jax.jit")
        return bool(np.all(same))

    def refuse_captured(self, rule: Any, inputs: Sequence[Array | None], upstreams: dict[int, Array]) -> None:
        """Raise the error for a tracer in an object that the rule keeps."""
        places = list(upstreams)

        def gradients(values: Sequence[Array]) -> list[Gradient]:
            of_outputs = dict(zip(places, values, strict=True))
            return apply_rule(rule, inputs, self.eager_call.types, of_outputs, needed=self.needed)

        for tracer in captured_by(gradients, list(upstreams.values())):
            if not is_known(tracer):
                self.call.refuse_captured(tracer)


def _refusing_forward_mode(call: Call, arguments: Sequence[Array]) -> Array:
    """Return a zero that has no derivative in forward mode: executed, it raises the error for it.

    A custom_vjp that has it for another argument refuses forward mode in our words, and not in JAX's.
    """
    floats = [x for x in arguments if is_differentiable(x)]
    types, zero = [x.aval for x in floats], jnp.zeros(())
    words = message_of(call.refuse_forward_mode, "jvp, jacfwd or linearize")
    no_gradients = lambda residuals, upstreams: [jnp.zeros(kind.shape, kind.dtype) for kind in types]
    return Transposed(call.name, no_gradients, [zero.aval], lambda: words).attach([], floats, [zero])[0]


def _with_derivative_by_hidden(op: str, gradients: list[Gradient], standing_for_hidden: Array) -> list[Gradient]:
    """Return the gradients, made to depend on what stands for a hidden tensor; that derivative is zero."""
    at = [i for i, g in enumerate(gradients) if g is not None]
    values = [g for g in gradients if g is not None]
    zeros = Transposed(op, lambda residuals, upstreams: [jnp.zeros(())], [g.aval for g in values])
    attached = dict(zip(at, zeros.attach([], [standing_for_hidden], values), strict=True))
    return [attached.get(i) for i in range(len(gradients))]


def _filled(inputs: Sequence[Array], places: Sequence[int], values: Sequence[Array]) -> list[Array]:
    return subvals(inputs, places, [*map(as_tensor, values)])


def _alias(x: Array) -> Array:
    """Return x as another object. f may hold x itself, or be given it twice: these are not this argument."""
    if hasattr(x, "clone"):  # an array, and the clone shares its buffer
        return x.clone()
    return jnp.copy(x) if is_differentiable(x) else x


def _is_asked_for(upstream: Any) -> bool:
    """Return True unless an upstream gradient is JAX's symbol for zeros, or of a tensor that has no gradient."""
    return not isinstance(upstream, SymbolicZero) and upstream.dtype != jax.dtypes.float0


def _cotangent(upstream: Any, output: Array) -> Array:
    if not is_differentiable(output):
        return np.zeros(output.shape, jax.dtypes.float0)
    return _instantiated(upstream)


def _instantiated(upstream: Any) -> Array:
    return jnp.zeros(upstream.shape, upstream.dtype) if isinstance(upstream, SymbolicZero) else upstream


def _agree(a: Array, b: Array) -> Array:
    a, b = map(as_tensor, jax.lax.stop_gradient((a, b)))
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    if not is_differentiable(a):
        return a == b
    close = jnp.abs(a - b) <= 8 * jnp.finfo(a.dtype).eps * jnp.maximum(jnp.abs(a), jnp.abs(b))
    return close | (a == b) | (jnp.isnan(a) & jnp.isnan(b))
