"""MLX: the gradient of any function."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
import numpy as np

from cgshim_mlx._arrays import Array, agree, all_of, handle, is_float, spoiled
from cgshim_mlx._graph import Graph


def vjp(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], /
) -> tuple[Sequence[Array], Callable[[Sequence[Array]], Sequence[Array]]]:
    """MLX's own takes the upstream gradients with the function: it runs again for each pullback,
    and must be the same.

    It draws the same random numbers again from the generators that everybody shares. Where its
    outputs are others, the gradients are NaN.
    """
    states = _states()
    outputs = fn(*inputs)

    def pullback(upstreams: Sequence[Array]) -> list[Array]:
        with _replayed(states):
            again, gradients = pulled_back(fn, inputs, upstreams)
        ok = all_of(map(agree, again, outputs))
        return [spoiled(g, ok) for g in gradients]

    return outputs, pullback


def pulled_back(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], upstreams: Sequence[Array]
) -> tuple[Sequence[Array], list[Array | None]]:
    """fn's outputs, and a gradient for each input that is no integer."""
    floats = [at for at, x in enumerate(inputs) if is_float(x)]

    def fn_of_floats(*xs: Array) -> Sequence[Array]:
        full = list(inputs)
        for at, x in zip(floats, xs, strict=True):
            full[at] = x
        # mx.vjp wants no upstream for what stop_gradient has just made
        return [mx.array(y) for y in fn(*full)]

    outputs, found = mx.vjp(fn_of_floats, [inputs[at] for at in floats], list(upstreams))
    of_floats = dict(zip(floats, found, strict=True))
    return outputs, [of_floats.get(at) for at in range(len(inputs))]


def jvp(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], tangents: Sequence[Array], /
) -> tuple[Sequence[Array], Sequence[Array]]:
    made: list[tuple[Array, Exception]] = []
    outer = _unusable.set(made)
    try:
        outputs, of_outputs = mx.jvp(fn, list(inputs), list(tangents))
    finally:
        _unusable.reset(outer)
    for at in Graph(of_outputs, [tangent for tangent, _ in made]).inputs() if made else ():
        raise made[at][1]
    return outputs, of_outputs


def unusable(x: Array, error: Exception) -> Array:
    """The tangent of an array that has none: MLX asks for those of all that f computes, whoever
    uses them.
    """
    tangent = mx.full(x.shape, mx.nan if is_float(x) else 0, x.dtype)
    if (unusable := _unusable.get()) is not None:
        unusable.append((tangent, error))
    return tangent


_unusable: ContextVar[list[tuple[Array, Exception]] | None] = ContextVar(
    "cgshim_mlx_unusable", default=None
)
"""what `jvp` must not find in its results"""


def _states() -> tuple[Any, Any, list[Array]]:
    return random.getstate(), np.random.get_state(), [handle(key) for key in mx.random.state]


def _set_states(of_python: Any, of_numpy: Any, keys: Sequence[Array]) -> None:
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    for key, state in zip(mx.random.state, keys, strict=True):
        key[...] = state


@contextmanager
def _replayed(states: Any) -> Iterator[None]:
    """With the generators that everybody shares at states; afterwards they are where they were."""
    now = _states()
    _set_states(*states)
    try:
        yield
    finally:
        _set_states(*now)
