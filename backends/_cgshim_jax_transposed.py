"""A linear map that is given by its transpose, as a JAX primitive: what a rule is to forward mode.

Reverse mode transposes it, and so runs the rule itself. Only where the map is executed, in forward mode, is the rule
transposed, or refused. jax.custom_vjp has such a primitive inside, which can be neither executed nor batched;
jax.custom_derivatives.linear_call cannot be batched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from cgshim._errors import TransformationError, sentence

Array = Any
Rule = Callable[[list[Array], list[Array]], Sequence[Array]]

_NOT_TRANSPOSABLE = (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""what JAX raises for what is not linear, each primitive in its own way"""


class Transposed:
    """The transpose of `rule(residuals, upstreams) -> gradients`: a map from tangents to tangents of the outputs."""

    def __init__(self, op: str, rule: Rule, outputs: Sequence[Any], refusal: str | None) -> None:
        self.op = op
        self.rule = rule
        self.outputs = outputs
        """the types of the map's outputs, which are those of the rule's upstreams"""
        self.refusal = refusal
        """why the map may not be executed"""

    def __call__(self, residuals: Sequence[Array], tangents: Sequence[Array]) -> list[Array]:
        """The outputs' tangents."""
        outputs: list[Array] = _transposed.bind(*residuals, *tangents, map=self, residuals=len(residuals))
        return outputs

    def execute(self, residuals: list[Array], tangents: list[Array]) -> list[Array]:
        """The outputs' tangents in forward mode."""
        if self.refusal is not None:
            raise TransformationError(self.refusal)
        try:
            transpose = jax.linear_transpose(lambda *us: self.rule(residuals, list(us)), *self.outputs)
            return list(transpose(tangents))
        except _NOT_TRANSPOSABLE as error:
            raise TransformationError(
                sentence(self.op, "forward mode needs a rule that is linear in upstream",
                         "one that JAX cannot transpose", "write it in linear operations, or use reverse mode")
            ) from error  # fmt: skip

    def over(self, axis: Any, residuals_at: Sequence[int | None]) -> Transposed:
        """The map over a batch, which the residuals have at these axes and all the rest at the first."""
        rule = jax.vmap(
            self.rule, in_axes=(list(residuals_at), 0),
            axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name,
        )  # fmt: skip
        outputs = [y.update(shape=(axis.size, *y.shape)) for y in self.outputs]
        return Transposed(self.op, rule, outputs, self.refusal)


_transposed = Primitive("cgshim_transposed")
_transposed.multiple_results = True


def _types(*operands: Any, map: Transposed, residuals: int) -> list[Any]:
    return list(map.outputs)


def _execute(*operands: Array, map: Transposed, residuals: int) -> list[Array]:
    return map.execute(list(operands[:residuals]), list(operands[residuals:]))


def _jvp(primals: Sequence[Array], tangents: Sequence[Array], **parameters: Any) -> Any:
    whole = [ad.instantiate_zeros(tangent) for tangent in tangents]
    return jax.jvp(functools.partial(_execute, **parameters), primals, whole)


def _transpose(upstreams: Sequence[Array], *operands: Array, map: Transposed, residuals: int) -> list[Array | None]:
    gradients = map.rule(list(operands[:residuals]), [ad.instantiate_zeros(u) for u in upstreams])
    tangents = operands[residuals:]
    linear = [g if ad.is_undefined_primal(t) else None for g, t in zip(gradients, tangents, strict=True)]
    return [None] * residuals + linear


def _batch(axis: Any, operands: Sequence[Array], at: Sequence[int | None], *, map: Transposed, residuals: int) -> Any:
    tangents = [
        batching.bdim_at_front(t, i, axis.size) for t, i in zip(operands[residuals:], at[residuals:], strict=True)
    ]
    outputs = map.over(axis, at[:residuals])(operands[:residuals], tangents)
    return outputs, [0] * len(outputs)


_transposed.def_abstract_eval(_types)
_transposed.def_impl(_execute)
ad.primitive_jvps[_transposed] = _jvp
ad.primitive_transposes[_transposed] = _transpose
batching.fancy_primitive_batchers[_transposed] = _batch
mlir.register_lowering(_transposed, mlir.lower_fun(_execute, multiple_results=True))
