"""Linear maps, and two primitives that are made as in JAX's tutorial "How JAX primitives work".

- `linear_map` carries a rule through forward mode. `jax.custom_derivatives.linear_call` does the
  same, but JAX 0.10 cannot map it by vmap, as jacfwd does.
- `with_tangents` gives tensors that are known already a derivative. `jax.custom_jvp` does the same,
  but a scan whose gradient is differentiated drops it, and tracing it takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from cgshim_jax._tensors import Array, is_tracer, matching, typeof, varies_over, zeros_of

# --- A linear map with a transpose ----------------------------------------------------------------

Map = Callable[[Sequence[Array], Sequence[Array]], list[Array]]
"""a function of residuals and vectors, linear in the vectors"""


def linear_map(
    push: Map, pull: Map, residuals: Sequence[Array], vectors: Sequence[Array], types: Sequence[Any]
) -> list[Array]:
    """Return ``push(residuals, vectors)``, tensors of these types; the map's transpose is pull."""
    return list(
        _linear.bind(
            *residuals, *vectors, push=push, pull=pull, count=len(residuals), types=tuple(types)
        )
    )


def _run(*operands: Array, push: Map, count: int, **_: Any) -> list[Array]:
    return push(operands[:count], operands[count:])


def _jvp(primals: Any, tangents: Any, **how: Any) -> Any:
    return jax.jvp(
        lambda *xs: _run(*xs, **how), tuple(primals), tuple(map(ad.instantiate_zeros, tangents))
    )


def _transpose(
    upstreams: Any, *operands: Any, pull: Map, count: int, types: Any, **_: Any
) -> list[Any]:
    if all(type(u) is ad.Zero for u in upstreams):  # a map that refuses has no other upstream
        return [None] * len(operands)
    full = [
        matching(ad.instantiate_zeros(u), kind) for u, kind in zip(upstreams, types, strict=True)
    ]
    return [None] * count + pull(operands[:count], full)


def _batch(
    axis: Any, operands: Any, at: Any, *, push: Map, pull: Map, count: int, types: Any
) -> Any:
    if all(i is None for i in at):  # JAX calls the rule even then
        unmapped = linear_map(push, pull, operands[:count], operands[count:], types)
        return unmapped, [None] * len(types)
    vectors = [_at_front(x, i, axis) for x, i in zip(operands[count:], at[count:], strict=True)]

    def mapped(one: Map) -> Map:
        of_batch = jax.vmap(one, in_axes=(list(at[:count]), 0), **_over(axis))
        return lambda residuals, vectors: of_batch(list(residuals), list(vectors))

    kinds = [_with_batch(kind, axis, operands) for kind in types]
    outputs = linear_map(mapped(push), mapped(pull), list(operands[:count]), vectors, kinds)
    return outputs, [0] * len(kinds)


def _at_front(x: Array, at: int | None, axis: Any) -> Array:
    if at is None and _explicit(axis):
        return batching.broadcast(x, axis.size, 0, mesh_axis=_explicit(axis))
    return batching.bdim_at_front(x, at, axis.size)


def _with_batch(kind: Any, axis: Any, operands: Sequence[Array]) -> Any:
    """Return the type of a batch of tensors of this type, beside these tensors."""
    if axis.spmd_name and any({*axis.spmd_name} <= varies_over(typeof(x)) for x in operands):
        mat = kind.mat
        kind = kind.update(manual_axis_type=mat.update(varying=mat.varying | {*axis.spmd_name}))
    shape, sharding = (axis.size, *kind.shape), getattr(kind, "sharding", None)
    if sharding is None or not any((_explicit(axis), *sharding.spec)):
        return kind.update(shape=shape)
    spec = PartitionSpec(_explicit(axis), *sharding.spec)
    return kind.update(shape=shape, sharding=sharding.update(spec=spec))


def _explicit(axis: Any) -> Any:
    return getattr(axis, "explicit_mesh_axis", None)  # before 0.7 there is none


