"""Calls whose f runs as a Python function; `_traced` has the calls whose f captures tracers.

Around known values nothing is traced: f and grad_fn may branch on them. The rule is rebuilt around
the tensors that it reads, which are the op's own outputs and arguments if it reads these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.errors import UnexpectedTracerError

from cgshim.backend import (
    Call,
    Rebuild,
    Rule,
    closure_convert,
    describe,
    tensors_inside,
)
from cgshim_jax._op import Run, error_of, pull_by, push_by
from cgshim_jax._tensors import (
    Array,
    is_connected,
    is_differentiable,
    is_tensor,
    is_tracer,
    typeof,
    value_of,
)
from cgshim_jax._traced import TracedOp, not_called


class EagerOp:
    """A call, as a function of its inputs."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def run(self, args: Sequence[Array], needed: Sequence[bool]) -> Run:
        """Run f for derivatives by the needed args."""
        needed = [flag and is_differentiable(x) for flag, x in zip(needed, args, strict=True)]
        call = self.call.with_needs_input_grad(needed)
        outputs, rule = call(args)
        if not any(map(is_tracer, args)) and any(map(is_connected, outputs)):
            raise UnexpectedTracerError("f captures a tracer")
        self.spec = rule.output
        held, rebuild, opaque = closure_convert(rule.grad_fn, call.backend, call.constants)
        hidden = tensors_inside(opaque, _is_float)
        if any(value_of(x) is None for x in hidden):
            traced = TracedOp(call, args, call.variables)
            return traced.run(traced.args, needed)
        pull, push = _functions_of(rule, rebuild, len(held), call, args, outputs)
        residuals = [*held, *args] if rule.needs_inputs else held
        refusal = _hidden_error(call, opaque) if hidden else None
        return Run(outputs, residuals, pull, push, refusal, rule.needed)

    def check_captured(self, needed: Sequence[bool]) -> None:
        """Do nothing: f captures no tracer."""


def _functions_of(
    rule: Rule, rebuild: Rebuild, count: int, call: Call, args: Sequence[Array],
    outputs: Sequence[Array],
) -> tuple[Any, Any]:  # fmt: skip
    """Return ``pull`` and ``push`` of a run; grad_fn closes over the first count residuals."""
    types, input_types, variables = [*map(typeof, outputs)], [*map(typeof, args)], call.variables
    empty = rule.with_grad_fn(not_called)  # JAX keeps the two functions

    def pull(read: Sequence[Array], upstreams: Sequence[Array]) -> list[Array | None]:
        bound = empty.with_grad_fn(rebuild(read[:count]))
        inputs = read[count : count + len(input_types)] if bound.needs_inputs else input_types
        return pull_by(bound, inputs, upstreams, variables)[: len(input_types)]

    def push(read: Sequence[Array], tangents: Sequence[Array | None]) -> list[Array]:
        bound = empty.with_grad_fn(rebuild(read[:count]))
        return push_by(bound, tangents, input_types, types)

    return pull, None if rule.jvp_fn is None else push


def _hidden_error(call: Call, opaque: Sequence[Any]) -> Exception | None:
    """Return the error for the derivative of a float in an attribute of one of these objects."""
    x, tensor = next((x, t) for x in opaque for t in tensors_inside(x, _is_float))
    where = f"grad_fn keeps in an attribute of {describe(x)}"
    return error_of(call.refuse_unconnected, tensor, where)


def _is_float(x: object) -> bool:
    return is_tensor(x) and is_differentiable(x)
