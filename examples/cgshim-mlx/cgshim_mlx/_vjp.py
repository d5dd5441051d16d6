"""MLX: the gradient of any function."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from cgshim.backend import Generator
from cgshim_mlx._arrays import Array, agree, all_of, is_float, spoiled


def vjp(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], /
) -> tuple[Sequence[Array], Callable[[Sequence[Array]], Sequence[Array]]]:
    """MLX's own takes the upstream gradients with the function: it runs again for each pullback, and must be the same.

    It draws the same random numbers again from the generators that everybody shares. Where its outputs are others, the
    gradients are NaN.
    """
    states = [generator.get() for generator in _SHARED]
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
        return [mx.array(y) for y in fn(*full)]  # mx.vjp wants no upstream for what stop_gradient has just made

    outputs, found = mx.vjp(fn_of_floats, [inputs[at] for at in floats], list(upstreams))
    of_floats = dict(zip(floats, found, strict=True))
    return outputs, [of_floats.get(at) for at in range(len(inputs))]


def jvp(fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], tangents: Sequence[Array], /) -> Sequence[Array]:
    _, of_outputs = mx.jvp(fn, list(inputs), list(tangents))
    return of_outputs


# --- Random numbers, which it draws again -----------------------------------------------------------------------


def _state_of_random() -> list[Any]:
    try:
        return [np.array(key) for key in mx.random.state]
    except ValueError:  # in mx.compile, a key that was made there has no value
        return [object()]


def _set_state_of_random(state: list[Any]) -> None:
    for key, value in zip(mx.random.state, state, strict=False):
        if isinstance(value, np.ndarray):
            key[...] = mx.array(value)


RANDOM = Generator(_state_of_random, _set_state_of_random)


_SHARED = [Generator(random.getstate, random.setstate), Generator(np.random.get_state, np.random.set_state), RANDOM]


@contextmanager
def _replayed(states: Sequence[Any]) -> Iterator[None]:
    """With the generators at states; afterwards they are where they were."""
    now = [generator.get() for generator in _SHARED]
    for generator, state in zip(_SHARED, states, strict=True):
        generator.set(state)
    try:
        yield
    finally:
        for generator, state in zip(_SHARED, now, strict=True):
            generator.set(state)
