"""JAX, in three ways, by what surrounds the call.

Where nothing does but vmap, an op is f. Where reverse mode does, and at most vmap besides, an op is a jax.custom_vjp
over the tensors that are differentiated: nothing is staged, and grad_fn's own closure is the residual. Everywhere else
f and its rule are staged, once, and what they captured becomes arguments: see _cgshim_jax_staged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from _cgshim_jax_staged import apply_rule, is_differentiable, is_running_rule, run_staged
from _cgshim_jax_tracing import Surroundings, captured_by, is_known, is_tracer, surroundings
from jax.errors import UnexpectedTracerError
from jax.tree_util import Partial

from cgshim._closure import lift

if TYPE_CHECKING:
    from cgshim._call import Call
    from cgshim._convention import Rule

Array = Any
Gradients = Callable[[Sequence[Array]], list[Array | None]]
"""from upstreams to one gradient an input"""


# --- Tensors and trees ------------------------------------------------------------------------------------------


def is_tensor(x: object, /) -> bool:
    return isinstance(x, jax.Array)


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    leaves, structure = jax.tree_util.tree_flatten(tree, is_leaf=lambda x: x is None)
    return leaves, structure


def tree_unflatten(structure: Any, leaves: Sequence[Any], /) -> Any:
    return jax.tree_util.tree_unflatten(structure, leaves)


def convert_to_tensor(x: Any, /, dtype: Any = None) -> Array:
    return jnp.asarray(x, dtype=dtype)


def convert_to_numpy(x: Array, /) -> Any:
    return np.asarray(jax.lax.stop_gradient(x))


def stop_gradient(x: Array, /) -> Array:
    return jax.lax.stop_gradient(x)


# --- The gradient of a rule -------------------------------------------------------------------------------------


def custom_gradient(call: Call, inputs: Sequence[Array], /) -> Sequence[Array]:
    around = surroundings()
    if around is Surroundings.NOTHING and all(map(is_known, inputs)):
        return call(inputs)[0]
    if around is Surroundings.GRADIENTS and not (call.forward_mode or is_running_rule()):
        outputs = _run_eagerly(call, inputs)
        if outputs is not None:
            return outputs
    return run_staged(call, inputs)


def _run_eagerly(call: Call, inputs: Sequence[Array]) -> Sequence[Array] | None:
    """The outputs, differentiated by the rule; None where f captured a tensor that is being differentiated."""
    at = [i for i, x in enumerate(inputs) if is_tracer(x)]

    def fill(values: Sequence[Array]) -> list[Array]:
        full = list(inputs)
        for i, value in zip(at, values, strict=True):
            full[i] = value if is_tensor(value) else jnp.asarray(value)  # a tracer's value may be a Python number
        return full

    def forward(*values: Array) -> tuple[list[Array], Gradients]:
        full = fill(values)
        if surroundings() is Surroundings.NOTHING:
            outputs, rule = call(full)
        else:  # an outer derivative goes through the rule, and through what grad_fn keeps
            outputs = list(custom_gradient(call, full))
            _, rule = call(full)
        return outputs, _residual(rule, full, outputs)

    def backward(residual: Callable[..., list[Array | None]], upstreams: Sequence[Array]) -> tuple[Array | None, ...]:
        try:
            gradients = residual(upstreams)
        except UnexpectedTracerError:
            for tracer in captured_by(residual, upstreams):
                if not is_known(tracer):
                    call.refuse_captured(tracer)
            raise
        return tuple(gradients[i] for i in at)

    op: Any = jax.custom_vjp(lambda *values: call(fill(values))[0])
    op.defvjp(forward, backward)
    try:
        outputs = list(op(*(inputs[i] for i in at)))
    except UnexpectedTracerError:
        return None
    return outputs if at or not any(map(is_tracer, outputs)) else None


def _residual(rule: Rule, inputs: Sequence[Array], outputs: Sequence[Array]) -> Gradients:
    """What the backward pass needs of a run of f: the rule itself, with grad_fn's closure.

    That stays as it is, but for its tracers (of a batch, of an outer derivative): JAX may take these elsewhere, and so
    has to see them.
    """
    needed = len(inputs) if rule.needs_inputs else 0
    tensors, grad_fn_round = lift(rule.grad_fn, is_tracer, known=inputs[:needed])
    types = [y.aval for y in outputs]
    float_at = [at for at, y in enumerate(types) if is_differentiable(y)]

    def gradients(tensors: Sequence[Array], upstreams: Sequence[Array]) -> list[Array | None]:
        again = rule.with_grad_fn(grad_fn_round(tensors))
        return apply_rule(again, tensors[:needed], types, {at: upstreams[at] for at in float_at})

    residual: Gradients = Partial(gradients, tensors)
    return residual


# --- Any function's gradient ------------------------------------------------------------------------------------


def vjp(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], /
) -> tuple[Sequence[Array], Callable[[Sequence[Array]], Sequence[Array | None]]]:
    outputs, pullback = jax.vjp(lambda *xs: list(fn(*xs)), *inputs)

    def gradients(upstreams: Sequence[Array]) -> list[Array | None]:
        cotangents = [
            upstream if is_differentiable(y) else np.zeros(y.shape, jax.dtypes.float0)
            for upstream, y in zip(upstreams, outputs, strict=True)
        ]
        return [g if is_differentiable(x) else None for g, x in zip(pullback(cotangents), inputs, strict=True)]

    return outputs, gradients
