"""MLX: forward mode, as the transpose of a rule, and whether the rule is linear in upstream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from cgshim_mlx._arrays import Array, all_of, is_float, spoiled
from cgshim_mlx._graph import Graph

if TYPE_CHECKING:
    from cgshim.backend import Call


def transposed(
    call: Call,
    rule: Callable[..., Sequence[Array]],
    outputs: Sequence[Array],
    tangents: Sequence[Array],
) -> Sequence[Array]:
    """The gradient of <rule(upstreams), tangents> with respect to upstreams, which are like
    outputs.

    The transpose of a linear rule is the same everywhere. What the operations of a rule do not
    show, its numbers at two points do: where they are not proportional, the result is NaN.
    """

    def gradients_of(*upstreams: Array) -> list[Array]:
        gradients = rule(*upstreams)
        nonlinear = Graph(gradients, upstreams).nonlinear_operation()
        if nonlinear:
            call.refuse_nonlinear(f"{nonlinear} in it")
        return [mx.array(g) for g in gradients]

    points = [_numbers_like(y, 1.0) for y in outputs]
    gradients, pushed = mx.vjp(gradients_of, points, list(tangents))
    elsewhere = rule(*[_numbers_like(y, _SCALE) for y in outputs])
    ok = all_of(_is_close(_SCALE * g, e) for g, e in zip(gradients, elsewhere, strict=True))
    return [
        spoiled(x, ok & _is_close(_product(gradients, tangents), _product(points, pushed)))
        for x in pushed
    ]


_SCALE = -1.7


def _numbers_like(x: Array, scale: float) -> Array:
    if not is_float(x):
        return mx.zeros_like(x)
    return (scale * mx.cos(mx.arange(x.size) + 0.5)).reshape(x.shape).astype(x.dtype)


def _is_close(a: Array, b: Array) -> Array:
    return mx.all(mx.abs(a - b) <= 0.02 * mx.abs(b).sum() + 1e-6) | ~mx.all(mx.isfinite(b))


def _product(us: Sequence[Array], vs: Sequence[Array]) -> Array:
    return sum(
        (mx.real(mx.conj(u) * v).astype(mx.float32).sum() for u, v in zip(us, vs, strict=True)),
        mx.array(0.0),
    )