def _primitive(
    name: str, run: Any, types: Any, lowering: Any, jvp: Any, transpose: Any, batch: Any
) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(run)
    primitive.def_abstract_eval(types)
    mlir.register_lowering(primitive, lowering)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.fancy_primitive_batchers[primitive] = batch
    return primitive


_linear = _primitive(
    "cgshim_linear_map",
    run=_run,
    types=lambda *_, types, **__: list(types),
    lowering=mlir.lower_fun(_run, multiple_results=True),
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
)


# --- Known tensors with a derivative --------------------------------------------------------------


def with_tangents(
    tangents: Callable[..., Any], values: Sequence[Array], operands: Sequence[Array],
    below: Callable[..., Any] | None = None, is_tied: bool = True,
) -> list[Array]:  # fmt: skip
    """Return the values as functions of the operands, with these tangents.

    ``tangents(values, operands, dots)`` returns the tangents of the values, where dots are the
    tangents of both; None is zero. The innermost derivative calls it, and the derivatives around it
    call `below`.

    If is_tied, the values have a batch wherever an operand has one. `jax.custom_vjp` counts the
    gradient of an output without the batch of a vmap once for each member of the batch.
    """
    if not any(map(is_tracer, operands)):
        return list(values)
    return list(
        _values.bind(
            *values,
            *operands,
            tangents=(tangents, below or tangents),
            count=len(values),
            is_tied=is_tied,
        )
    )


def _values_jvp(primals: Any, dots: Any, *, count: int, tangents: Any, **how: Any) -> Any:
    own, below = tangents
    values = _values.bind(*primals, count=count, tangents=(below, below), **how)
    dots = [None if type(t) is ad.Zero else t for t in dots]
    found = own(list(values), list(primals[count:]), dots)
    zeros = [ad.Zero(typeof(y).to_tangent_aval()) for y in values]
    return values, [zero if t is None else t for t, zero in zip(found, zeros, strict=True)]


def _transpose_values(upstreams: Any, *tensors: Any, count: int, **_: Any) -> list[Any]:
    return [*upstreams, *[None] * (len(tensors) - count)]


def _batch_values(
    axis: Any, tensors: Any, at: Any, *, count: int, tangents: Any, is_tied: bool
) -> Any:
    is_mapped = any(i is not None for i in at)  # JAX calls the rule even where nothing is
    axes = [0 if i is not None or (is_mapped and is_tied and n < count) else None
            for n, i in enumerate(at)]  # fmt: skip
    tensors = [
        x if to is None else _at_front(x, i, axis)
        for x, i, to in zip(tensors, at, axes, strict=True)
    ]
    in_axes = axes[:count], axes[count:], axes
    if is_mapped:
        tangents = tuple(jax.vmap(t, in_axes=in_axes, **_over(axis)) for t in tangents)
    values = _values.bind(*tensors, count=count, tangents=tangents, is_tied=is_tied)
    return values, axes[:count]


def _over(axis: Any) -> dict[str, Any]:
    return {"axis_size": axis.size, "axis_name": axis.name, "spmd_axis_name": axis.spmd_name}


_values = _primitive(
    "cgshim_values",
    run=lambda *tensors, count, **_: tensors[:count],
    types=lambda *types, count, **_: types[:count],
    lowering=lambda _, *tensors, count, **__: tensors[:count],
    jvp=_values_jvp,
    transpose=_transpose_values,
    batch=_batch_values,
)


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
    are_zero = [jnp.all((c == 0) | jnp.isnan(c)) for c in function(*map(zeros_of, types))]
    is_linear = jnp.all(jnp.stack(are_zero)) if are_zero else True
    try:
        transposed = jax.linear_transpose(function, *types)
        result = transposed(list(vectors))
    except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return refuse(f"one that JAX cannot transpose ({str(error) or 'not linear'})")  # type: ignore[no-any-return]
    if is_tracer(is_linear):
        return [jnp.where(is_linear, x, jnp.nan) for x in result]
    if not _is_transpose(function, transposed, types, [*map(typeof, vectors)]):
        refuse("one that is not")
    return list(result)


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
