"""Linear maps with a transpose of their own: they carry a rule through forward mode.

`jax.custom_derivatives.linear_call` does the same, but JAX 0.10 cannot map it by vmap, as jacfwd
does. The primitive is made as in JAX's tutorial "How JAX primitives work".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from cgshim_jax._tensors import Array, is_tracer, typeof, value_of, zeros_of

Map = Callable[[Sequence[Array], Sequence[Array]], list[Array]]
"""a function of residuals and vectors, linear in the vectors"""


def linear_map(
    push: Map, pull: Map, residuals: Sequence[Array], vectors: Sequence[Array], types: Sequence[Any]
) -> list[Array]:
    """Return ``push(residuals, vectors)``, tensors of these types; the map's transpose is pull."""
    how = {"push": push, "pull": pull, "count": len(residuals), "types": tuple(types)}
    return list(_linear.bind(*residuals, *vectors, **how))


def _run(*operands: Array, push: Map, count: int, **_: Any) -> list[Array]:
    return push(operands[:count], operands[count:])


def _jvp(primals: Any, tangents: Any, **how: Any) -> Any:
    full = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(lambda *xs: _run(*xs, **how), tuple(primals), full)


def _transpose(upstreams: Any, *operands: Any, pull: Map, count: int, **_: Any) -> list[Any]:
    if all(type(u) is ad.Zero for u in upstreams):  # a map that refuses has no other upstream
        return [None] * len(operands)
    gradients = pull(operands[:count], [*map(ad.instantiate_zeros, upstreams)])
    return [None] * count + gradients


def _batch(
    axis: Any, operands: Any, at: Any, *, push: Map, pull: Map, count: int, types: Any
) -> Any:
    if all(i is None for i in at):  # JAX calls the rule even then
        unmapped = linear_map(push, pull, operands[:count], operands[count:], types)
        return unmapped, [None] * len(types)
    over = {"axis_size": axis.size, "axis_name": axis.name, "spmd_axis_name": axis.spmd_name}
    vectors = [
        batching.bdim_at_front(x, i, axis.size)
        for x, i in zip(operands[count:], at[count:], strict=True)
    ]

    def mapped(one: Map) -> Map:
        of_batch = jax.vmap(one, in_axes=(list(at[:count]), 0), **over)
        return lambda residuals, vectors: of_batch(list(residuals), list(vectors))

    kinds = [kind.update(shape=(axis.size, *kind.shape)) for kind in types]
    outputs = linear_map(mapped(push), mapped(pull), list(operands[:count]), vectors, kinds)
    return outputs, [0] * len(kinds)


_linear = Primitive("cgshim_linear_map")
_linear.multiple_results = True
_linear.def_impl(_run)
_linear.def_abstract_eval(lambda *_, types, **__: list(types))
mlir.register_lowering(_linear, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.fancy_primitive_batchers[_linear] = _batch


# --- Outputs without a batch ---------------------------------------------------------------------


def in_batch_of(args: Sequence[Array], outputs: Sequence[Array]) -> list[Array]:
    """Return the outputs as constants, with a batch wherever one of the args has one.

    A `jax.custom_vjp` counts the gradient of an output without the batch of a vmap once for each
    member of the batch.
    """
    if all(value_of(x) is not None for x in args):
        return list(outputs)
    return list(_constants.bind(*outputs, *args, count=len(outputs)))


def _constant_jvp(primals: Any, _: Any, *, count: int) -> Any:
    outputs = _constants.bind(*primals, count=count)
    return outputs, [ad.Zero(typeof(y).to_tangent_aval()) for y in outputs]


def _batch_constants(axis: Any, operands: Any, at: Any, *, count: int) -> Any:
    has_batch = any(i is not None for i in at)
    outputs = [
        batching.bdim_at_front(y, i, axis.size) if has_batch else y
        for y, i in zip(operands[:count], at[:count], strict=True)
    ]
    tied = _constants.bind(*outputs, *operands[count:], count=count)
    return tied, [0 if has_batch else None] * count


_constants = Primitive("cgshim_constants")
_constants.multiple_results = True
_constants.def_impl(lambda *operands, count: operands[:count])
_constants.def_abstract_eval(lambda *types, count: types[:count])
mlir.register_lowering(_constants, lambda _, *operands, count: operands[:count])
ad.primitive_jvps[_constants] = _constant_jvp
batching.fancy_primitive_batchers[_constants] = _batch_constants


# --- The transpose of a rule ----------------------------------------------------------------------


def transpose(
    function: Callable[..., list[Array]],
    types: Sequence[Any],
    vectors: Sequence[Array],
    refuse: Callable[[str], Any],
) -> list[Array]:
    """Return the transpose of a linear function of tensors of these types, applied to vectors.

    JAX drops the constant term of a function that is not linear. Where that is not zero, eager code
    raises an error, and compiled code returns NaN.
    """
    constant = function(*map(zeros_of, types))
    is_linear = (
        jnp.all(jnp.stack([jnp.all((c == 0) | jnp.isnan(c)) for c in constant]))
        if constant
        else True
    )
    if not is_tracer(is_linear) and not is_linear:
        refuse("a constant one")
    try:
        transposed = jax.linear_transpose(function, *types)
        result = transposed(list(vectors))
    except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return refuse(f"one that JAX cannot transpose ({str(error) or 'not linear'})")  # type: ignore[no-any-return]
    kinds = [*map(typeof, vectors)]
    if not is_tracer(is_linear) and not _is_transpose(function, transposed, types, kinds):
        refuse("one that is not")
    return [jnp.where(is_linear, x, jnp.nan) if is_tracer(is_linear) else x for x in result]


def _is_transpose(
    function: Callable[..., list[Array]],
    transposed: Callable[[list[Array]], Sequence[Array]],
    types: Sequence[Any],
    types_out: Sequence[Any],
) -> bool:
    """Compare the transpose with the function at a point; return True where values are not known.

    JAX's transpose of a cast to integers is zero, and raises no error.
    """
    point, vectors = ([*map(_trial_vector, of)] for of in (types, types_out))
    pairs = (
        zip(function(*point), vectors, strict=True),
        zip(point, transposed(vectors), strict=True),
    )
    # real parts: the transpose of a map that is linear over the real numbers only
    sums = [[jnp.real(jnp.vdot(jnp.conj(a), b)) for a, b in pair] for pair in pairs]
    scale = sum(jnp.abs(x) for each in sums for x in each)
    is_off = jnp.abs(sum(sums[0]) - sum(sums[1])) > 1e-2 * scale
    return is_tracer(is_off) or not is_off


def _trial_vector(kind: Any) -> Array:
    return jnp.linspace(0.6, 1.7, kind.size, dtype=kind.dtype).reshape(kind.shape)
