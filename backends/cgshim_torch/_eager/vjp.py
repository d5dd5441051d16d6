"""PyTorch: derivatives of any function, as `op_vjp` and `op_grad` take them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from cgshim.backend import (
    CustomGradientTypeError,
    FunctionHolder,
    Tensor,
    TransformationError,
    describe,
    refusal,
)
from cgshim_torch._eager.run import rules
from cgshim_torch._eager.second_order import (
    ending_at,
    pulled_back_again,
    without_random_numbers,
)
from cgshim_torch._graph.levels import is_transformed
from cgshim_torch._graph.reads import FLOATS, reads_now
from cgshim_torch._graph.transpose import FACTOR, across, is_transpose, ramp, transposed_by
from cgshim_torch._graph.walk import depends_on_more, is_captured, new_leaf, note_over, recordable
from cgshim_torch._versions.private import functorch, run_backward

Vjp = tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], Sequence[Tensor]]]


def vjp(fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], /) -> Vjp:
    if not (torch.compiler.is_dynamo_compiling() or is_transformed()):
        return _vjp_in_graph(fn, inputs, ())
    in_tuple = lambda *tensors: tuple(fn(*tensors))
    outputs, pullback = torch.func.vjp(in_tuple, *inputs)
    if torch.compiler.is_dynamo_compiling():
        return outputs, lambda upstreams: pullback(tuple(upstreams))
    return _shown(outputs), _Pullback(in_tuple, inputs, pullback)


class _Pullback(FunctionHolder):
    """A pullback of torch.func.

    A rule to which f has given it runs the function again, on what it holds then: the graph that
    torch keeps is that of f's level.
    """

    def __init__(
        self, fn: Callable[..., Any], inputs: Sequence[Tensor], pullback: Callable[..., Any]
    ) -> None:
        self._made_in = rules.current
        self._pullback = pullback
        self._f = lambda upstreams: torch.func.vjp(fn, *inputs)[1](upstreams)

    def __call__(self, upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        if rules.current is self._made_in:
            return _shown(self._pullback(tuple(upstreams)))
        with without_random_numbers(_refuse_random_numbers):
            return _shown(self._f(tuple(upstreams)))


def _refuse_random_numbers() -> NoReturn:
    raise refusal(TransformationError, "op_vjp",
                  must="a pullback that grad_fn keeps runs its function again under torch.func",
                  got="one that draws random numbers",
                  do="draw them outside, and pass them as an argument")  # fmt: skip


def _shown(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return tensors that torch has made for a rule, which what sees its operations has not seen."""
    reads = None if torch.compiler.is_dynamo_compiling() else reads_now()
    if reads is not None:
        reads.knows(*tensors)
    return tensors


def transposed(
    fn: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    upstreams: Sequence[Tensor],
    refuse: Callable[[str], NoReturn],
) -> Sequence[Tensor]:
    return transposed_by(vjp, fn, inputs, upstreams, upstreams[0], refuse, "tangents at two points")


def transposed_on_values(
    fn: Callable[..., Any],
    inputs: Sequence[Tensor],
    upstream: Tensor,
    needed: Sequence[bool],
) -> Sequence[Tensor | None] | None:
    """Do what `transposed` does where nothing is recorded, in few steps; return None for a function
    whose result is not like upstream, or not seen to be exactly linear, and for a batch of upstreams,
    or one whose values cannot be read.
    """
    has_no_values = upstream.is_meta or functorch.is_legacy_batchedtensor(upstream)
    if has_no_values or is_captured(upstream) or not FLOATS.issuperset([x.dtype for x in inputs]):
        return None
    if len(inputs) == 1 and inputs[0].numel() == 1 and not inputs[0].is_complex():
        return _transposed_number(fn, inputs[0], upstream)
    points = [
        ramp(x, at) if need else torch.zeros_like(x)
        for at, (x, need) in enumerate(zip(inputs, needed, strict=True))
    ]
    # detached: that of a number may be the very same tensor, whose gradient would be both
    flipped = [across(point, at).detach() for at, point in enumerate(points)]
    own = [x for each in (points, flipped) for x, need in zip(each, needed, strict=True) if need]
    for x in own:
        x.requires_grad_()
    torch.set_grad_enabled(True)
    try:
        small, other = fn(*points), fn(*flipped)
    finally:
        torch.set_grad_enabled(False)
    if not (_is_like(small, upstream) and small.requires_grad and other.requires_grad):
        return None
    both = run_backward((small, other), (upstream, upstream), False, False, tuple(own), True, False)
    count = len(own) // 2
    gradients, there = both[:count], both[count:]
    pairs = zip(gradients, there, strict=True)
    if any(g is not h and (g is None or h is None or not torch.equal(g, h)) for g, h in pairs):
        return None
    connected = [at for at, g in enumerate(gradients) if g is not None]
    if not (
        connected
        and torch.equal(fn(*[FACTOR * x for x in points]), FACTOR * small)
        and is_transpose(
            [gradients[at] for at in connected],
            [own[at] for at in connected],
            [small],
            [upstream],
            small,
        )
    ):
        return None
    of_needed = iter(gradients)
    return [next(of_needed) if need else None for need in needed]


