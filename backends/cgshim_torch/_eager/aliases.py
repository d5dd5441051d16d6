"""PyTorch: the outputs of f as tensors of their own, or as views of what they show, so that
autograd guards them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cgshim.backend import Tensor


def aliases_of(
    outputs: Sequence[Tensor], detached: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return an alias of each output; detached are the inputs as f saw them.

    What shows an input, or what another output shows, is a view: autograd then forbids changes,
    which other tensors would share.
    """
    shown = _by_identity(detached, inputs)
    wholes = [y._base if y._is_view() else y for y in outputs]
    are_apart = len(set(map(id, wholes))) == len(outputs)
    seen: set[int] = set()
    aliases = []
    for y, whole in zip(outputs, wholes, strict=True):
        if id(whole) not in shown and are_apart:
            aliases.append(y.detach())
            continue
        view = _view(y, whole, shown.setdefault(id(whole), whole.detach()))
        aliases.append(view.view_as(view) if id(y) in seen else view)
        seen.add(id(y))
    return tuple(aliases)


def _by_identity(detached: Sequence[Tensor], inputs: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the inputs by the identities of what f got; torch makes an object of a subclass as a
    view.
    """
    by_id = dict(zip(map(id, detached), inputs, strict=True))
    for seen, x in zip(detached, inputs, strict=True):
        if type(seen) is not torch.Tensor and seen._base is not None:
            by_id.setdefault(id(seen._base), x)
    return by_id


def _view(output: Tensor, whole: Tensor, shown: Tensor) -> Tensor:
    """Return the view of `shown` that shows what output shows of `whole`."""
    if output is whole:
        return shown
    try:
        view = output._view_func(shown)
    except RuntimeError:  # a view of the values of a sparse or nested tensor
        view = None
    if type(view) is type(output):
        return view
    return output.detach() if output.requires_grad else output
