"""Calls whose f runs as a Python function: where all values are known, and where vmap maps f.

A first derivative of known values calls the grad_fn that f returned: nothing is traced, and grad_fn
may branch on values. In higher derivatives f runs on the tracers of the outer derivatives. So its
residuals are connected by f's own operations, and grad_fn is rebuilt around the op's outputs.

Calls in jit, and derivatives of batches, become jaxprs (`_traced`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.errors import UnexpectedTracerError

from cgshim.backend import (
    Call,
    CustomGradientError,
    Rebuild,
    Rule,
    closure_convert,
    describe,
    tensors_inside,
)
from cgshim_jax._op import Run, error_of, known_tensors, once_differentiable_error, push_by
from cgshim_jax._tensors import (
    Array,
    are_traced,
    as_tensor,
    conjugate,
    constant,
    is_connected,
    is_differentiable,
    is_tensor,
    is_tracer,
    reads,
    typeof,
    value_of,
)
from cgshim_jax._traced import TracedOp


class CapturedError(Exception):
    """f or its rule captures a tracer."""


class EagerOp:
    """A call, as a function of its inputs."""

    def __init__(self, call: Call, inputs: Sequence[Array]) -> None:
        self.call, self.is_traced = call, are_traced(inputs)

    def outputs(self, args: Sequence[Array]) -> list[Array]:
        """Return f's outputs for a call that nothing differentiates."""
        call = self.call.with_needs_input_grad([False] * len(args))
        return self._call(call, [*map(as_tensor, args)])[0]

    def run(self, args: Sequence[Array], needed: Sequence[bool]) -> Run:
        """Run f for derivatives by the needed args."""
        if self.call.once_differentiable:
            args = [*map(constant, args)]
        needed = [flag and is_differentiable(x) for flag, x in zip(needed, args, strict=True)]
        call = self.call.with_needs_input_grad(needed)
        if any(map(is_tracer, args)):
            return self._run_on_tracers(call, args)
        outputs, rule = self._call(call, args)
        return Run(outputs, [], EagerRule(call, rule, args, outputs))

    def combined(self, outputs: Sequence[Array]) -> Any:
        """Return the outputs in the structure that f returned."""
        return self.spec.combine(outputs)

    def check_captured(self, needed: Sequence[bool]) -> None:
        """Do nothing: f captures no tracer."""

    def _call(self, call: Call, args: Sequence[Array]) -> tuple[list[Array], Rule]:
        outputs, rule = call(args)
        if not any(map(is_tracer, args)) and any(map(is_connected, outputs)):
            raise CapturedError
        self.spec = rule.output
        return outputs, rule

    def _run_on_tracers(self, call: Call, args: Sequence[Array]) -> Run:
        """Run f on constants where that is enough, so that f may be opaque, else on tracers."""
        constants = [*map(constant, args)]
        if self.is_traced:
            run = self._run_on(call, constants)
            if len(run.rule.known) == len(run.residuals):
                return run
        before, reads.happened = reads.happened, False
        try:
            run = self._run_on(call, args)
        except (CapturedError, UnexpectedTracerError):
            raise
        except Exception as error:  # noqa: BLE001  # JAX has several for an f that is opaque
            values = [value_of(x) for x in args]
            if any(x is None for x in values):
                values = constants
            # no argument is another tensor too
            run = self._run_on(call, [*map(jnp.copy, values)])
            self._forbid_unconnected(call, run, error.with_traceback(None))
        else:
            if reads.happened:
                self._forbid_unconnected(call, run, None)
        finally:
            reads.happened = before
        return run

    def _run_on(self, call: Call, args: Sequence[Array]) -> Run:
        outputs, rule = self._call(call, args)
        connected = EagerRule(call, rule, args, outputs)
        residuals, opaque = connected.connect(call, args, outputs)
        hidden = tensors_inside(opaque, _is_float)
        if any(value_of(x) is None for x in hidden):
            return TracedOp(call, args).run(args, call.needed)
        if connected.refusal is None and hidden:
            connected.refusal = _hidden_error(call, opaque)
        needed = tuple(rule.needed) if rule.needed is not None else None
        return Run(outputs, residuals, connected, needed)

    def _forbid_unconnected(self, call: Call, run: Run, error: Exception | None) -> None:
        if run.rule.refusal is None:
            made = [x for at, x in enumerate(run.residuals) if at not in run.rule.known]
            run.rule.refusal = _unconnected_error(call, made, error)