def _transposed_number(
    fn: Callable[..., Any], x: Tensor, upstream: Tensor
) -> Sequence[Tensor | None] | None:
    """Return the transpose of a linear function of one real number: what it makes of 1, times upstream."""
    slope = fn(torch.ones_like(x))
    if not _is_like(slope, upstream) or x.shape != upstream.shape:
        return None
    is_linear = torch.equal(fn(torch.full_like(x, FACTOR)), FACTOR * slope)
    return [slope * upstream] if is_linear else None


def _is_like(tangent: Any, upstream: Tensor) -> bool:
    return (
        type(tangent) is torch.Tensor
        and tangent.dtype is upstream.dtype
        and tangent.shape == upstream.shape
        and tangent.device == upstream.device
    )


def vjp_with_variables(
    fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], variables: Sequence[Tensor]
) -> Vjp:
    if torch.compiler.is_dynamo_compiling():
        from cgshim_torch._compile.dynamo import vjp_outside_of_the_graph

        return vjp_outside_of_the_graph(  # type: ignore[no-any-return]
            vjp_with_variables, fn, inputs, variables
        )
    if is_transformed():  # torch.func.vjp knows only arguments
        raise refusal(TransformationError, "op_vjp",
                      must="variables have gradients only outside of torch.func and dual numbers",
                      got="a transformation", do="pass them as arguments")  # fmt: skip
    for variable in variables:
        if not variable.requires_grad:
            raise refusal(CustomGradientTypeError, "op_vjp", must="variables must require grad",
                          got=describe(variable),
                          do="call its requires_grad_(), or pass it as an argument")  # fmt: skip
    return _vjp_in_graph(fn, inputs, variables)


def _vjp_in_graph(
    fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], variables: Sequence[Tensor]
) -> Vjp:
    """Do torch.func.vjp by torch.autograd; the results require grad only if something outside does."""
    outside = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.enable_grad():
        # each its own node of the graph: an input that comes twice has two gradients
        own = [
            x.view_as(x) if x.requires_grad and outside else new_leaf(x)
            for x in map(recordable, inputs)
        ]
        outputs = fn(*own)
    note_over(own)
    made_in = reads_now()
    connected = [y for y in outputs if y.requires_grad]
    outside = outside and (any(x.requires_grad for x in inputs) or depends_on_more(connected, own))
    differentiated = [*own, *variables]

    def pullback(upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        reads = reads_now()
        if reads is not None and reads is not made_in and torch.is_grad_enabled():
            again = functools.partial(_vjp_in_graph, fn, variables=variables)
            gradients = pulled_back_again(reads, again, inputs, outputs, upstreams)
            if gradients is not None:
                return gradients
        further = torch.is_grad_enabled() and (outside or any(u.requires_grad for u in upstreams))
        if not connected:
            return [torch.zeros_like(x) for x in differentiated]
        with (
            torch.inference_mode(False),
            ending_at(differentiated if variables else ()) as arrived,
        ):
            of_connected = [
                recordable(u) for u, y in zip(upstreams, outputs, strict=True) if y.requires_grad
            ]
            gradients = torch.autograd.grad(
                connected,
                differentiated,
                of_connected,
                retain_graph=True,
                create_graph=further,
                materialize_grads=True,
            )
        gradients = [arrived.get(at, gradient) for at, gradient in enumerate(gradients)]
        return _shown(gradients)  # with what hooks return

    return tuple(y if outside else y.detach() for y in outputs), pullback
