"""Two primitives of JAX that carry a rule where jax.custom_jvp and jax.custom_vjp cannot.

`transposed` is a linear map that is given by its transpose: what a rule is to forward mode. Reverse mode transposes
it, and so runs the rule itself. Only where the map is executed, in forward mode, is the rule transposed, or refused.
(jax.custom_vjp has such a primitive inside, which can be neither executed nor batched;
jax.custom_derivatives.linear_call cannot be batched.)

`attached` gives values that are known already the rule's derivative. (A custom_jvp does too, but JAX forgets it within
a scan whose gradient is differentiated, and a custom_vjp has no forward mode.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from cgshim.backend import CustomGradientError, TransformationError, sentence
from cgshim_jax import _private
from cgshim_jax._rules import as_tensor

Array = Any
Rule = Callable[[list[Array], list[Array]], list[Array]]
Refusal = Callable[[], str | None]

_NOT_TRANSPOSABLE = (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""what JAX raises for what is not linear, each primitive in its own way"""


class Transposed:
    """The transpose of `rule(residuals, upstreams) -> gradients`: a map from tangents to tangents of the outputs."""

    def __init__(
        self, op: str, rule: Rule, outputs: Sequence[Any], refusal: Refusal | None = None, once: str | None = None
    ) -> None:
        self.op = op
        self.rule = rule
        self.outputs = outputs
        """the types of the outputs, which are those of the rule's upstreams"""
        self.refusal = refusal
        """returns why the map may not be executed, or None"""
        self.once = once
        """why the map's results may not be differentiated, or None"""

    def __call__(self, residuals: Sequence[Array], tangents: Sequence[Array]) -> list[Array]:
        """Return the outputs' tangents."""
        outputs: list[Array] = _transposed.bind(*residuals, *tangents, linear_map=self, residuals=len(residuals))
        return outputs

    def attach(
        self, residuals: Sequence[Array], arguments: Sequence[Array], outputs: Sequence[Array], kept: Sequence[int] = ()
    ) -> list[Array]:
        """Return outputs, with this map for their derivative by arguments; those at `kept` are its last residuals."""
        attached: list[Array] = _attached.bind(
            *residuals, *arguments, *outputs, linear_map=self, residuals=len(residuals), kept=tuple(kept)
        )
        return attached

    def execute(self, residuals: list[Array], tangents: list[Array]) -> list[Array]:
        """Return the outputs' tangents in forward mode."""
        refusal = self.refusal and self.refusal()
        if refusal is not None:
            raise TransformationError(refusal)

        def fitting(*upstreams: Array) -> list[Array]:
            gradients = self.rule(residuals, list(upstreams))
            return [fit(g, t.aval) for g, t in zip(gradients, map(as_tensor, tangents), strict=True)]

        try:
            transpose = jax.linear_transpose(fitting, *self.outputs)
            outputs = list(transpose(tangents))
        except CustomGradientError:  # an op in the rule says more exactly what it refuses
            raise
        except _NOT_TRANSPOSABLE as error:
            raise TransformationError(
                sentence(self.op, must="forward mode needs a rule that is linear in upstream",
                         got="one that JAX cannot transpose", do="write it in linear operations, or use reverse mode")
            ) from error  # fmt: skip
        if self.once is not None:
            return without_derivative(self.op, outputs, [*residuals, *tangents], self.once)
        return outputs

    def only(self, picked: Sequence[int]) -> Transposed:
        """Return the map from some of the tangents, where the others are zero."""

        def rule(residuals: list[Array], upstreams: list[Array]) -> list[Array]:
            gradients = self.rule(residuals, upstreams)
            return [gradients[i] for i in picked]

        return Transposed(self.op, rule, self.outputs, self.refusal, self.once)

    def over(self, axis: Any, residuals_at: Sequence[int | None], tangents_at: Sequence[int | None]) -> Transposed:
        """Return the map over a batch: the operands have it at these axes, and the outputs at their first axis."""
        rule = vmap_over(axis, self.rule, (list(residuals_at), 0), [at or 0 for at in tangents_at])

        def summed(residuals: list[Array], upstreams: list[Array]) -> list[Array]:
            gradients = rule(residuals, upstreams)
            return [g.sum(0) if at is None else g for g, at in zip(gradients, tangents_at, strict=True)]

        return Transposed(self.op, summed, [_batched(y, axis) for y in self.outputs], self.refusal, self.once)


