"""PyTorch: the state of modules as f reads it, under functional_call and under vmap.

While functional_call runs, it puts other tensors in the places of a module's Parameters. They are
variables of an f that reads them, like Parameters, leaves or not. A rule runs later; for that they
are put there again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from cgshim.backend import tensors_inside
from cgshim_torch._versions.private import functorch

Tensor = Any
Edge = tuple[Any, int]
T = TypeVar("T")


def levels(tensor: Tensor) -> Iterable[Tensor]:
    """Yield a tensor, and what each transformation of torch.func has wrapped."""
    yield tensor
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
        yield tensor


class AsRead:
    """Tensors as f can read them, looked up by what a walk through the graph finds."""

    def __init__(self, f: Callable[..., Any], within_reach: Iterable[Tensor]) -> None:
        self._outermost = {id(level): tensor for tensor in within_reach for level in levels(tensor)}
        self._state = {
            (level.grad_fn, level.output_nr): put.tensor
            for put in _put_in_modules(f) for level in levels(put.tensor) if not level.is_leaf
        }  # fmt: skip

    def leaf(self, leaf: Tensor) -> Tensor | None:
        """Return what f read for a leaf, which vmap may have wrapped; None if f was not found to
        hold it.
        """
        return self._outermost.get(id(leaf))

    def state(self, edge: Edge) -> Tensor | None:
        """Return the tensor in the place of a Parameter to which an edge of the graph leads; None
        if there is none.
        """
        return self._state.get(edge)


class Put(NamedTuple):
    """A tensor in the place of a Parameter."""

    place: dict[str, Tensor]
    name: str
    tensor: Tensor


def _put_in_modules(f: Callable[..., Any]) -> list[Put]:
    """Return what functional_call has put in the modules that f holds, and is differentiated."""
    held = tensors_inside(f, lambda x: isinstance(x, torch.nn.Module))
    return [
        Put(place, name, tensor)
        for module in {id(module): module for each in held for module in each.modules()}.values()
        for place in (module._parameters, module._buffers)
        for name, tensor in place.items()
        if tensor is not None and not isinstance(tensor, torch.nn.Parameter)
        and (tensor.requires_grad or functorch.is_functorch_wrapped_tensor(tensor))
    ]  # fmt: skip


class State:
    """The places in modules of variables that are not Parameters."""

    def __init__(self, places: Sequence[tuple[dict[str, Tensor], str, int]]) -> None:
        self._places = places

    def run_with(self, variables: Sequence[Tensor], function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)`, while the modules hold these variables in their places."""
        before = [(place, name, place[name]) for place, name, _ in self._places]
        try:
            for place, name, at in self._places:
                place[name] = variables[at]
            return function(*args)
        finally:
            for place, name, tensor in before:
                place[name] = tensor


def state_of(f: Callable[..., Any], variables: Sequence[Tensor]) -> State | None:
    """Return the places of the variables that f read; None if all are Parameters, as is usual."""
    if all(isinstance(variable, torch.nn.Parameter) for variable in variables):
        return None
    at = {id(variable): place for place, variable in enumerate(variables)}
    places = [
        (put.place, put.name, at[id(put.tensor)])
        for put in _put_in_modules(f)
        if id(put.tensor) in at
    ]
    return State(places) if places else None
