"""PyTorch: the levels of torch.func, and what a tensor is at each."""

from __future__ import annotations

import operator
from collections.abc import Callable

from cgshim.backend import Tensor
from cgshim_torch._versions.private import forward_ad, functorch, outside_of_func

requires_grad = operator.attrgetter("requires_grad")


def is_transformed() -> bool:
    """Return True if a transformation of torch.func, or a level of dual numbers, is active."""
    return functorch.maybe_current_level() is not None or bool(forward_ad._current_level >= 0)


def is_jvp_alone() -> bool:
    """Return True if forward mode is active, and no other transformation of torch.func."""
    if functorch.maybe_current_level() not in (None, 1):
        return False
    innermost = functorch.peek_interpreter_stack()
    is_jvp = innermost is None or innermost.key() == functorch.TransformType.Jvp
    return bool(is_jvp and forward_ad._current_level >= 0)


def level_now() -> int:
    """Return the innermost level, 0 outside of all."""
    return functorch.maybe_current_level() or 0


def recording_level() -> int | None:
    """Return the innermost level that is no batch, -1 outside of all; None if it is of forward mode."""
    for interpreter in reversed(functorch.get_interpreter_stack() or ()):
        if interpreter.key() != functorch.TransformType.Vmap:
            is_reverse = interpreter.key() == functorch.TransformType.Grad
            return int(interpreter.level()) if is_reverse else None
    return -1 if forward_ad._current_level < 0 else None


def levels(tensor: Tensor) -> list[Tensor]:
    """Return a tensor, and what each transformation of torch.func has wrapped, the innermost last."""
    each = [tensor]
    while functorch.is_functorch_wrapped_tensor(each[-1]):
        each.append(functorch.get_unwrapped(each[-1]))
    return each


def requires_grad_at_a_level(tensor: Tensor) -> bool:
    """Return True if tensor requires grad at some level of torch.func, or outside of all."""
    return any(map(requires_grad, levels(tensor)))


def alive(tensor: Tensor) -> Tensor:
    """Return a tensor without the wrappers of transformations of torch.func that are over."""
    # Dynamo, which meets this where it leaves the graph, does not know is_dead_tensor_wrapper
    while (inner := functorch.unwrap_if_dead(tensor)) is not tensor:
        tensor = inner
    return tensor


def batches_of(t: Tensor) -> set[int]:
    """Return the levels of torch.vmap that a tensor is a batch of."""
    return {functorch.maybe_get_level(x) for x in levels(t) if functorch.is_batchedtensor(x)}


def is_batch_of_none(tensor: Tensor) -> bool:
    """Return True for a tensor that some torch.vmap over no elements has wrapped."""
    batches = filter(functorch.is_batchedtensor, levels(tensor))
    return any(functorch.get_unwrapped(x).shape[functorch.maybe_get_bdim(x)] == 0 for x in batches)


def primal_of(tensor: Tensor) -> Tensor:
    """Return tensor without its tangent at this level; torch 2.13 has no batching rule for that."""
    if functorch.is_batchedtensor(tensor):
        return _within_batch(primal_of, tensor)
    return forward_ad.unpack_dual(tensor).primal


def has_tangent(tensor: Tensor) -> bool:
    """Return True for a dual number of this level, or a batch of them."""
    if functorch.is_batchedtensor(tensor):
        return has_tangent(functorch.get_unwrapped(tensor))
    return forward_ad.unpack_dual(tensor).tangent is not None


def without_graph(t: Tensor, at: int) -> Tensor:
    """Return t without the graph that this level has of it; those of outer levels stay."""
    if functorch.is_batchedtensor(t):
        return _within_batch(lambda inner: without_graph(inner, at), t)
    level = functorch.maybe_get_level(t)
    if level != at:
        return t
    if level >= 0:
        return functorch._wrap_for_grad(functorch._unwrap_for_grad(t, level), level)
    with outside_of_func():
        return t.detach()


def _within_batch(change: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """Return the batch of what a function makes of the tensor that is one."""
    inner = change(functorch.get_unwrapped(t))
    return functorch._add_batch_dim(
        inner, functorch.maybe_get_bdim(t), functorch.maybe_get_level(t)
    )
