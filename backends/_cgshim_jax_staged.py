"""Running a rule, and the calls that have to be staged."""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from _cgshim_jax_primitives import Transposed, fit
from _cgshim_jax_tracing import Jaxpr, is_differentiated, is_in_reverse_mode, is_tracer, jaxpr_of
from jax.custom_derivatives import SymbolicZero

from cgshim._closure import lift
from cgshim._errors import CustomGradientError, CustomGradientTypeError

if TYPE_CHECKING:
    from cgshim._call import Call
    from cgshim._convention import Rule

Array = Any


# --- Running a rule ---------------------------------------------------------------------------------------------

_rule_runs: contextvars.ContextVar[bool] = contextvars.ContextVar("cgshim_jax_rule_runs", default=False)


def is_running_rule() -> bool:
    """Whether a grad_fn is running: what an op captures is then constant."""
    return _rule_runs.get()


@contextlib.contextmanager
def _running_rule() -> Iterator[None]:
    token = _rule_runs.set(True)
    try:
        yield
    finally:
        _rule_runs.reset(token)


def apply_rule(
    rule: Rule,
    inputs: Sequence[Array],
    outputs: Sequence[Any],
    upstreams: Mapping[int, Array],
    variables: Sequence[Array] = (),
) -> list[Array | None]:
    """The gradients of inputs, then those of variables; an output without an upstream is an integer, with zeros."""
    whole = [upstreams[at] if at in upstreams else jnp.zeros(y.shape, y.dtype) for at, y in enumerate(outputs)]
    with _running_rule():
        gradients, of_variables = rule(inputs, whole, variables)
    return [*gradients, *of_variables]


def is_differentiable(x: Any) -> bool:
    """Whether x has a gradient; JAX gives everything else one of dtype float0, which no author is to see."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


# --- Staged calls -----------------------------------------------------------------------------------------------


def run_staged(call: Call, inputs: Sequence[Array]) -> Sequence[Array]:
    """Stage f and its rule, and give the outputs the rule's gradients."""
    return _run_in_rule(call, inputs) if is_running_rule() else _run_staged_now(call, inputs)


def _run_in_rule(call: Call, inputs: Sequence[Array]) -> Sequence[Array]:
    """An op in a rule: its own rule is staged only once that is differentiated, for rules may call each other."""
    captured, remake = lift(call.f, is_tracer)
    at = [i for i, x in enumerate(inputs) if is_tracer(x)]

    def filled(arguments: Sequence[Array]) -> list[Array]:
        full = list(inputs)
        for i, x in zip(at, arguments, strict=False):
            full[i] = x
        return full

    def run(*arguments: Array) -> list[Array]:
        return call(filled(arguments), remake(arguments[len(at) :]))[0]

    def differentiated(*arguments: Array) -> list[Array]:
        bound = copy.copy(call)
        bound.f = remake(arguments[len(at) :])
        with _running_rule():
            outputs = list(_run_staged_now(bound, filled(arguments)))
        call.output = bound.output  # where it is differentiated at once, nothing else runs
        return outputs

    op: Any = jax.custom_jvp(run)
    op.defjvp(lambda primals, tangents: jax.jvp(differentiated, primals, tangents))
    return list(op(*(inputs[i] for i in at), *captured))


def _run_staged_now(call: Call, inputs: Sequence[Array]) -> Sequence[Array]:
    staged, arguments = _stage(call, inputs)
    return staged(arguments)


class _Staged:
    """One call as two jaxprs, which keep no tracer alive.

    f's goes from arguments (the inputs that are tracers, then what f captured) to outputs and residuals, the rule's
    from residuals and upstreams to gradients.
    """

    f: Jaxpr
    rule: Jaxpr | None = None
    outputs: int
    float_at: list[int]
    """which outputs have an upstream"""
    returned: list[int]
    """which gradients the rule returns, of those of the inputs and then of the variables"""
    taking: list[int]
    """which arguments have a gradient"""
    taken: list[int]
    """which of the gradients theirs are"""

    def __init__(self, call: Call) -> None:
        self.op = call.name
        self.refusal = None if call.forward_mode else _words_of(call.refuse_forward_mode, "jvp, jacfwd or linearize")

    def __call__(self, arguments: Sequence[Array]) -> Sequence[Array]:
        """The outputs at arguments, differentiated by the rule."""
        types = [x.aval for x in arguments]

        def forward(*arguments: Array) -> tuple[list[Array], list[Array]]:
            outputs, residuals = self.run(arguments)
            return self.attach(residuals, arguments, outputs), residuals

        def backward(residuals: list[Array], upstreams: Sequence[Array]) -> tuple[Array | None, ...]:
            gradients = self.gradients(residuals, [upstreams[at] for at in self.float_at])
            of_argument = {at: fit(g, types[at]) for at, g in zip(self.taking, gradients, strict=True)}
            return tuple(of_argument.get(at) for at in range(len(types)))

        def jvp(arguments: Sequence[Array], tangents: Sequence[Any]) -> tuple[list[Array], list[Array]]:
            outputs, residuals = forward(*arguments)
            return outputs, self.tangents(residuals, [tangents[at] for at in self.taking], outputs)

        # JAX forgets a custom_jvp in the gradient of a scan by something else: then the custom_vjp is left.
        reverse: Any = jax.custom_vjp(lambda *arguments: self.run(arguments)[0])
        reverse.defvjp(forward, backward)
        if is_in_reverse_mode(arguments):  # then no forward mode can reach it
            return list(reverse(*arguments))
        both: Any = jax.custom_jvp(reverse)
        both.defjvp(jvp, symbolic_zeros=True)
        return list(both(*arguments))

    def run(self, arguments: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        """The outputs and the residuals."""
        inputs = len(arguments) - len(self.f.captured_at)
        values = self.f(arguments[inputs:], arguments[:inputs])
        return values[: self.outputs], values[self.outputs :]

    def attach(self, residuals: Sequence[Array], arguments: Sequence[Array], outputs: Sequence[Array]) -> list[Array]:
        """outputs, as an outer derivative has to see them: with the rule's gradient, not f's own."""
        floats = self.transposed(outputs, None).attach(
            residuals, [arguments[at] for at in self.taking], [outputs[at] for at in self.float_at]
        )
        attached = dict(zip(self.float_at, floats, strict=True))
        return [attached.get(at, y) for at, y in enumerate(outputs)]

    def tangents(self, residuals: list[Array], tangents: Sequence[Any], outputs: Sequence[Array]) -> list[Array]:
        """The outputs' tangents, by the transpose of the rule."""
        picked = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]
        found: dict[int, Array] = {}
        if picked:
            map = self.transposed(outputs, self.refusal).only(picked)
            found = dict(zip(self.float_at, map(residuals, [tangents[i] for i in picked]), strict=True))
        return [found[at] if at in found else _zero_tangent(y) for at, y in enumerate(outputs)]

    def transposed(self, outputs: Sequence[Array], refusal: str | None) -> Transposed:
        """The map from the tangents of the arguments that have a gradient to those of the outputs."""
        types = [_type_of_upstream(outputs[at]) for at in self.float_at]
        return Transposed(self.op, self.gradients, types, refusal)

    def gradients(self, residuals: list[Array], upstreams: list[Array]) -> list[Array]:
        """The gradients of the arguments that have one."""
        assert self.rule is not None
        values = dict(zip(self.returned, self.rule(residuals, upstreams), strict=True))
        return [values[at] for at in self.taken]


