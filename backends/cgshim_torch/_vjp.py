"""Derivatives of any function, for op_vjp and op_grad."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from cgshim.backend import (
    CustomGradientTypeError,
    Tensor,
    TransformationError,
    describe,
    is_in_op,
    refusal,
    tensors_inside,
)
from cgshim_torch._captured import reached
from cgshim_torch._cut import Cut
from cgshim_torch._private import functorch, is_transformed, is_wrapped
from cgshim_torch._tensors import alias

Vjp = tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], Sequence[Tensor]]]


def vjp(fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], /) -> Vjp:
    run = lambda *xs: tuple(fn(*xs))
    if not (torch.compiler.is_dynamo_compiling() or is_transformed()):
        return _vjp_by_autograd(fn, inputs, ())
    if is_in_op() and not torch.compiler.is_dynamo_compiling():
        return _vjp_that_runs_again(run, inputs)
    outputs, pullback = torch.func.vjp(run, *inputs)
    return outputs, lambda upstreams: pullback(tuple(upstreams))


def _vjp_that_runs_again(run: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Vjp:
    """Return a pullback that a rule may keep.

    It closes over inputs, which each level of torch.func replaces, and not over one level's graph.
    """

    def pullback(upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        return torch.func.vjp(run, *inputs)[1](tuple(upstreams))  # type: ignore[no-any-return]

    return run(*inputs), pullback


def jvp(
    fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], tangents: Sequence[Tensor], /
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return torch.func.jvp(  # type: ignore[no-any-return]
        lambda *xs: tuple(fn(*xs)), tuple(inputs), tuple(tangents)
    )


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
        others = {id(v): v for v in variables if v is not variable}
        if any(id(v) in others for v in reached([variable], others.values())):
            raise refusal(CustomGradientTypeError, "op_vjp",
                          must="variables must not be made of one another", got=describe(variable),
                          do="pass the one as an argument of the other's function")  # fmt: skip
    return _vjp_by_autograd(fn, inputs, variables)


def _vjp_by_autograd(
    fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], variables: Sequence[Tensor]
) -> Vjp:
    """Do torch.func.vjp by torch.autograd; results require grad only for outer derivatives."""
    outside = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.enable_grad():
        # a node per input: an input that comes twice has two gradients
        cut = Cut()
        own = [
            alias(cut(x) if variables else x) if x.requires_grad and outside else _new_leaf(x)
            for x in [x.clone() if x.is_inference() else x for x in inputs]
        ]
        outputs = fn(*own)
    for x in own:
        setattr(x, _RUNNING, not x.is_leaf)
    connected = [at for at, y in enumerate(outputs) if y.requires_grad]
    by = [*own, *variables]
    # fn may hold tensors that only a rule reads
    sources = [*inputs, *reached([*outputs, *tensors_inside(fn, torch.is_tensor)])]
    outside = outside and any(t.requires_grad and getattr(t, _RUNNING, True) for t in sources)

    def pullback(upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        if not connected:
            return [torch.zeros_like(x) for x in by]
        # the inputs of a second run of f, which has other tensors and the same flags
        further = outside or any(t.requires_grad for t in (*upstreams, *inputs))
        with cut:
            return torch.autograd.grad(  # type: ignore[no-any-return]
                [outputs[at] for at in connected], by, [upstreams[at] for at in connected],
                retain_graph=True, create_graph=further and torch.is_grad_enabled(), materialize_grads=True,
            )  # fmt: skip

    # other tensors than the pullback's own, in each run of an f that calls op_vjp
    return tuple([alias(y) if outside else y.detach() for y in outputs]), pullback


_RUNNING = "_cgshim_vjp_is_running"


def _new_leaf(x: Tensor) -> Tensor:
    """Return x as a leaf of an op_vjp, which is a constant after the function has run."""
    leaf = x.detach().requires_grad_()
    setattr(leaf, _RUNNING, True)
    return leaf


def transposed(
    fn: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    upstreams: Sequence[Tensor],
    refuse: Callable[[str], NoReturn],
    /,
) -> Sequence[Tensor]:
    """Return the transpose of a linear function at upstreams; raise if it is not linear.

    The pullback of a linear function is the same at every point. It is taken at one point, and
    compared with the function's values at another, unless there are no values: in a compiled graph.
    """
    points = [ramp(x, at) for at, x in enumerate(inputs)]
    outputs, pullback = vjp(fn, points)
    transpose = gradients = pullback(upstreams)
    if torch.compiler.is_compiling():
        return transpose
    with torch.no_grad():
        if any(map(functorch.is_legacy_batchedtensor, upstreams)):
            # is_grads_batched or vectorize=True: not comparable
            upstreams = [ramp(y, at) for at, y in enumerate(outputs)]
            gradients = pullback(upstreams)
        elsewhere = [_alternating(x) * x * (3.1 if at % 2 else 1.3) for at, x in enumerate(points)]
        if not _are_adjoint(gradients, elsewhere, fn(*elsewhere), upstreams):
            refuse("one that is not, as its values at two points show")
    return transpose


def ramp(like: Tensor, place: int) -> Tensor:
    """Return a tensor of different small numbers, which depend on place."""
    numbers = 0.5 + _counted(like) / (2.0 * max(like.numel(), 1))
    return ((1.0 + place / 4.0) * numbers).reshape(like.shape).to(like.dtype)


def _alternating(like: Tensor) -> Tensor:
    """Return -1, 3, -1, 3, ...: as factors they change signs, order and ratios."""
    return (4 * ((_counted(like) - 1) % 2) - 1).reshape(like.shape).to(like.dtype)


def _counted(like: Tensor) -> Tensor:
    """Return 1, 2, 3, ...: as many real numbers as like has, made by like's own class."""
    is_double = like.dtype in (torch.float64, torch.complex128)
    dtype = torch.float64 if is_double else torch.float32
    return torch.ones_like(like, dtype=dtype, requires_grad=False).reshape(like.numel()).cumsum(0)


def _are_adjoint(
    gradients: Sequence[Tensor],
    points: Sequence[Tensor],
    values: Sequence[Tensor],
    upstreams: Sequence[Tensor],
) -> bool:
    """Return True if <gradients, points> is <values, upstreams>, relative to all terms' sum."""
    terms = [
        *[x * y.conj() for x, y in zip(gradients, points, strict=True)],
        *[-x * y.conj() for x, y in zip(values, upstreams, strict=True)],
    ]
    # `sum` adds 0, which fails for an empty batch
    total = values_of(functools.reduce(torch.add, [t.sum() for t in terms]))
    size = values_of(functools.reduce(torch.add, [t.abs().sum() for t in terms]))
    difference = (total.real if total.is_complex() else total).abs()
    # rounding in 16 bits is no reason to raise an error, nor is a solver that stops early
    tolerance = 1e-4 if terms[0].dtype.itemsize > 2 else 1e-2
    try:
        return not bool((difference > tolerance * size).any())
    except RuntimeError:  # fake tensors
        return True


def differ(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> bool:
    """Return True if tensors differ by more than rounding; False if they have no values."""
    for x, y in zip(map(values_of, xs), map(values_of, ys), strict=True):
        try:
            # mostly they are equal, which one operation shows
            if not torch.equal(x, y):
                torch.testing.assert_close(x, y, equal_nan=True)
        except AssertionError:
            return True
        except RuntimeError:  # fake tensors
            return False
    return False


def values_of(t: Tensor) -> Tensor:
    """Return a tensor, or the tensor of a batch's elements."""
    while is_wrapped(t):
        t = functorch.get_unwrapped(t)
    return t
