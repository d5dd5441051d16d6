"""Derivatives of any function, as op_vjp and op_grad take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from cgshim.backend import (
    CustomGradientTypeError,
    Tensor,
    TransformationError,
    describe,
    is_in_f,
    refusal,
    tensors_inside,
)
from cgshim_torch._captured import reached
from cgshim_torch._private import functorch, is_transformed, is_wrapped

Vjp = tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], Sequence[Tensor]]]


def vjp(fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], /) -> Vjp:
    run = lambda *xs: tuple(fn(*xs))
    if not (torch.compiler.is_dynamo_compiling() or is_transformed()):
        return _vjp_by_autograd(fn, inputs, ())
    if is_in_f() and not torch.compiler.is_dynamo_compiling():
        return _vjp_that_runs_again(run, inputs)
    outputs, pullback = torch.func.vjp(run, *inputs)
    return outputs, lambda upstreams: pullback(tuple(upstreams))


def _vjp_that_runs_again(run: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Vjp:
    """Return a pullback that a rule may keep: it closes over inputs, which each level of torch.func
    replaces, and not over the graph of one level.
    """
    state, outputs = torch.get_rng_state(), run(*inputs)
    is_random = not torch.equal(state, torch.get_rng_state())

    def pullback(upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        if is_random:
            raise refusal(TransformationError, "op_vjp",
                          must="a pullback in f must not draw random numbers under torch.func",
                          got="a function that does", do="draw them outside, and pass them as an argument")  # fmt: skip
        return torch.func.vjp(run, *inputs)[1](tuple(upstreams))  # type: ignore[no-any-return]

    return outputs, pullback


def vjp_with_variables(
    fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], variables: Sequence[Tensor]
) -> Vjp:
    if is_transformed():
        raise refusal(TransformationError, "op_vjp",
                      must="variables have gradients only outside of torch.func and dual numbers",
                      got="a transformation", do="pass them as arguments")  # fmt: skip
    for variable in variables:
        if not variable.requires_grad:
            raise refusal(CustomGradientTypeError, "op_vjp", must="variables must require grad",
                          got=describe(variable),
                          do="call its requires_grad_(), or pass it as an argument")  # fmt: skip
    return _vjp_by_autograd(fn, inputs, variables)


def _vjp_by_autograd(
    fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], variables: Sequence[Tensor]
) -> Vjp:
    """Do torch.func.vjp by torch.autograd; the results require grad only if something outside does."""
    outside = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.enable_grad():
        # a node of its own for each: an input that comes twice has two gradients
        own = [
            x.view_as(x) if x.requires_grad and outside else x.detach().requires_grad_()
            for x in [x.clone() if x.is_inference() else x for x in inputs]
        ]
        outputs = fn(*own)
    connected = [at for at, y in enumerate(outputs) if y.requires_grad]
    by = [*own, *variables]
    outside = outside and (
        any(x.requires_grad for x in inputs)
        or bool({*map(id, reached(outputs, {}))} - {*map(id, own)})
        or any(
            t.requires_grad for t in tensors_inside(fn, torch.is_tensor)
        )  # a rule alone may read it
    )

    def pullback(upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        if not connected:
            return [torch.zeros_like(x) for x in by]
        further = outside or any(u.requires_grad for u in upstreams)
        return torch.autograd.grad(
            [outputs[at] for at in connected], by, [upstreams[at] for at in connected],
            retain_graph=True, create_graph=further and torch.is_grad_enabled(), materialize_grads=True,
        )  # fmt: skip

    return tuple([y if outside else y.detach() for y in outputs]), pullback


def transposed(
    fn: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    upstreams: Sequence[Tensor],
    refuse: Callable[[str], NoReturn],
    /,
) -> Sequence[Tensor]:
    """Return the transpose of a linear function at upstreams; refuse one that is seen not to be
    linear.

    The transpose of a linear function is the same everywhere, and <fn(x), u> = <x, transpose(u)>.
    Both are checked at two points, where there are values: not in a batch or a compiled graph.
    """
    points = [ramp(x, at) for at, x in enumerate(inputs)]
    value, pullback = vjp(fn, points)
    transpose = pullback(upstreams)
    if torch.compiler.is_compiling():
        return transpose
    elsewhere = [(3.0 if at % 2 else 1.0) * _alternating(x) * x for at, x in enumerate(points)]
    value_there, pullback_there = vjp(fn, elsewhere)
    with torch.no_grad():
        there = pullback_there(upstreams)
        products = [
            _product(transpose, points), _product(value, upstreams),
            _product(there, elsewhere), _product(value_there, upstreams),
        ]  # fmt: skip
    if differ([*transpose, *products[::2]], [*there, *products[1::2]], rtol=0.02, atol=0.001):
        refuse("one that is not, as its values at two points show")
    return transpose


def ramp(like: Tensor, place: int) -> Tensor:
    """Return a tensor of small numbers that are all different, and others at each place."""
    numbers = torch.linspace(
        0.5, 1.0, max(like.numel(), 1), dtype=like.real.dtype, device=like.device
    )
    return ((1.0 + place / 4.0) * numbers[: like.numel()]).reshape(like.shape).to(like.dtype)


def _alternating(like: Tensor) -> Tensor:
    """Return -1, 3, -1, 3, ...: times these, numbers have other signs, another order and other ratios."""
    return (4 * (torch.arange(like.numel(), device=like.device) % 2) - 1).reshape(like.shape)


def _product(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """Return the real inner product."""
    return sum((x * y.conj()).sum().real for x, y in zip(xs, ys, strict=True))


def differ(xs: Sequence[Tensor], ys: Sequence[Tensor], **tolerance: float) -> bool:
    """Return True if tensors differ by more than rounding; False where they have no values."""
    for x, y in zip(map(_values_of, xs), map(_values_of, ys), strict=True):
        try:
            # nearly always they are equal, which takes one operation to see
            if not torch.equal(x, y):
                torch.testing.assert_close(x, y, equal_nan=True, **tolerance)
        except AssertionError:
            return True
        except RuntimeError:  # of fake tensors
            return False
    return False


def _values_of(t: Tensor) -> Tensor:
    """Return the numbers of a tensor, or those of all members of a batch."""
    while is_wrapped(t):
        t = functorch.get_unwrapped(t)
    return t.detach()
