"""PyTorch: forward mode by the transpose of a rule that is linear in upstream, and the check that it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cgshim_torch._graph import has_values
from cgshim_torch._private import disable_proxy_modes_tracing, functorch, get_proxy_mode

if TYPE_CHECKING:
    from cgshim.backend import Call

Tensor = Any
Rule = Callable[..., "list[Tensor | None]"]
"""Takes one upstream per output; returns one gradient per tensor that may have a tangent."""


def push_forward(
    call: Call, rule: Rule, rule_of_constants: Rule, zeros: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Apply the transpose of the rule to the inputs' tangents; return the outputs' tangents, which are like zeros.

    The transpose of a linear rule is the same at each upstream. So the rule is evaluated at small upstreams and, once
    more, at these times a negative number: this shows a rule that is not linear.
    """
    floats = [z for z in zeros if _is_differentiable(z)]
    given: list[Tensor] = []

    def gradients(*upstreams: Tensor, rule: Rule = rule) -> tuple[Tensor, ...]:
        found = rule(*_merged(zeros, upstreams))
        paired = [(g, t) for g, t in zip(found, tangents, strict=False) if g is not None and t is not None]
        given[:] = [t for _, t in paired]
        return tuple([g for g, _ in paired]) or upstreams  # torch's vjp wants an output

    pushed: Sequence[Tensor] = floats
    upstreams = [_ramp(z) for z in floats]
    at_upstreams, transpose = torch.func.vjp(gradients, *upstreams) if floats else ((), None)
    if given and transpose is not None:
        pushed = transpose(tuple(given))
        small, tangents_given = _constants(at_upstreams), _constants(given)
        large = gradients(*[FACTOR * u for u in upstreams], rule=rule_of_constants)
        if not (
            len(large) == len(small)
            and all(map(_is_multiple, small, large))
            and _is_transpose(small, tangents_given, _constants(pushed), upstreams)
        ):
            call.refuse_nonlinear("one that is not, as its gradients at two upstreams show")
    following = iter(pushed)
    return tuple([next(following) if _is_differentiable(z) else None for z in zeros])


def _is_differentiable(tensor: Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _merged(zeros: Sequence[Tensor], upstreams: Sequence[Tensor]) -> list[Tensor]:
    """Return the upstreams of the float outputs among the zeros of the others."""
    following = iter(upstreams)
    return [next(following) if _is_differentiable(z) else z for z in zeros]


# --- Check if a rule is linear ----------------------------------------------------------------------------------

FACTOR = -160.0
TOLERANCE = 0.01
"""relative to what is compared: a linear rule may be a solver that stops early"""


def _ramp(like: Tensor) -> Tensor:
    """Return small, different upstreams: they show a rule that sorts or rounds them, or adds something."""
    dtype = like.real.dtype if like.is_complex() else like.dtype
    ramp = torch.arange(like.numel(), dtype=dtype, device=like.device).mul_(1 / (128 * max(like.numel(), 1)))
    ramp = ramp.add_(1 / 128).reshape(like.shape)
    return torch.complex(ramp, ramp / 2) if like.is_complex() else ramp


def _constants(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach() for tensor in tensors]


def _is_multiple(small: Tensor, large: Tensor) -> bool:
    """Return True if the gradients at the larger upstreams are larger by the same factor."""
    small, large = _dense(small), _dense(large)
    if not small.numel():
        return True
    difference, size = (large - FACTOR * small).abs().amax(), large.abs().amax() + abs(FACTOR) * small.abs().amax()
    return not _is_true(difference > _tolerance(small) * size)


def _is_transpose(
    gradients: Sequence[Tensor], tangents: Sequence[Tensor], pushed: Sequence[Tensor], upstreams: Sequence[Tensor]
) -> bool:
    """Return True if gradients times tangents equal pushed tangents times upstreams."""
    products = [
        *[_product(g, t) for g, t in zip(gradients, tangents, strict=True)],
        *[-_product(p, u) for p, u in zip(pushed, upstreams, strict=True)],
    ]
    difference, size = abs(sum(p.sum() for p in products)), sum(p.abs().sum() for p in products)
    return not _is_true(difference > _tolerance(pushed[0]) * size)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of real and imaginary parts, whose sum is the real inner product."""
    product = _dense(a) * _dense(b).conj()
    return product.real if product.is_complex() else product


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _tolerance(tensor: Tensor) -> float:
    return TOLERANCE if tensor.dtype.itemsize > 2 else 10 * TOLERANCE


def _is_true(condition: Tensor) -> bool:
    """Return True if a condition holds for any element of a batch; False if it has no values."""
    while functorch.is_functorch_wrapped_tensor(condition):
        condition = functorch.get_unwrapped(condition)
    if not has_values(condition) or torch.compiler.is_compiling():
        return False
    if condition.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    if get_proxy_mode() is None:
        return bool(condition.any())
    with disable_proxy_modes_tracing():  # in torch.func.linearize
        return bool(condition.any())