class EagerRule:
    """The rule of a run: as f returned it, or rebuilt around residuals."""

    def __init__(
        self, call: Call, rule: Rule, args: Sequence[Array], outputs: Sequence[Array]
    ) -> None:
        self.rule, self.has_jvp = rule, rule.jvp_fn is not None
        self.variables = call.variables
        self.input_types, self.types = [*map(typeof, args)], [*map(typeof, outputs)]
        self.args = args if rule.needs_inputs else self.input_types
        self.refusal = once_differentiable_error(call)
        self.known = dict[int, int]()
        self.rebuild: Rebuild | None = None

    def connect(
        self, call: Call, args: Sequence[Array], outputs: Sequence[Array]
    ) -> tuple[list[Array], Sequence[Any]]:
        """Let the rule read residuals; return them, and the opaque objects that the rule keeps."""
        held, self.rebuild, opaque = closure_convert(
            self.rule.grad_fn, call.backend, call.constants
        )
        residuals = [*held, *args] if self.rule.needs_inputs else held
        self.known = known_tensors(residuals, args, outputs)
        self.count, self.args = len(held), self.input_types
        # JAX keeps rules; the instance of a method cannot be None
        self.rule = self.rule.with_grad_fn(self.rebuild([()] * len(held)))
        return residuals, opaque

    def bound(self, read: Sequence[Array]) -> tuple[Rule, Sequence[Any]]:
        """Return the rule around the tensors that it reads, and the arguments of f."""
        if self.rebuild is None:
            return self.rule, self.args
        rule = self.rule.with_grad_fn(self.rebuild(read[: self.count]))
        args = read[self.count : self.count + len(self.args)]
        return rule, args if rule.needs_inputs else self.args

    def __call__(self, read: Sequence[Array], upstreams: Sequence[Array]) -> list[Array | None]:
        rule, args = self.bound(read)
        upstreams = [*map(conjugate, upstreams)]
        gradients, _ = rule(args, upstreams, self.variables, rule.needed)
        return [None if g is None else conjugate(g) for g in gradients]

    def push(self, read: Sequence[Array], tangents: Sequence[Array | None]) -> list[Array]:
        """Return the tangents of the outputs, by the author's jvp_fn."""
        rule, _ = self.bound(read)
        return push_by(rule, tangents, self.input_types, self.types)


def _hidden_error(call: Call, opaque: Sequence[Any]) -> Exception:
    """Return the error for the derivative of a float in an attribute of one of these objects."""
    x, tensor = next((x, t) for x in opaque for t in tensors_inside(x, _is_float))
    where = f"grad_fn keeps in an attribute of {describe(x)}"
    return error_of(call.refuse_unconnected, tensor, where)


def _unconnected_error(
    call: Call, made: Sequence[Array], error: Exception | None
) -> Exception | None:
    """Return the error for the derivative of a float that an opaque f made; f raised error, or None.

    If f raised an error, it has run on constants.
    """
    before = {id(x) for x in tensors_inside([call.f, *call.static], _is_float)}
    for x in made:
        is_constant = error is not None or not is_connected(x)
        if _is_float(x) and is_constant and id(x) not in before:
            if isinstance(error, CustomGradientError):  # a function on the host
                return error
            return error_of(call.refuse_unconnected, x, "f made of values that Python read")
    return None


def _is_float(x: object) -> bool:
    return is_tensor(x) and is_differentiable(x)
