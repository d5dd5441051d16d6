"""PyTorch: buffers that a rule may write to: a moving average of gradients, a counter."""

from __future__ import annotations

import functools
import opcode
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.weak import WeakIdKeyDictionary

from cgshim.backend import describe, sentence
from cgshim_torch._graph import within_reach

if TYPE_CHECKING:
    from cgshim.backend import Call, Rule

Tensor = Any
T = TypeVar("T")


class Buffers:
    """Tensors that f holds, that do not require grad, and that its rule may write to.

    After the rule of a first call has written to them, autograd would refuse the rule of a second call. So they are
    not saved with the others: rules may write to them, and any other change raises an error, as for saved tensors.
    """

    def __init__(self, op: str, tensors: Mapping[int, Tensor]) -> None:
        """Take the tensors by their places among the residuals."""
        self._op = op
        self._tensors = tensors
        self._versions = {at: _version(tensor) for at, tensor in tensors.items()}

    def without(self, others: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the other residuals, which autograd saves."""
        return [tensor for at, tensor in enumerate(others) if at not in self._tensors]

    def among(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """Return the residuals that were saved, with the buffers in their places."""
        for at, tensor in self._tensors.items():
            if _version(tensor) != self._versions[at]:
                raise RuntimeError(
                    sentence(self._op, must="a tensor that grad_fn keeps must not be changed in place but by rules",
                             got=f"{describe(tensor)} that was", do="keep a copy of it")
                )  # fmt: skip
        rest, count = iter(saved), len(saved) + len(self._tensors)
        return [self._tensors[at] if at in self._tensors else next(rest) for at in range(count)]

    def written_by(self, rule: Callable[..., T], *args: Any) -> T:
        """Return `rule(*args)`, which may write to the buffers."""
        before = {at: tensor._version for at, tensor in self._tensors.items()}
        try:
            return rule(*args)
        finally:
            for at, tensor in self._tensors.items():
                if tensor._version != before[at]:
                    _written[tensor] = _written.get(tensor, 0) + tensor._version - before[at]


_written: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""how often rules have written to a tensor"""


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place, but not by rules."""
    return int(tensor._version) - int(_written.get(tensor, 0))


def buffers_among(call: Call, rule: Rule, others: Sequence[Tensor]) -> Buffers | None:
    """Return those of the other residuals that f holds, that do not require grad, and that the rule may write to."""
    grad_fn: Any = rule.grad_fn
    while hasattr(grad_fn, "__wrapped__"):
        grad_fn = grad_fn.__wrapped__
    code = getattr(grad_fn, "__code__", None)
    if code is None or not _writes_in_place(code):
        return None
    held = set(map(id, within_reach(call.f)))
    tensors = {at: t for at, t in enumerate(others) if id(t) in held and not t.requires_grad}
    return Buffers(call.name, tensors) if tensors else None


@functools.lru_cache(maxsize=4096)
def _writes_in_place(code: types.CodeType) -> bool:
    """Return True if code may write to a tensor that it has not made: add_, x[...] = y, out=x."""
    if any(name.endswith("_") and not name.endswith("__") for name in code.co_names):
        return True
    if opcode.opmap["STORE_SUBSCR"] in code.co_code[::2] or "out" in _keywords(code):
        return True
    return any(_writes_in_place(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))


def _keywords(code: types.CodeType) -> Iterator[Any]:
    for constant in code.co_consts:
        if isinstance(constant, tuple):
            yield from constant