def vmap_over(axis: Any, function: Callable[..., Any], in_axes: Any, out_axes: Any) -> Callable[..., Any]:
    """Return the function over the batch that JAX is making now."""
    vmapped: Callable[..., Any] = jax.vmap(
        function, in_axes=in_axes, out_axes=out_axes,
        axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name or _mesh_axis(axis),
    )  # fmt: skip
    return vmapped


def _batched(kind: Any, axis: Any) -> Any:
    if _mesh_axis(axis) is None:
        return kind.update(shape=(axis.size, *kind.shape))
    return _private.unmapped_aval(axis.size, 0, kind, _mesh_axis(axis))


def _mesh_axis(axis: Any) -> Any:
    """Return the mesh axes over which a batch is sharded, if shardings are a part of types."""
    return getattr(axis, "explicit_mesh_axis", None)


def _varies_over(kind: Any) -> frozenset[Any]:
    """Return the mesh axes of a shard_map over which values of this type differ."""
    return kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", frozenset())


# --- The map ----------------------------------------------------------------------------------------------------


def _types(*operands: Any, linear_map: Transposed, residuals: int) -> list[Any]:
    return list(linear_map.outputs)


def _execute(*operands: Array, linear_map: Transposed, residuals: int) -> list[Array]:
    return linear_map.execute(list(operands[:residuals]), list(operands[residuals:]))


def _jvp(primals: Sequence[Array], tangents: Sequence[Array], **parameters: Any) -> Any:
    whole = tuple(ad.instantiate_zeros(tangent) for tangent in tangents)
    return jax.jvp(functools.partial(_execute, **parameters), tuple(primals), whole)


def _transpose(
    upstreams: Sequence[Array], *operands: Array, linear_map: Transposed, residuals: int
) -> list[Array | None]:
    if all(isinstance(u, ad.Zero) for u in upstreams):  # not even zeros, which would have a dtype of their own
        return [None] * len(operands)
    of_rule = list(operands[:residuals]), [ad.instantiate_zeros(u) for u in upstreams]
    gradients: Sequence[Array | None] = linear_map.rule(*of_rule)
    if linear_map.once is not None:
        gradients = without_derivative(linear_map.op, gradients, [*of_rule[0], *of_rule[1]], linear_map.once)
    tangents = operands[residuals:]
    fitting = [fit(g, t.aval) if ad.is_undefined_primal(t) else None for g, t in zip(gradients, tangents, strict=True)]
    return [None] * residuals + fitting


def fit(gradient: Array, kind: Any) -> Array:
    """Return the gradient of an argument of this type, summed over the devices of a shard_map that share it."""
    same_on = _varies_over(gradient.aval) - _varies_over(kind)
    return jax.lax.psum(gradient, tuple(sorted(same_on))) if same_on else gradient


def _batch(
    axis: Any, operands: Sequence[Array], at: Sequence[int | None], *, linear_map: Transposed, residuals: int
) -> Any:
    batched = any(i is not None for i in at)  # JAX asks even where nothing is
    over = linear_map.over(axis, at[:residuals], at[residuals:]) if batched else linear_map
    outputs = over(operands[:residuals], operands[residuals:])
    return outputs, [0 if batched else None] * len(outputs)


def primitive(
    name: str, evaluate: Callable[..., Any], types: Callable[..., Any], jvp: Callable[..., Any],
    batch: Callable[..., Any], lower: Callable[..., Any],
) -> Any:  # fmt: skip
    """Return a new primitive with any number of results."""
    made = Primitive(name)
    made.multiple_results = True
    made.def_abstract_eval(types)
    made.def_impl(evaluate)
    ad.primitive_jvps[made] = jvp
    batching.fancy_primitive_batchers[made] = batch
    mlir.register_lowering(made, lower)
    return made


_lower = mlir.lower_fun(_execute, multiple_results=True)
_transposed = primitive("cgshim_transposed", _execute, _types, _jvp, _batch, _lower)
ad.primitive_transposes[_transposed] = _transpose


# --- Values that have it for a derivative -----------------------------------------------------------------------


def _outputs(*operands: Any, linear_map: Transposed, residuals: int, kept: tuple[int, ...]) -> list[Any]:
    return list(operands[len(operands) - len(linear_map.outputs) :])


