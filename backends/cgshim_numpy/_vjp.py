"""Derivatives by autograd itself, and functions of its boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import autograd
import numpy as np
from autograd import numpy as autograd_numpy
from autograd.builtins import tuple as tuple_of_boxes
from autograd.extend import (
    defjvp,
    defjvp_argnums,
    defvjp,
    defvjp_argnums,
    notrace_primitive,
    primitive,
    vspace,
)

from cgshim_numpy._arrays import Array, is_box

# type checkers do not find the functions that autograd makes
anp, make_vjp, make_jvp = (
    cast(Any, of) for of in (autograd_numpy, autograd.make_vjp, autograd.make_jvp)
)
Gradients = Callable[[Sequence[Array]], Sequence[Array]]


def vjp(fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], /) -> tuple[Any, Gradients]:
    # autograd accepts no subclass of NumPy's array, such as a memmap
    floats = tuple([np.asarray(x) if isinstance(x, np.memmap) else x for x in inputs])

    pullback, (outputs, _) = make_vjp(_with_inputs(fn))(floats)
    zeros = vspace(floats).zeros()
    return list(outputs), lambda upstreams: list(pullback((tuple(upstreams), zeros)))


def jvp(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], tangents: Sequence[Array], /
) -> tuple[Sequence[Array], Sequence[Array]]:
    push = make_jvp(_with_inputs(fn))(tuple(inputs))
    (outputs, _), (of_outputs, _) = push(tuple(tangents))
    return list(outputs), list(of_outputs)


def _with_inputs(fn: Callable[..., Sequence[Array]]) -> Callable[[Any], Any]:
    """Return fn as a function of one tuple that returns its inputs as well.

    autograd warns if no output depends on the inputs, and an independent output has no tangent.
    """
    return lambda floats: tuple_of_boxes((tuple_of_boxes(tuple(fn(*floats))), floats))


def vjp_of_rules(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], /
) -> tuple[Any, Gradients]:
    """Return vjp's result, with the complex gradients that rules accept and return."""
    outputs, pullback = vjp(fn, inputs)
    return outputs, lambda upstreams: conjugated(pullback(conjugated(upstreams)))


def conjugated(xs: Sequence[Array]) -> list[Array]:
    """Return the conjugates: autograd's complex gradients are conjugates of the rules'."""
    return [anp.conj(x) if x.dtype.kind == "c" else x for x in map(as_array, xs)]


def transposed(
    fn: Callable[..., Sequence[Array]],
    inputs: Sequence[Array],
    upstreams: Sequence[Array],
    refuse: Callable[[str], NoReturn],
) -> Sequence[Array]:
    """Return the transpose of a linear function, applied to upstreams.

    The pullback of a linear function is the same at every point. It is taken at one point, and
    compared with the function's values at another, so a nonlinear function raises an error.
    """
    point = [_numbers_like(x, 3 * at) for at, x in enumerate(inputs)]
    _, pullback = vjp_of_rules(fn, point)
    gradients = pullback(upstreams)
    elsewhere = [-x * (2 + _numbers_like(x, 1 + at)) for at, x in enumerate(point)]
    of_values, of_gradients = _products(fn(*elsewhere), upstreams), _products(elsewhere, gradients)
    size = np.abs(of_values).sum() + np.abs(of_gradients).sum()
    # rounding in 16 bits is no reason to raise an error, nor is a solver that stops early
    tolerance = 1e-4 if all(x.dtype.itemsize > 2 for x in inputs) else 1e-2
    if np.abs(of_values.sum() - of_gradients.sum()) > tolerance * size:
        refuse("gradients that are not, or that autograd cannot differentiate")
    return gradients


def _numbers_like(x: Array, start: int) -> Array:
    """Return different positive numbers, or complex ones of different phases."""
    numbers = 1.5 + np.cos(start + np.arange(x.size)).reshape(x.shape)
    return (numbers * np.exp(1j * numbers) if x.dtype.kind == "c" else numbers).astype(x.dtype)


def _products(xs: Sequence[Array], ys: Sequence[Array]) -> Array:
    """Return the products whose sum is the real inner product of two vectors."""
    pairs = zip(map(value_of, xs), map(value_of, ys), strict=True)
    return np.concatenate([np.zeros(0), *[np.ravel(np.real(np.conj(x) * y)) for x, y in pairs]])


# --- Boxes ----------------------------------------------------------------------------------------


class Reads:
    """Counts the values that are read from boxes: autograd records no derivative of these."""

    count = 0


def read(x: Array) -> Array:
    Reads.count += 1
    return value_of(x)


def as_array(x: Any) -> Array:
    """Return a NumPy scalar for a Python number, which autograd would box unchanged."""
    return np.asarray(x)[()] if type(x) in (float, complex) else x


value_of: Callable[[Any], Any] = notrace_primitive(as_array)
"""returns the value in a box, below all levels of derivatives"""


def convert_to_tensor(x: Any, dtype: Any) -> Array:
    """Return a box, or a tree with boxes, as an array of this dtype."""
    if not is_box(x):
        return anp.array(x, dtype=dtype)
    if dtype is None or x.dtype == dtype:
        return x
    dtype = np.dtype(dtype)
    # autograd would differentiate a conversion to integers
    return _cast(x, dtype) if dtype.kind in "fcV" else value_of(x).astype(dtype)


_cast: Any = primitive(lambda x, dtype: as_array(x).astype(dtype))


def _cast_back(upstream: Array, dtype: Any) -> Array:
    return _cast(upstream if dtype.kind == "c" else anp.real(upstream), dtype)


defvjp(_cast, lambda ans, x, dtype: lambda upstream: _cast_back(upstream, as_array(x).dtype))
defjvp(_cast, "same")


without_derivative: Any = primitive(lambda *boxes, value, refuse: value)
"""returns a value as a function of boxes whose derivative raises an error"""
defvjp_argnums(without_derivative, lambda argnums, ans, args, kwargs: lambda g: kwargs["refuse"]())
defjvp_argnums(without_derivative, lambda argnums, gs, ans, args, kwargs: kwargs["refuse"]())
