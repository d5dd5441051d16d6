"""PyTorch: the derivatives of what f made and its rule keeps, by another run of f when they are needed."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from cgshim.backend import Generator, refuse_another_run, run_again
from cgshim_torch._agree import agree
from cgshim_torch._graph import captured, has_values, leaf_of, now, since
from cgshim_torch._kept import Kept, Saved, is_tensor
from cgshim_torch._single import SingleLevelFunction

Tensor = Any

_NOTHING = contextlib.nullcontext()


def connected(kept: Kept, saved: Saved) -> Saved:
    """Return what was saved, with the other residuals as functions of inputs and variables, with the same values."""
    functions = _Residuals.apply(kept, saved, *saved.inputs, *saved.variables)
    others = list(saved.others)
    for at, function in zip(kept.differentiable, functions, strict=True):
        others[at] = function
    return saved._replace(others=others)


class _Residuals(SingleLevelFunction):
    """Returns aliases of the residuals, whose gradients come from another run of f."""

    @staticmethod
    def forward(ctx: Any, kept: Kept, saved: Saved, *dependencies: Tensor) -> tuple[Tensor, ...]:
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        outputs = [y.detach() for y in saved.outputs if y is not None]
        others = saved.others if kept.buffers is None else kept.buffers.without(saved.others)
        others = [*others, *_variables_beyond(kept, saved)]
        ctx.save_for_backward(*dependencies[: len(kept.devices)], *outputs, *others)
        return tuple([saved.others[at].detach() for at in kept.differentiable])

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = ctx.kept
        asked = [(at, u) for at, u in zip(kept.differentiable, upstreams, strict=True) if u is not None]
        saved = kept.apart(ctx.saved_tensors)
        return None, None, *_derivatives(kept, saved, dict(asked))


def _variables_beyond(kept: Kept, saved: Saved) -> list[Tensor]:
    """Return the variables that are saved after the residuals, because the rule does not keep them."""
    return [v for at, v in zip(kept.variables, saved.variables, strict=True) if at >= kept.others]


def _derivatives(kept: Kept, saved: Saved, upstreams: dict[int, Tensor]) -> list[Tensor | None]:
    """Return the gradients of the inputs and the variables, from those of the residuals at these places."""
    copies = [_copy(x) for x in saved.inputs]
    with torch.enable_grad():
        others = _another_run(kept, saved, copies)
    wanted = [x for x in (*copies, *saved.variables) if x.requires_grad]
    made = [(others[at], u) for at, u in upstreams.items() if others[at].requires_grad]
    if not made:
        return [None] * (len(copies) + len(saved.variables))
    gradients = iter(torch.autograd.grad(
        [tensor for tensor, _ in made], wanted, [u for _, u in made],
        create_graph=torch.is_grad_enabled(), allow_unused=True,
    ))  # fmt: skip
    return [next(gradients) if x.requires_grad else None for x in (*copies, *saved.variables)]


def _another_run(kept: Kept, saved: Saved, copies: list[Tensor]) -> list[Tensor]:
    """Return the residuals of another run of f, on copies of the inputs; raise if they differ from the first ones."""
    if kept.changed:
        _refuse_changes(kept)
    start, versions = now(), [copy._version for copy in copies]
    generators = _generators() if all(map(has_values, copies)) else []
    with _NOTHING if kept.state is None else kept.state.put_back(saved.variables):
        first = kept.residuals.around(saved.inputs, saved.outputs, saved.others)
        others: list[Tensor] = kept.as_first(
            run_again, kept.call, copies, first, is_tensor, agree, generators=generators
        )
        made = [t for at, t in enumerate(others) if t.requires_grad and at not in kept.captured]
        read = captured(kept.call, made, copies, since(start))
    if versions != [copy._version for copy in copies]:
        _refuse_changes(kept)
    if len(others) != len(saved.others):  # one was an argument this time
        refuse_another_run(kept.call, "others", "compute them from the arguments alone, or pass them as an argument")
    if not {id(v) for v in read} <= {id(leaf_of(v) if v.is_leaf else v) for v in saved.variables}:
        refuse_another_run(kept.call, "those of other variables", "read the same ones in every run")
    return others


def _refuse_changes(kept: Kept) -> None:
    refuse_another_run(kept.call, "one that changes its arguments in place", "let f change a copy")


def _copy(x: Tensor) -> Tensor:
    """Return a copy of an input for f to write into, connected with it if gradients are recorded.

    If the tensor shows an element several times, return a view: f's result depends on its layout in memory.
    """
    source = x if torch.is_grad_enabled() else x.detach()
    copy = source.clone()
    if x.layout is torch.strided and not x.is_nested and copy.stride() != x.stride():
        copy = source.view_as(source)
    return copy if copy.requires_grad else copy.requires_grad_(x.requires_grad)


def _generators() -> list[Generator]:
    """Return torch's own generators of random numbers, for each device that has been used."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized():
        found += torch.cuda.default_generators
    return [Generator(generator.get_state, generator.set_state) for generator in found]
