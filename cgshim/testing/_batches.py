"""Compare a batching rule with calls for one element after the other."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cgshim._errors import listing, refusal
from cgshim._protocol import Backend, Tensor
from cgshim._registry import name_of
from cgshim.testing._functions import Array, Function

Map = Callable[
    [Callable[..., Sequence[Tensor]], Sequence[bool], Sequence[Tensor]], Sequence[Tensor]
]
"""`vmap(fn, batched, inputs)` maps fn over the first axis of the inputs that are batched."""

SIZE = 3
"""the batch size"""


def vmap_of(backend: Backend) -> Map | None:
    """Return the backend's vmap, or cgshim's own for the framework; None if there is none."""
    return getattr(backend, "vmap", None) or _VMAPS.get(name_of(backend))


def check_batches(
    op: str, function: Function, values: Sequence[Array], random: np.random.Generator, rtol: float | None
) -> None:  # fmt: skip
    """Compare the batching rule with calls for each element.

    It compares outputs, the gradient of a batch, and the gradients of its elements: with all inputs
    batched, and then with only one.
    """
    vmap = vmap_of(function.backend)
    if vmap is None:
        return
    count = len(values)
    choices = [[True] * count, *([at == own for at in range(count)] for own in range(count))]
    for batched in choices if count > 1 else choices[:1]:
        rows = [
            [x * (1 + 0.1 * row) if has else x for x, has in zip(values, batched, strict=True)]
            for row in range(SIZE)
        ]
        inputs = [
            np.stack([row[at] for row in rows]) if has else values[at]
            for at, has in enumerate(batched)
        ]
        _Batch(op, function, vmap, batched, inputs, rows, rtol).check(random)


class _Batch:
    """A batch and its elements."""

    def __init__(
        self, op: str, function: Function, vmap: Map, batched: Sequence[bool], inputs: Sequence[Array],
        rows: Sequence[Sequence[Array]], rtol: float | None,
    ) -> None:  # fmt: skip
        self.op, self.function, self.vmap, self.batched = op, function, vmap, batched
        self.inputs, self.rows = inputs, rows
        self.rtol = np.finfo(inputs[0].dtype).eps ** (1 / 3) if rtol is None else rtol

    def check(self, random: np.random.Generator) -> None:
        """Compare the outputs and both gradients with the results for the elements."""
        of_rows = [self.function(row) for row in self.rows]
        outputs = [np.stack(each) for each in zip(*of_rows, strict=True)]
        self._compare(
            self._mapped(self.function, self.batched)(self.inputs), outputs, self.function.outputs
        )
        upstreams = [np.asarray(random.normal(size=y.shape) + 2, y.dtype) for y in outputs]
        of_rows = [
            self.function.vjp(row, [u[at] for u in upstreams]) for at, row in enumerate(self.rows)
        ]
        gradients = [np.stack(each) for each in zip(*of_rows, strict=True)]
        names = [f"the gradient of {name}" for name in self.function.inputs]
        of_batch = self._mapped(self.function, self.batched).vjp(self.inputs, upstreams)
        summed = [g if has else g.sum(0) for g, has in zip(gradients, self.batched, strict=True)]
        self._compare(of_batch, summed, names)
        flags = [*self.batched, *[True for _ in upstreams]]
        of_each = self._mapped(self.function.gradient(), flags)([*self.inputs, *upstreams])
        self._compare(of_each, gradients, [f"{name} for one element" for name in names])

    def _mapped(self, function: Function, batched: Sequence[bool]) -> Function:
        on_tensors: Any = lambda *xs: self.vmap(function.on_tensors, batched, xs)
        return Function(
            function.backend, on_tensors, function.inputs, function.outputs, (), function.run
        )

    def _compare(
        self, actual: Sequence[Array], expected: Sequence[Array], names: Sequence[str]
    ) -> None:
        for got, wanted, name in zip(actual, expected, names, strict=True):
            off = abs(got - wanted) > self.rtol * (abs(wanted) + abs(wanted).max(initial=0) + 1)
            if not off.any():
                continue
            at = tuple(map(int, np.argwhere(off)[0]))
            pairs = zip(self.function.inputs, self.batched, strict=True)
            batched = listing([x for x, has in pairs if has])
            raise refusal(AssertionError, self.op,
                          must=f"over a batch of {batched}, {name}{list(at) if at else ''} must be that of calls for "
                          "each element", got=f"{got[at]:.6g} where {wanted[at]:.6g} is expected",
                          do="fix the rule for batches")  # fmt: skip


def _jax_vmap(fn: Any, batched: Sequence[bool], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    jax = importlib.import_module("jax")
    return list(
        jax.vmap(lambda *xs: list(fn(*xs)), [0 if has else None for has in batched])(*inputs)
    )


def _torch_vmap(fn: Any, batched: Sequence[bool], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    torch = importlib.import_module("torch")
    in_dims = tuple(0 if has else None for has in batched)
    return list(torch.func.vmap(lambda *xs: tuple(fn(*xs)), in_dims)(*inputs))


def _tensorflow_vmap(
    fn: Any, batched: Sequence[bool], inputs: Sequence[Tensor]
) -> Sequence[Tensor]:
    tf = importlib.import_module("tensorflow")
    places = [at for at, has in enumerate(batched) if has]

    def of_one(elements: Sequence[Tensor]) -> list[Tensor]:
        full = dict(zip(places, elements, strict=True))
        return list(fn(*[full.get(at, x) for at, x in enumerate(inputs)]))

    return list(tf.vectorized_map(of_one, [inputs[at] for at in places]))


_VMAPS: dict[str, Map] = {"jax": _jax_vmap, "tensorflow": _tensorflow_vmap, "torch": _torch_vmap}
