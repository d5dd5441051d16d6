"""Calls within jit and its like, recorded as one operation.

Its derivative, and its batch, are those of a custom_jvp around a custom_vjp, which is made when somebody asks for them.
If JAX recorded that custom_jvp itself, it would trace f again for both of them, in every call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad, mlir

from cgshim_jax import _private
from cgshim_jax._primitives import primitive, vmap_over
from cgshim_jax._private import described
from cgshim_jax._rules import is_differentiable
from cgshim_jax._tracing import Jaxpr, equations_for, jaxpr_of, part_of

if TYPE_CHECKING:
    from cgshim_jax._staged import Staged

Array = Any


def defer(f: Jaxpr, staged: Staged, arguments: Sequence[Array]) -> list[Array]:
    """Return f's outputs, from one operation; `staged` is differentiated or batched in its place."""
    jaxpr = f.jaxpr
    wanted = jaxpr.outvars[: staged.outputs]
    captured = [f.constvars[at] for at in f.captured_at]
    whole = part_of(jaxpr, [], [*f.invars, *captured], wanted, equations_for(wanted, jaxpr.eqns)[0])
    results: list[Array] = _deferred.bind(*arguments, jaxpr=whole, staged=staged)
    return results


def may_be_deferred(f: Jaxpr) -> bool:
    """Return True if f's jaxpr computes its results and does nothing else, and holds no arrays."""
    return not f.jaxpr.effects and len(f.captured_at) == len(f.constants)


def _types(*types: Any, jaxpr: Any, staged: Staged) -> list[Any]:
    if any(v.aval != kind for v, kind in zip(jaxpr.invars, types, strict=True)):  # evaluated elsewhere
        traced, _ = jaxpr_of(functools.partial(_evaluate, jaxpr=jaxpr, staged=staged), types)
        jaxpr = traced.jaxpr
    return [v.aval for v in jaxpr.outvars]


def _evaluate(*operands: Array, jaxpr: Any, staged: Staged) -> list[Array]:
    return list(jax.core.eval_jaxpr(jaxpr, (), *operands))


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], *, jaxpr: Any, staged: Staged) -> Any:
    symbolic = [SymbolicZero(t.aval) if isinstance(t, ad.Zero) else t for t in tangents]
    outputs, found = staged.jvp(primals, symbolic)
    return outputs, [
        t if is_differentiable(y) else ad.Zero(y.aval.to_tangent_aval()) for y, t in zip(outputs, found, strict=True)
    ]


def _batch(axis: Any, operands: Sequence[Array], at: Sequence[int | None], *, jaxpr: Any, staged: Staged) -> Any:
    if all(i is None for i in at):
        outputs = _deferred.bind(*operands, jaxpr=jaxpr, staged=staged)
        return outputs, [None] * len(outputs)
    outputs = vmap_over(axis, lambda *arguments: staged(arguments), tuple(at), 0)(*operands)
    return outputs, [0] * len(outputs)


def _check(*given: Any, jaxpr: Any, staged: Staged) -> tuple[Any, list[Array]]:
    """Return f's outputs with the rule's derivative, and the first error that checkify finds in f or found before."""
    context, (error, enabled, *operands) = given[: _private.checkify_contexts], given[_private.checkify_contexts :]
    outputs: list[Array] = _deferred.bind(*operands, jaxpr=jaxpr, staged=staged)
    constants = [jax.lax.stop_gradient(x) for x in operands]  # errors have no derivative; XLA evaluates f once
    error, _ = _private.checkify_jaxpr(*context, ClosedJaxpr(jaxpr, ()), enabled, error, *constants)
    return error, outputs


def _lower(context: Any, *operands: Any, **parameters: Any) -> Any:
    return _lowering(len(operands))(context, *operands, **parameters)


@functools.lru_cache(maxsize=256)
def _lowering(operands: int) -> Callable[..., Any]:
    """Return what lowers calls with so many operands."""
    lowering: Callable[..., Any] = mlir.lower_fun(
        described(lambda *operands, **parameters: _evaluate(*operands, **parameters), operands), multiple_results=True
    )
    return lowering


_deferred = primitive("cgshim_op", _evaluate, _types, _jvp, _batch, _lower)
_private.error_checks[_deferred] = _check
