"""tinygrad: the graph behind a tensor, which is all that it remembers of a computation."""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad import Tensor
from tinygrad.uop.ops import Ops, UOp

from cgshim_tinygrad._tensors import COPY


def replaced(x: Tensor, old: Sequence[Tensor], new: Sequence[Tensor]) -> Tensor:
    """x as it would be if it had been computed from others."""
    instead = {a.uop: b.uop for a, b in zip(old, new, strict=True)}
    return Tensor(x.uop.substitute(instead, walk=True))


def without_assignments(tensors: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with each value that was assigned to given instead of the assignment: nobody writes into it then."""
    start, values = {x.uop for x in given}, dict[UOp, UOp]()
    places = set(start)
    for u in UOp.sink(*[x.uop for x in tensors]).toposort(gate=lambda u: u not in start, enter_calls=False):
        if u.op is Ops.AFTER and u.src[0] in places and u.src[1].op is Ops.STORE:
            places.add(u)
            values[u] = u.src[1].src[1].substitute(values, walk=True)
    return [Tensor(x.uop.substitute(values, walk=True)) for x in tensors]


def is_differentiated(x: Tensor) -> bool:
    """Whether x is made of what `vjp` differentiates by."""
    return any(u.op is Ops.FUNCTION and u.arg.name == COPY for u in _behind(x))


def may_be_differentiated(x: Tensor) -> bool:
    """Whether x is made of stored tensors: any of them may be what a gradient is asked of, now or later."""
    return any(u.op in (Ops.BUFFER, Ops.PARAM) for u in _behind(x))


def holds_numbers(x: Tensor) -> bool:
    """Whether x is made of tensors that tinygrad has computed: it has forgotten of what."""
    return any(u.op is Ops.BUFFER and u.is_realized and u.device != "NPY" for u in _behind(x))


def _behind(x: Tensor) -> list[UOp]:
    """The part of the graph of x in which a gradient may flow."""
    return list(x.uop.toposort(gate=lambda u: u.op is not Ops.DETACH, enter_calls=False))
