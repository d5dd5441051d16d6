"""Running a rule, in the convention that all backends share, and knowing that one runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from cgshim.backend import (
    Call,
    CustomGradientError,
    CustomGradientTypeError,
    Rule,
    RuleScope,
    describe,
    refusal,
)
from cgshim_jax._tracing import Array, current_trace, is_differentiated, without_batches

_scope: RuleScope[Any] = RuleScope("cgshim_jax_rule")
"""the running rule: the trace that it runs in, its upstreams, and f's outputs, with those of the rules around it"""


def apply_rule(
    rule: Rule,
    inputs: Sequence[Array],
    outputs: Sequence[Any],
    upstreams: Sequence[Array],
    variables: Sequence[Array] = (),
    needed: Sequence[bool] | None = None,
) -> list[Array | None]:
    """Return the gradients of inputs, then those of variables. The floats among the outputs have
    upstreams, and integers zeros.
    """
    of_floats = iter(upstreams)
    whole = [
        conjugate(next(of_floats)) if is_differentiable(y) else zeros_of(getattr(y, "aval", y))
        for y in outputs
    ]
    # A copy, for no upstream may be the same tracer as an argument: an op in the rule may take one
    # of the two.
    whole = [jnp.copy(u) if is_differentiated(u) else u for u in whole]
    known = [*outputs_of_rules(), *filter(is_tensor, outputs)]
    gradients, of_variables = _scope.run(
        (current_trace(), whole, known), rule, inputs, whole, variables, needed
    )
    return [None if g is None else conjugate(g) for g in (*gradients, *of_variables)]


def apply_jvp_fn(
    rule: Rule, tangents: Sequence[Array | None], types: Sequence[Any], outputs: Sequence[Any]
) -> list[Array | None]:
    """Return the tangents of the outputs, from those of inputs of these types: JAX's are the
    author's.
    """
    zeros = lambda at: zeros_of(type_of_upstream(types[at]))
    known = [*outputs_of_rules(), *filter(is_tensor, outputs)]
    upstreams = [t for t in tangents if t is not None]
    return _scope.run((current_trace(), upstreams, known), rule.tangents, tangents, outputs, zeros)


def conjugate(gradient: Array) -> Array:
    """Return a gradient of JAX as one of a rule, or one of a rule as one of JAX: complex ones are
    conjugates.
    """
    return jnp.conj(gradient) if jnp.issubdtype(gradient.dtype, jnp.complexfloating) else gradient


def is_running_rule() -> bool:
    """Return True if a grad_fn is running."""
    return _scope.current is not None


def outputs_of_rules() -> list[Array]:
    """Return the outputs of f for the running rules: an op that keeps one keeps what has the rule's
    derivative.
    """
    return _scope.current[2] if _scope.current is not None else []


def upstreams_of_rule() -> list[Array] | None:
    """Return the upstreams of the running grad_fn if grad_fn itself, or a vmap in it, makes this
    call; else None.
    """
    trace, upstreams, _ = _scope.current or (None, None, [])
    return upstreams if without_batches(current_trace()) is without_batches(trace) else None


def is_tensor(x: object) -> bool:
    """Return True if x is an array, or a tracer that stands for one."""
    return isinstance(x, jax.Array)


def as_tensor(x: Any) -> Array:
    """Return x as a tensor: the value or the tangent in a tracer may be a Python number (in older
    versions of JAX).
    """
    return x if is_tensor(x) else jnp.asarray(x)


def is_differentiable(x: Any) -> bool:
    """Return True if x has a gradient; JAX gives everything else one of dtype float0, which authors
    do not see.
    """
    return _has_gradient(x.dtype)


def floats_among(tensors: Sequence[Any]) -> list[int]:
    """Return the places of those that have a gradient."""
    return [at for at, x in enumerate(tensors) if is_differentiable(x)]


@functools.lru_cache(maxsize=64)
def _has_gradient(dtype: Any) -> bool:
    return bool(jax.core.ShapedArray((), dtype).to_tangent_aval().dtype != jax.dtypes.float0)


def type_of_upstream(kind: Any) -> Any:
    """Return the type of the gradient of a tensor of this type: JAX's extended dtypes may have
    another one.
    """
    return kind if isinstance(kind.dtype, np.dtype) else kind.to_tangent_aval()


def zeros_of(kind: Any) -> Array:
    """Return zeros of this type, with the devices that it tells: over which they are sharded, and
    differ in a shard_map.
    """
    return ad.instantiate_zeros(ad.Zero(kind))


def of_tangents(call: Call, rule: Rule) -> Rule:
    """Return the rule with its gradients checked against the dtype of tangents where that is not
    the argument's own.
    """
    if all(isinstance(dtype, np.dtype) for dtype in rule.dtypes):
        return rule
    tangents = [type_of_upstream(jax.core.ShapedArray((), dtype)).dtype for dtype in rule.dtypes]
    for dtype, tangent in zip(rule.dtypes, tangents, strict=True):
        if not isinstance(tangent, np.dtype):
            raise refusal(CustomGradientTypeError, call.name,
                          must="an argument that is differentiated must have a dtype whose gradients are floats",
                          got=f"one of {dtype}", do="convert it to a float outside of the op")  # fmt: skip
    pairs = zip(rule.dtypes, tangents, strict=True)
    return rule.with_dtypes(
        [dtype if tangent == jax.dtypes.float0 else tangent for dtype, tangent in pairs]
    )


def message_of(refuse: Callable[[Any], NoReturn], what: Any) -> str:
    """Return the message of the error that refuse raises: the call itself would keep tracers alive."""
    try:
        refuse(what)
    except CustomGradientError as error:
        return str(error)


def refuse_captured(op: str, captured: Sequence[Array]) -> None:
    """Raise an error if a call that compiled code will make, or map, reads tensors of that code
    besides.
    """
    for x in captured:
        raise refusal(CustomGradientTypeError, op,
                      must="f must be given every tensor of compiled code that it reads",
                      got=f"a captured {describe(x)}", do="pass it as an argument")  # fmt: skip


def refuse_captured_of_batch(op: str, error: Exception) -> NoReturn:
    """Raise an error if a rule for batches reads a tensor of the vmap that calls it: JAX knows it no
    more.
    """
    raise refusal(CustomGradientTypeError, op,
                  must="a rule for batches must be given every tensor of a vmap that it reads",
                  got="a captured one", do="pass it as an argument") from error  # fmt: skip
