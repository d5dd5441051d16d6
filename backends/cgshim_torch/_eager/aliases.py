"""PyTorch: the outputs of f as tensors of their own, or as views of what they show, so that
autograd guards them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cgshim.backend import Tensor
from cgshim_torch._tensors import tree_flatten, tree_unflatten


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
    if any(y.__dict__ for y in outputs):
        seen_outside = _by_identity(detached, inputs)
        seen_outside.update(zip(map(id, outputs), aliases, strict=True))
        _hand_on_attributes(outputs, aliases, seen_outside)
    return tuple(aliases)


def _hand_on_attributes(
    outputs: Sequence[Tensor], aliases: Sequence[Tensor], seen_outside: Mapping[int, Tensor]
) -> None:
    """Give the aliases what f has set on its outputs, as code by hand returns these themselves.

    An input or an output among that is the tensor which the caller has, with its derivative.
    """
    for y, alias in zip(outputs, aliases, strict=True):
        own = vars(alias)  # a subclass has attributes
        added = {name: x for name, x in vars(y).items() if name not in own}
        if added:
            leaves, spec = tree_flatten(added)
            own.update(tree_unflatten(spec, [seen_outside.get(id(x), x) for x in leaves]))


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
