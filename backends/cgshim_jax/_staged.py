"""Calls that must be staged: f and its rule become jaxprs, each once, and the tracers that they captured arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from cgshim.backend import CustomGradientTypeError, RuleScope, subvals
from cgshim_jax._deferred import defer, may_be_deferred
from cgshim_jax._graph import depends_only_on
from cgshim_jax._primitives import Transposed, fit, spread, without_derivative
from cgshim_jax._private import described
from cgshim_jax._rules import (
    as_tensor,
    code_of,
    is_differentiable,
    is_running_rule,
    message_of,
    type_of_upstream,
    upstreams_of_rule,
)
from cgshim_jax._split import Split
from cgshim_jax._stage import Stage, stage
from cgshim_jax._staged_rule import StagedRule
from cgshim_jax._tracing import (
    Jaxpr,
    Surroundings,
    is_differentiated,
    is_in_reverse_mode,
    is_recorded,
    is_reference,
    is_tracer,
    may_be_batched,
    surroundings,
)

if TYPE_CHECKING:
    from cgshim.backend import Call, TreeSpec

Array = Any


def run_staged(call: Call, inputs: Sequence[Array], raised: tuple[type[Exception], ...] = ()) -> Any:
    """Stage f and its rule, and return the output with the rule's gradients.

    Errors of these kinds are raised at once, where others of the rule come when a gradient is taken.
    """
    spec, outputs = _staged_outputs(call, inputs, raised)
    return spec.combine(outputs)


def _staged_outputs(
    call: Call, inputs: Sequence[Array], raised: tuple[type[Exception], ...] = ()
) -> tuple[TreeSpec, Sequence[Array]]:
    """Return the spec of the output and its tensors."""
    upstreams = upstreams_of_rule()
    code = code_of(call.f)
    if is_running_rule() and code in (_staging.current or ()):
        return _outputs_with_lazy_rule(call, inputs)

    def is_constant(captured: Array) -> bool:
        """Return True if the op's own rule speaks for what it captured: in a rule, what it is given leads to it.

        To the outputs this is a constant; to the rule, whose derivative may be taken in its turn, it is what it is.
        """
        return upstreams is not None and depends_only_on(captured, inputs, upstreams)

    found = _staging.run((*(_staging.current or ()), code), stage, call, inputs, is_constant)
    if isinstance(found.rule.error, raised):
        raise found.rule.error
    first = Staged(call, found.f, found.rule)
    staged: Staged | _Undecided = first
    if found.choices:
        choices = {choice.variables: Staged(call, *choice[:2]) for choice in found.choices}
        staged = _Undecided(first, choices, found, message_of(call.refuse_captured, found.captured[0]))
    arguments = [inputs[i] for i in found.inputs]
    for tracer in found.captured:
        if is_reference(tracer):
            if is_differentiated(tracer):
                call.refuse_captured(tracer)
            arguments.append(tracer)
            continue
        refusal = found.refusal or message_of(call.refuse_captured, tracer)
        is_known = id(tracer) in found.variables or is_constant(tracer)
        arguments.append(tracer if is_known else _constant(tracer, refusal))
    if staged is first and is_recorded() and may_be_deferred(found.f):
        outputs: Sequence[Array] = defer(found.f, first, arguments)
    else:
        outputs = staged(arguments)
    return found.output, outputs


_staging: RuleScope[tuple[Any, ...]] = RuleScope("cgshim_jax_staging")
"""the codes of the ops that are being staged, one in the rule of the other"""


def _outputs_with_lazy_rule(call: Call, inputs: Sequence[Array]) -> tuple[TreeSpec, Sequence[Array]]:
    """Run an op whose rule is being staged already, as when two rules call each other: there would be no end to it.

    Its own rule is staged only if it is differentiated; f then runs again, and may close over no tracer.
    """
    at = [i for i, x in enumerate(inputs) if is_tracer(x)]
    constants = [None if is_tracer(x) else x for x in inputs]
    specs: list[TreeSpec] = []

    def run_f(*arguments: Array) -> list[Array]:
        outputs, rule = call(subvals(constants, at, arguments))
        specs.append(rule.output)
        return outputs

    def staged_outputs(arguments: Sequence[Array]) -> list[Array]:
        spec, outputs = _staged_outputs(call, subvals(constants, at, arguments))
        specs.append(spec)
        return list(outputs)

    def jvp(primals: Sequence[Array], tangents: Sequence[Any]) -> Any:
        return _jvp_of_moving(staged_outputs, primals, tangents, _moving(tangents))

    op: Any = jax.custom_jvp(run_f)
    op.defjvp(jvp, symbolic_zeros=True)
    outputs = list(op(*(inputs[i] for i in at)))
    return specs[-1], outputs


class _Undecided:
    """A call that captured tracers, and which of them are variables is known only when some are differentiated."""

    def __init__(self, undecided: Staged, choices: Mapping[frozenset[int], Staged], found: Stage, refusal: str) -> None:
        self.undecided = undecided
        """the call that refuses any gradient"""
        self.choices = choices
        """the call to make for each set of captured arguments that may be differentiated"""
        self.inputs = len(found.inputs)
        self.refusal = refusal

    def __call__(self, arguments: Sequence[Array]) -> Sequence[Array]:
        op: Any = jax.custom_jvp(lambda *arguments: list(self.undecided(arguments)))
        op.defjvp(self.jvp, symbolic_zeros=True)
        return list(op(*arguments))

    def jvp(self, arguments: Sequence[Array], tangents: Sequence[Any]) -> Any:
        moving = _moving(tangents)
        captured = range(self.inputs, len(arguments))
        chosen = frozenset(i for i in captured if i in moving or is_differentiated(arguments[i]))
        op = self.choices.get(chosen, self.undecided)
        # The other captured arguments may be differentiated further out, and then no rule speaks for them.
        fixed = [
            _constant(x, self.refusal) if i in captured and i not in chosen else x for i, x in enumerate(arguments)
        ]
        return _jvp_of_moving(op, fixed, tangents, moving)


def _moving(tangents: Sequence[Any]) -> list[int]:
    return [i for i, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]


def _jvp_of_moving(
    function: Callable[[Sequence[Array]], Sequence[Array]], primals: Sequence[Array], tangents: Sequence[Any],
    moving: Sequence[int],
) -> Any:  # fmt: skip
    """Return the outputs and their tangents, of a function that sees which of its arguments are not differentiated."""

    def of_moving(*values: Array) -> list[Array]:
        return list(function(subvals(primals, moving, values)))

    return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])


class Staged:
    """One call as two jaxprs, which keep no tracer alive.

    f's goes from arguments (the inputs that are tracers, then what f captured) to outputs and residuals, the rule's
    from residuals and upstreams to gradients. An output that the rule keeps is no residual of f's: it is the op's own
    output, with the rule's derivative.
    """

    def __init__(self, call: Call, f: Jaxpr, rule: StagedRule) -> None:
        self.op = call.name
        self.f = f
        self.rule = rule
        self.outputs = rule.outputs
        self.once = message_of(call.refuse_second_order, "its derivative") if call.once_differentiable else None
        self.unpromised = (
            None if call.forward_mode else message_of(call.refuse_forward_mode, "jvp, jacfwd or linearize")
        )
        self.nonlinear = message_of(call.refuse_nonlinear, _WHAT)
        self.captured = message_of(call.refuse_captured, f.references[0]) if f.references else ""
        residuals = range(rule.outputs, rule.outputs + len(rule.connected))
        connected = [at for at, is_connected in zip(residuals, rule.connected, strict=True) if is_connected]
        self.connected = connected

    def __call__(self, arguments: Sequence[Array]) -> Sequence[Array]:
        """Return the outputs at arguments, differentiated by the rule."""
        count = len(arguments)

        def primal(*arguments: Array) -> list[Array]:
            return self.spread(self.evaluate(self.f, arguments)[0], arguments)

        # JAX forgets a custom_jvp in the gradient of a scan by something else: then the custom_vjp is left.
        reverse: Any = jax.custom_vjp(described(primal, count))
        backward = self.backward([x.aval for x in arguments])
        if self.f.references:  # which a custom_jvp may not be given
            reverse.defvjp(self.unless_by_reference(), _with_zeros(backward), symbolic_zeros=True)
            return list(reverse(*arguments))
        reverse.defvjp(described(lambda *arguments: self.forward(arguments), count), described(backward, 2))
        if is_in_reverse_mode(arguments):  # then no forward mode can reach it
            return list(reverse(*arguments))
        both: Any = jax.custom_jvp(described(lambda *arguments: reverse(*arguments), count))
        both.defjvp(described(lambda *of_jvp: self.jvp(*of_jvp), 2 * count), symbolic_zeros=True)
        return list(both(*arguments))

    def backward(self, types: Sequence[Any]) -> Callable[..., tuple[Array | None, ...]]:
        """Return the backward pass: from residuals and upstreams to the gradients of arguments of these types."""

        def backward(residuals: list[Array], upstreams: Sequence[Array]) -> tuple[Array | None, ...]:
            of_floats = [upstreams[at] for at in self.rule.float_at]
            gradients = self.gradients(residuals, of_floats)
            if self.once is not None:
                gradients = without_derivative(self.op, gradients, [*residuals, *of_floats], self.once)
            of_argument = {at: fit(g, types[at]) for at, g in zip(self.rule.arguments, gradients, strict=True)}
            return tuple(of_argument.get(at) for at in range(len(types)))

        return backward

    def forward(self, arguments: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        """Return the outputs, attached to the arguments, and the residuals."""
        whole = self.f.references  # whose order of reads and writes is to stay
        outputs, residuals = self.evaluate(self.f if whole else Split(self.f, self.connected), arguments)
        outputs = self.spread(self.attach(residuals, arguments, outputs), arguments)
        return outputs, [*residuals, *(outputs[at] for at in self.rule.kept_outputs)]

    def jvp(self, arguments: Sequence[Array], tangents: Sequence[Any]) -> tuple[list[Array], list[Array]]:
        """Return the outputs and their tangents."""
        outputs, residuals = self.forward(arguments)
        return outputs, self.tangents(residuals, [tangents[at] for at in self.rule.arguments], outputs)

    def unless_by_reference(self) -> Callable[..., Any]:
        """Return the forward pass, which raises an error if a mutable array is differentiated: it has no rule."""

        def forward(*given: Any) -> Any:
            if any(x.perturbed and is_reference(x.value) for x in given):
                raise CustomGradientTypeError(self.captured)
            return self.forward([x.value for x in given])

        return forward

    def evaluate(self, f: Jaxpr | Split, arguments: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        """Return the outputs and the residuals."""
        inputs = len(arguments) - len(self.f.captured_at)
        values = f(arguments[inputs:], arguments[:inputs])
        return values[: self.outputs], values[self.outputs :]

    def spread(self, outputs: list[Array], arguments: Sequence[Array]) -> list[Array]:
        """Return outputs that have the batch of a vmap whatever they depend on."""
        return spread(outputs, arguments) if self.is_spread and may_be_batched() else outputs

    @functools.cached_property
    def is_spread(self) -> bool:
        """True if an output may lack the batch that an argument has."""
        return not self.f.references and not self.f.depends_on_all(self.outputs)

    def attach(self, residuals: Sequence[Array], arguments: Sequence[Array], outputs: Sequence[Array]) -> list[Array]:
        """Return outputs as an outer derivative has to see them: with the rule's gradient, not f's own."""
        if surroundings() is Surroundings.NOTHING:
            return list(outputs)
        float_at = self.rule.float_at
        floats = self.transposed(outputs, self.refusal_unless_linear).attach(
            residuals, [arguments[at] for at in self.rule.arguments], [outputs[at] for at in float_at],
            [float_at.index(at) for at in self.rule.kept_outputs],
        )  # fmt: skip
        attached = dict(zip(float_at, floats, strict=True))
        return [attached.get(at, y) for at, y in enumerate(outputs)]

    def tangents(self, residuals: list[Array], tangents: Sequence[Any], outputs: Sequence[Array]) -> list[Array]:
        """Return the outputs' tangents, by the transpose of the rule."""
        picked = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]
        found: dict[int, Array] = {}
        if picked:
            linear_map = self.transposed(outputs, self.refusal_unless_promised).only(picked)
            tensors = [as_tensor(tangents[i]) for i in picked]
            found = dict(zip(self.rule.float_at, linear_map(residuals, tensors), strict=True))
        return [found[at] if at in found else _zero_tangent(y) for at, y in enumerate(outputs)]

    def transposed(self, outputs: Sequence[Array], refusal: Callable[[], str | None]) -> Transposed:
        """Return the map from the tangents of the arguments that have a gradient to those of the outputs."""
        types = [type_of_upstream(outputs[at].aval) for at in self.rule.float_at]
        return Transposed(self.op, self.gradients, types, refusal, self.once)

    def gradients(self, residuals: list[Array], upstreams: list[Array]) -> list[Array]:
        """Return the gradients of the arguments that have one."""
        return self.rule(residuals, upstreams)

    def refusal_unless_promised(self) -> str | None:
        """Return why forward mode may not use the rule's transpose, or None."""
        return self.unpromised or self.refusal_if_nonlinear()

    def refusal_unless_linear(self) -> str | None:
        """Return the same for forward mode over reverse mode: without a promise, the rule must be seen to be linear."""
        if self.unpromised is None:
            return self.refusal_if_nonlinear()
        return None if self.rule.linearity().is_linear else self.unpromised

    def refusal_if_nonlinear(self) -> str | None:
        """Return why no promise of linearity can be kept, or None."""
        operation = self.rule.linearity().operation
        return None if operation is None else self.nonlinear.replace(_WHAT, operation)


def _with_zeros(backward: Callable[..., Any]) -> Callable[..., Any]:
    def instantiated(residuals: list[Array], upstreams: Sequence[Any]) -> Any:
        return backward(
            residuals, [jnp.zeros(u.shape, u.dtype) if isinstance(u, SymbolicZero) else u for u in upstreams]
        )

    return instantiated


_WHAT = "\0"
"""where a refusal says what it got"""


def _zero_tangent(x: Array) -> Any:
    if not is_differentiable(x):
        return np.zeros(x.shape, jax.dtypes.float0)
    return jnp.zeros_like(x, dtype=None if isinstance(x.dtype, np.dtype) else type_of_upstream(x.aval).dtype)


def _constant(tracer: Array, refusal: str) -> Array:
    """Return a captured tracer that is no variable: if somebody differentiates it later, that is an error."""
    if not is_differentiable(tracer) or is_differentiated(tracer) is False:
        return tracer

    def refuse(primals: Any, tangents: Any) -> NoReturn:
        raise CustomGradientTypeError(refusal)

    constant: Any = jax.custom_jvp(lambda x: x)
    constant.defjvp(refuse)
    return constant(tracer)