def _zero_tangent(x: Array) -> Any:
    return jnp.zeros_like(x) if is_differentiable(x) else np.zeros(x.shape, jax.dtypes.float0)


_NOWHERE = -1


def _stage(call: Call, inputs: Sequence[Array]) -> tuple[_Staged, list[Array]]:
    """A call, staged, and the arguments of that; f is staged a second time where there are variables."""
    at = [i for i, x in enumerate(inputs) if is_tracer(x)]
    staged, captured = _stage_with(call, inputs, at, None)
    variables = [] if is_running_rule() else _choose_variables(captured)
    refusal = None
    if variables or staged.rule is None:
        try:
            staged, captured = _stage_with(call, inputs, at, variables)
        except CustomGradientTypeError as error:
            if staged.rule is None or any(map(is_differentiated, variables)):
                raise
            variables, refusal = [], str(error)
    place = {id(variable): len(inputs) + i for i, variable in enumerate(variables)}
    gradient_at = [*at, *(place.get(id(c), _NOWHERE) for c in captured)]
    staged.taking = [i for i, gradient in enumerate(gradient_at) if gradient in staged.returned]
    staged.taken = [gradient_at[i] for i in staged.taking]
    arguments = [inputs[i] for i in at]
    for c in captured:
        constant = id(c) not in place and not is_running_rule()
        arguments.append(_constant(c, refusal or _words_of(call.refuse_captured, c)) if constant else c)
    return staged, arguments


def _stage_with(
    call: Call, inputs: Sequence[Array], at: Sequence[int], variables: Sequence[Array] | None
) -> tuple[_Staged, list[Array]]:
    """A call, staged with these variables, and what f captured; variables are None until that is known."""
    staged = _Staged(call)

    def run(*tracers: Array) -> list[Array]:
        full = list(inputs)
        for i, x in zip(at, tracers, strict=True):
            full[i] = x
        outputs, rule = call(full)
        staged.outputs = len(outputs)
        staged.float_at = [i for i, y in enumerate(outputs) if is_differentiable(y)]
        if variables is not None:
            rule.require_variables(variables)
        elif rule.needs_variables:
            return outputs

        def backward(*of_floats: Array) -> list[Array]:
            upstreams = dict(zip(staged.float_at, of_floats, strict=True))
            gradients = apply_rule(rule, full, outputs, upstreams, variables or [])
            staged.returned = [i for i, gradient in enumerate(gradients) if gradient is not None]
            return [gradients[i] for i in staged.returned]

        try:
            staged.rule, residuals = jaxpr_of(backward, [_type_of_upstream(outputs[i]) for i in staged.float_at])
        except Exception:
            if variables is not None or not rule.takes_variables:
                raise
            return outputs  # it may have missed the variables
        return [*outputs, *residuals]

    staged.f, captured = jaxpr_of(run, [inputs[i].aval for i in at])
    return staged, captured


def _type_of_upstream(x: Array) -> Any:
    """x's type, but never weak."""
    return x.aval.update(weak_type=False)


# --- What f captured --------------------------------------------------------------------------------------------


def _choose_variables(captured: Sequence[Array]) -> list[Array]:
    """The captured tracers that are being differentiated, failing that those that may be later."""
    floats = [c for c in captured if is_differentiable(c)]
    return [c for c in floats if is_differentiated(c)] or [c for c in floats if is_differentiated(c) is None]


def _constant(tracer: Array, refusal: str) -> Array:
    """A captured tracer that is no variable, and may not be differentiated later either."""
    if not is_differentiable(tracer):
        return tracer

    def refuse(primals: Any, tangents: Any) -> NoReturn:
        raise CustomGradientTypeError(refusal)

    constant: Any = jax.custom_jvp(lambda x: x)
    constant.defjvp(refuse)
    return constant(tracer)


def _words_of(refuse: Callable[[Any], NoReturn], what: Any) -> str:
    """What refuse says: words are kept where the call would keep tracers alive."""
    try:
        refuse(what)
    except CustomGradientError as error:
        return str(error)