def _jvp_of_attached(
    primals: Sequence[Array], tangents: Sequence[Any], *, linear_map: Transposed, residuals: int, kept: tuple[int, ...]
) -> Any:
    outputs = _attached.bind(*primals, linear_map=linear_map, residuals=residuals, kept=kept)
    moving = tangents[residuals : len(primals) - len(outputs)]
    picked = [i for i, tangent in enumerate(moving) if not isinstance(tangent, ad.Zero)]
    if not picked:
        return outputs, [ad.Zero(kind.to_tangent_aval()) for kind in linear_map.outputs]
    of_rule = [*primals[:residuals], *(outputs[at] for at in kept)]  # a kept output has the rule's derivative too
    return outputs, linear_map.only(picked)(of_rule, [moving[i] for i in picked])


def _batch_of_attached(
    axis: Any, operands: Sequence[Array], at: Sequence[int | None], *, linear_map: Transposed, residuals: int,
    kept: tuple[int, ...],
) -> Any:  # fmt: skip
    first = len(operands) - len(linear_map.outputs)
    if all(i is None for i in at):
        outputs = linear_map.attach(operands[:residuals], operands[residuals:first], operands[first:], kept)
        return outputs, [None] * len(outputs)
    values = [batching.bdim_at_front(y, i, axis.size) for y, i in zip(operands[first:], at[first:], strict=True)]
    over = linear_map.over(axis, [*at[:residuals], *(0 for _ in kept)], at[residuals:first])
    return over.attach(operands[:residuals], operands[residuals:first], values, kept), [0] * len(values)


_lower_attached = mlir.lower_fun(_outputs, multiple_results=True)
_attached = primitive("cgshim_attached", _outputs, _outputs, _jvp_of_attached, _batch_of_attached, _lower_attached)


# --- Outputs that a batch does not change ---------------------------------------------------------------------------


def spread(outputs: Sequence[Array], arguments: Sequence[Array]) -> list[Array]:
    """Return outputs, which under vmap have the batch as soon as one argument has it.

    JAX takes the upstream of an output without the batch for that of all its members, and a rule that adds it to a
    gradient of each member would count it as often as there are members (48 becomes 96 for two, and by a custom_vjp
    written by hand too: seen in 0.4.38 to 0.12).
    """
    found: list[Array] = _spread.bind(*outputs, *arguments, outputs=len(outputs))
    return found


def _outputs_of_spread(*operands: Any, outputs: int) -> list[Any]:
    return list(operands[:outputs])


def _jvp_of_spread(primals: Sequence[Array], tangents: Sequence[Any], *, outputs: int) -> Any:
    return _spread.bind(*primals, outputs=outputs), list(tangents[:outputs])


def _batch_of_spread(axis: Any, operands: Sequence[Array], at: Sequence[int | None], *, outputs: int) -> Any:
    if all(i is None for i in at):
        return list(operands[:outputs]), [None] * outputs
    pairs = zip(operands[:outputs], at[:outputs], strict=True)
    values = [batching.bdim_at_front(y, i, axis.size) for y, i in pairs]
    return spread(values, operands[outputs:]), [0] * outputs  # for another vmap around this one


_lower_spread = mlir.lower_fun(_outputs_of_spread, multiple_results=True)
_spread = primitive(
    "cgshim_spread", _outputs_of_spread, _outputs_of_spread, _jvp_of_spread, _batch_of_spread, _lower_spread
)


def without_derivative(
    op: str, values: Sequence[Array | None], of: Sequence[Array], refusal: str
) -> list[Array | None]:
    """Return values whose derivative by `of`, the tensors that they are made of, raises the error `refusal`."""
    arguments = [x for x in of if _is_float(x)]
    at = [i for i, value in enumerate(values) if value is not None]

    def refuse(residuals: list[Array], upstreams: list[Array]) -> NoReturn:
        raise TransformationError(refusal)

    if not any(isinstance(x, jax.core.Tracer) for x in arguments):
        return list(values)
    made = [jax.lax.stop_gradient(values[i]) for i in at]
    linear_map = Transposed(op, refuse, [x.aval for x in made], lambda: refusal)
    attached = dict(zip(at, linear_map.attach([], arguments, made), strict=True))
    return [attached.get(i) for i in range(len(values))]


def _is_float(x: Array) -> bool:
    return bool(jax.numpy.issubdtype(x.dtype, jax.numpy.inexact))
