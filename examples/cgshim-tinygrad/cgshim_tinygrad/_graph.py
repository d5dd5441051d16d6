"""tinygrad: the graph behind a tensor, which is all that it remembers of a computation."""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad import Tensor, dtypes
from tinygrad.tensor import all_tensors
from tinygrad.uop.ops import Ops, UOp

from cgshim_tinygrad._tensors import COPY, HIDDEN


def replaced(x: Tensor, old: Sequence[Tensor], new: Sequence[Tensor]) -> Tensor:
    """x as it would be if it had been computed from others."""
    instead = {a.uop: b.uop for a, b in zip(old, new, strict=True)}
    return Tensor(x.uop.substitute(instead, walk=True))


def without_gradient(x: Tensor, constants: Sequence[Tensor]) -> Tensor:
    """x as a function of all but these."""
    return replaced(x, constants, [each.detach() for each in constants])


def without_assignments(tensors: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with each value that was assigned to given instead of the assignment: nobody
    writes into it then.
    """
    start, values = {x.uop for x in given}, dict[UOp, UOp]()
    places = set(start)
    for u in UOp.sink(*[x.uop for x in tensors]).toposort(
        gate=lambda u: u not in start, enter_calls=False
    ):
        if u.op is Ops.AFTER and u.src[0] in places and u.src[1].op is Ops.STORE:
            places.add(u)
            values[u] = u.src[1].src[1].substitute(values, walk=True)
    return [Tensor(x.uop.substitute(values, walk=True)) for x in tensors]


def is_differentiated(x: Tensor) -> bool:
    """Whether x is made of what `vjp` differentiates by."""
    return any(u.op is Ops.FUNCTION and u.arg.name == COPY for u in _behind(x))


def may_be_differentiated(x: Tensor) -> bool:
    """Whether x is made of stored tensors: any of them may be what a gradient is asked of, now or
    later.
    """
    return any(u.op in (Ops.BUFFER, Ops.PARAM) for u in _behind(x))


def nearest(results: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those of the tensors that the results are made of, but for what these tensors are made of;
    each node once.
    """
    stops = {x.uop: x for x in reversed(tensors)}
    reached: dict[UOp, Tensor] = {}

    def gate(u: UOp) -> bool:
        if u in stops:
            reached.setdefault(u, stops[u])
        return u.op is not Ops.DETACH and u not in stops

    UOp.sink(*[y.uop for y in results]).toposort(gate=gate, enter_calls=False)
    return list(reached.values())


def is_newer(x: Tensor, other: Tensor) -> bool:
    """Whether x was made after another tensor: tinygrad lists all that are alive."""
    for reference in reversed(all_tensors):
        if (tensor := reference()) is x or tensor is other:
            return tensor is x
    return False


def stored_since(other: Tensor) -> set[UOp]:
    """The numbers behind tensors that were made after another one, and behind none that was made
    before it.
    """
    alive = [x for x in (reference() for reference in list(all_tensors)) if x is not None]
    at = next(at for at, x in enumerate(alive) if x is other)
    old, new = (UOp.sink(*[x.uop for x in group]).toposort() for group in (alive[:at], alive[at:]))
    return {u for u in new if u.op is Ops.BUFFER and dtypes.is_float(u.dtype) and u not in old}


def reads(x: Tensor, stored: set[UOp]) -> bool:
    """Whether x is made of these numbers: tinygrad does not know what they are made of."""
    return bool(stored) and not stored.isdisjoint(_behind(x, HIDDEN))


def _behind(x: Tensor, but: str | None = None) -> list[UOp]:
    """The part of the graph of x in which a gradient may flow, but for the calls of some name."""
    is_shown = lambda u: (
        u.op is not Ops.DETACH and not (u.op is Ops.FUNCTION and but and u.arg.name == but)
    )
    return list(x.uop.toposort(gate=is_shown, enter_calls=False))
