"""NumPy's functions for TensorFlow, by NumPy's names, with NumPy's parameters and numbers.

Functions that tf.experimental.numpy or TensorFlow has alike are listed. Functions that differ are
defined here. The front end defines the rest in terms of these, or raises an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import tensorflow as tf
from tensorflow.experimental import numpy as tnp

from cgshim.backend import Axis, Tensor, axes_of

Tree = Any


def numpy_function(name: str, /) -> Callable[..., Any] | None:
    if name.startswith("lax."):
        return None if tf.executing_eagerly() else _IN_GRAPHS[name]
    own = globals().get(f"np_{name.replace('.', '_')}") or _MADE.get(name)
    return own or (attrgetter(_PLACES[name])(tf) if name in _PLACES else None)


_ALIKE = """
sin cos tan arcsin arccos arctan sinh cosh tanh arcsinh arccosh arctanh exp expm1 exp2 log log1p log2 log10 sqrt
square sign negative positive reciprocal abs fabs deg2rad rad2deg signbit sinc conj real imag cbrt
logical_not logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor add subtract multiply divide
power remainder floor_divide maximum minimum less less_equal greater greater_equal equal not_equal nextafter
heaviside gcd lcm where isclose allclose array_equal any all ptp cumsum cumprod transpose
swapaxes moveaxis atleast_1d atleast_2d atleast_3d broadcast_to broadcast_arrays stack vstack hstack dstack
append ravel split hsplit vsplit repeat tile roll fliplr flipud rot90 take take_along_axis diag diagflat diagonal
trace tril triu vander dot vdot inner outer matmul tensordot einsum kron cross meshgrid polyval
ones_like full_like copy squeeze nonzero select compress
"""
_PLACES = {name: f"experimental.numpy.{name}" for name in _ALIKE.split()} | {
    "fft.fftshift": "signal.fftshift", "fft.ifftshift": "signal.ifftshift",
    "invert": "bitwise.invert", "left_shift": "bitwise.left_shift", "right_shift": "bitwise.right_shift",
    "linalg.det": "linalg.det", "linalg.inv": "linalg.inv", "linalg.cholesky": "linalg.cholesky",
    "linalg.slogdet": "linalg.slogdet", "linalg.eigvalsh": "linalg.eigvalsh", "linalg.eigh": "linalg.eigh",
    "linalg.eigvals": "linalg.eigvals", "linalg.eig": "linalg.eig", "linalg.pinv": "linalg.pinv",
    "linalg.matrix_rank": "linalg.matrix_rank", "linalg.solve_triangle": "linalg.triangular_solve",
    "special.logsumexp": "reduce_logsumexp", "top_k": "math.top_k",
    "special.erf": "math.erf", "special.erfc": "math.erfc", "special.erfinv": "math.erfinv",
    "special.gammaln": "math.lgamma", "special.digamma": "math.digamma", "special.psi": "math.digamma",
    "special.expit": "math.sigmoid", "special.xlogy": "math.xlogy", "special.xlog1py": "math.xlog1py",
    "special.ndtri": "math.ndtri", "special.zeta": "math.zeta", "special.polygamma": "math.polygamma",
    "special.betaln": "math.lbeta", "special.gammainc": "math.igamma", "special.gammaincc": "math.igammac",
    "special.betainc": "math.betainc", "special.i0": "math.special.bessel_i0", "special.i0e": "math.special.bessel_i0e",
    "relu": "nn.relu", "softplus": "math.softplus", "special.log_expit": "math.log_sigmoid",
    "special.i1": "math.special.bessel_i1", "special.i1e": "math.special.bessel_i1e", "zeros_like": "zeros_like",
    "reshape": "reshape", "unstack": "unstack", "angle": "math.angle",
}  # fmt: skip


_QUICK: dict[str, Callable[..., Tensor]] = {
    "add": tf.add, "subtract": tf.subtract, "multiply": tf.multiply, "divide": tf.divide, "maximum": tf.maximum,
    "minimum": tf.minimum, "power": tf.pow, "less": tf.less, "less_equal": tf.less_equal, "greater": tf.greater,
    "greater_equal": tf.greater_equal, "expand_dims": tf.expand_dims,
}  # fmt: skip
"""TensorFlow's own functions, which are several times as fast as tnp's, and promote no dtypes"""


def numpy_function_of(name: str, types: Sequence[Any], /) -> Callable[..., Tensor] | None:
    """Return a faster function, which raises an error for arguments that only NumPy's accepts."""
    return _QUICK.get(name)


def _of_floats(
    of: Callable[..., Tensor], otherwise: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Return a TensorFlow function of only floats, with another function for integers."""
    return lambda x: of(x) if x.dtype.is_floating else otherwise(x)


def _of_parts(
    of: Callable[..., Tensor], together: Callable[..., Tensor], of_integers: Callable[..., Tensor]
) -> Callable[[Tensor], Tensor]:
    """Apply a function of floats to the parts of complex numbers, and of_integers to integers."""
    return lambda x: (
        together(of(tf.math.real(x)), of(tf.math.imag(x)))
        if x.dtype.is_complex
        else of_integers(x, tf.bool)
    )


_OF_FLOATS = {
    "floor": (tf.floor, tf.identity), "ceil": (tf.math.ceil, tf.identity), "trunc": (tnp.fix, tf.identity),
    "rint": (tf.math.rint, lambda x: tnp.true_divide(x, 1)),
    "isnan": (tf.math.is_nan, _of_parts(tf.math.is_nan, tf.logical_or, tf.zeros_like)),
    "isinf": (tf.math.is_inf, _of_parts(tf.math.is_inf, tf.logical_or, tf.zeros_like)),
    "isfinite": (tf.math.is_finite, _of_parts(tf.math.is_finite, tf.logical_and, tf.ones_like)),
}  # fmt: skip


def _of_two_floats(of: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a TensorFlow function of only floats, for integers too."""
    return lambda x1, x2: of(tnp.true_divide(x1, 1), tnp.true_divide(x2, 1))


_OF_TWO_FLOATS = {
    "arctan2": tnp.arctan2, "hypot": tnp.hypot, "logaddexp": tnp.logaddexp, "logaddexp2": tnp.logaddexp2,
    "float_power": tnp.power,
}  # fmt: skip
_MADE: dict[str, Callable[..., Tensor]] = {
    **{name: _of_floats(*both) for name, both in _OF_FLOATS.items()},
    **{name: _of_two_floats(of) for name, of in _OF_TWO_FLOATS.items()},
}


def np_sort(
    a: Tensor, axis: int | None = -1, kind: str | None = None, *, stable: bool | None = None
) -> Tensor:
    return tf.sort(tnp.ravel(a), -1) if axis is None else tf.sort(a, axis)


def np_argsort(
    a: Tensor, axis: int | None = -1, kind: str | None = None, *, stable: bool | None = None
) -> Tensor:
    a, axis = (tnp.ravel(a), -1) if axis is None else (a, axis)
    return tf.cast(tf.argsort(a, axis, stable=True), tf.int64)


def _but_nan(of: Callable[..., Tensor], x1: Tensor, x2: Tensor) -> Tensor:
    """Choose one of two numbers; the other one where one is NaN."""
    isnan = _MADE["isnan"]
    return tnp.where(isnan(x1), x2, tnp.where(isnan(x2), x1, of(x1, x2)))


np_fmax = functools.partial(_but_nan, tnp.maximum)
np_fmin = functools.partial(_but_nan, tnp.minimum)


def np_copysign(x1: Tensor, x2: Tensor) -> Tensor:
    return tnp.where(tnp.signbit(x1) == tnp.signbit(x2), x1, -x1)


def _reduction(
    of: Callable[..., Tensor], otherwise: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return TensorFlow's own reduction of floats, which tnp wraps."""

    def reduce(
        a: Any, axis: Axis = None, *args: Any, keepdims: bool = False, **options: Any
    ) -> Tensor:
        if args or options or not (_has_dtype(a) and a.dtype.is_floating):
            return otherwise(a, axis, *args, keepdims=keepdims, **options)
        return of(a, axis, keepdims)

    return reduce


np_sum, np_prod = _reduction(tf.reduce_sum, tnp.sum), _reduction(tf.reduce_prod, tnp.prod)
np_max, np_min = _reduction(tf.reduce_max, tnp.max), _reduction(tf.reduce_min, tnp.min)
np_mean = _reduction(tf.reduce_mean, tnp.mean)


def _argument(
    of: Callable[..., Tensor], a: Tensor, axis: int | None = None, *, keepdims: bool = False
) -> Tensor:
    index = of(a, axis)
    if not keepdims:
        return index
    return tf.reshape(index, [1] * len(a.shape)) if axis is None else tf.expand_dims(index, axis)


np_argmax = functools.partial(_argument, tnp.argmax)
np_argmin = functools.partial(_argument, tnp.argmin)


# --- Shapes ---------------------------------------------------------------------------------------


def np_flip(m: Tensor, axis: Axis = None) -> Tensor:
    return tf.reverse(m, list(axes_of(m, axis)))


def np_concatenate(arrays: Sequence[Tensor], /, axis: int | None = 0) -> Tensor:
    if axis is None:
        arrays, axis = [tnp.ravel(array) for array in arrays], 0
    return tf.concat(arrays, axis) if _have_one_dtype(arrays) else tnp.concatenate(arrays, axis)


def _have_one_dtype(arrays: Sequence[Tensor]) -> bool:
    return len({getattr(array, "dtype", None) for array in arrays} | {None}) == 2


def np_stack(arrays: Sequence[Tensor], axis: int = 0) -> Tensor:
    return tf.stack(arrays, axis) if _have_one_dtype(arrays) else tnp.stack(arrays, axis)


def np_where(condition: Tensor, x: Any = None, y: Any = None) -> Any:
    own = x is not None and _have_one_dtype((x, y)) and condition.dtype == tf.bool
    return tf.where(condition, x, y) if own else tnp.where(condition, x, y)


def np_searchsorted(a: Tensor, v: Any, side: str = "left") -> Tensor:
    v = tf.convert_to_tensor(v, a.dtype)
    return tf.reshape(
        tf.searchsorted(a, tf.reshape(v, [-1]), side=side, out_type=tf.int64), tf.shape(v)
    )


def np_bincount(x: Tensor, /, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    weights = tf.ones_like(x, tf.int64) if weights is None else weights
    size = tf.maximum(tf.cast(tf.reduce_max(x) + 1, tf.int64), minlength)
    return tf.math.unsorted_segment_sum(weights, x, size)


def np_index_add(x: Tensor, index: Tensor, values: Tensor, axis: int) -> Tensor:
    x, values = tnp.moveaxis(x, axis, 0), tnp.moveaxis(values, axis, 0)
    return tnp.moveaxis(tf.tensor_scatter_nd_add(x, index[:, None], values), 0, axis)


def np_sum_to_shape(gradient: Tensor, like: Any) -> Tensor:
    """Sum to a shape with sizes that the graph does not know yet."""
    wanted = tf.shape(like) if tf.is_tensor(like) else tf.constant(like)
    _, axes = tf.raw_ops.BroadcastGradientArgs(s0=tf.shape(gradient), s1=wanted)
    return tf.reshape(tf.reduce_sum(gradient, axes), wanted)


# --- Linear algebra -------------------------------------------------------------------------------


def np_matmul(x1: Tensor, x2: Tensor) -> Tensor:
    if x1.dtype == x2.dtype and x1.dtype.is_floating and (x1.shape.rank or 0) > 1:
        if (x2.shape.rank or 0) > 1:
            return tf.matmul(x1, x2)
        if x2.shape.rank == 1:
            return tf.linalg.matvec(x1, x2)
    return tnp.matmul(x1, x2)


def np_einsum(subscripts: str, /, *operands: Tensor) -> Tensor:
    own = _have_one_dtype(operands)
    return tf.einsum(subscripts, *operands) if own else tnp.einsum(subscripts, *operands)


def np_linalg_solve(a: Tensor, b: Tensor) -> Tensor:
    right = b[:, None] if len(b.shape) == 1 else b
    if a.shape[:-2] != right.shape[:-2]:  # tf.linalg.solve does not broadcast
        stack = tf.broadcast_dynamic_shape(tf.shape(a)[:-2], tf.shape(right)[:-2])
        a, right = (tf.broadcast_to(x, tf.concat([stack, tf.shape(x)[-2:]], 0)) for x in (a, right))
    solution = tf.linalg.solve(a, right)
    return tf.squeeze(solution, -1) if len(b.shape) == 1 else solution


def np_linalg_svd(a: Tensor, full_matrices: bool = True, compute_uv: bool = True) -> Any:
    if not compute_uv:
        return tf.linalg.svd(a, compute_uv=False)
    s, u, v = tf.linalg.svd(a, full_matrices=full_matrices)
    return u, s, tf.linalg.adjoint(v)


def np_linalg_qr(a: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    if mode not in ("reduced", "complete"):
        raise NotImplementedError(f"mode={mode!r}")
    return tuple(tf.linalg.qr(a, full_matrices=mode == "complete"))


# --- For networks, by the names of jax.nn ---------------------------------------------------------


def _softmax(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, axis=-1: (
        of(x, axis) if axis is not None else tf.reshape(of(tnp.ravel(x), 0), tf.shape(x))
    )


np_softmax, np_log_softmax = _softmax(tf.nn.softmax), _softmax(tf.nn.log_softmax)


# --- New tensors: floats are float32, TensorFlow's default, unless a dtype or a tensor decides -----


def _of_shape(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda shape, dtype=None: of(shape, tf.float32 if dtype is None else dtype)


np_zeros, np_ones = _of_shape(tf.zeros), _of_shape(tf.ones)


def _of_values(made: Tensor, dtype: Any, *values: Any) -> Tensor:
    """Return tnp's result of values, with Python floats as float32 and not as tnp's float64."""
    if dtype is None and made.dtype == tf.float64:
        dtype = None if any(map(_has_dtype, tf.nest.flatten(values))) else tf.float32
    return made if dtype is None else tf.cast(made, dtype)


def _has_dtype(value: Any) -> bool:
    return hasattr(value, "dtype")


def np_asarray(a: Any, dtype: Any = None) -> Tensor:
    return _of_values(tnp.asarray(a, dtype), dtype, a)


np_array = np_asarray  # a tensor is immutable, so it needs no copy


def np_full(shape: Any, fill_value: Any, dtype: Any = None) -> Tensor:
    return _of_values(tnp.full(shape, fill_value), dtype, fill_value)


def np_arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> Tensor:
    return _of_values(tnp.arange(start, stop, step), dtype, start, stop, step)


def np_linspace(
    start: Any, stop: Any, num: int = 50, endpoint: bool = True, *, dtype: Any = None
) -> Tensor:
    return _of_values(tnp.linspace(start, stop, num, endpoint), dtype, start, stop)


# --- Fourier transforms: TensorFlow has them of complex numbers and along the last axis -----------


def _complex(a: Tensor) -> Tensor:
    return tf.cast(a, tnp.result_type(a, tnp.complex64))


def _resized(a: Tensor, n: int | None) -> Tensor:
    """Return a with its last axis cut to a length, or filled with zeros to it."""
    if n is None:
        return a
    a = a[..., :n]
    return tf.pad(a, [[0, 0]] * (len(a.shape) - 1) + [[0, n - a.shape[-1]]])


def _scaled(a: Tensor, n: int, norm: str | None, forward: bool) -> Tensor:
    """Scale as norm says; TensorFlow scales by 1/n in the inverse, which is norm "backward"."""
    power = {None: 0.0, "backward": 0.0, "ortho": 0.5, "forward": 1.0}[norm]
    return a * tf.constant(float(n) ** (-power if forward else power), a.dtype)


def _transform(of: Callable[..., Tensor], forward: bool) -> Callable[..., Tensor]:
    def transform(
        a: Tensor, n: int | None = None, axis: int = -1, norm: str | None = None
    ) -> Tensor:
        a = _resized(tnp.moveaxis(_complex(a), axis, -1), n)
        return tnp.moveaxis(_scaled(of(a), a.shape[-1], norm, forward), -1, axis)

    return transform


np_fft_fft = _transform(tf.signal.fft, True)
np_fft_ifft = _transform(tf.signal.ifft, False)


# --- Loops and branches in a graph, with jax.lax's signatures; eager mode uses Python's -----------


def _scan(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Tree,
    xs: Tree,
    steps: Any,
    reverse: bool,
    unroll: int | bool,
) -> tuple[Tree, Tree]:
    """Take the first step outside of the loop, because it shows the structure of y."""
    rows = tf.nest.flatten(xs)
    steps = tf.shape(rows[0])[0] if steps is None else steps
    place: Callable[[Any], Any] = lambda at: steps - 1 - at if reverse else at

    def taken(at: Any, carry: Tree) -> tuple[Tree, Tree]:
        x = tf.nest.map_structure(lambda x: x if x is None else x[place(at)], xs)
        return step(carry, x)

    carry, y = taken(0, carry)
    outputs = tf.nest.flatten(y)
    present = [output for output in outputs if output is not None]
    arrays = [
        tf.TensorArray(o.dtype, steps, element_shape=o.shape).write(place(0), o) for o in present
    ]

    def body(at: Tensor, arrays: list[Any], carry: Tree) -> Any:
        carry, y = taken(at, carry)
        made = [output for output in tf.nest.flatten(y) if output is not None]
        written = [array.write(place(at), o) for array, o in zip(arrays, made, strict=True)]
        return at + 1, written, carry

    _, arrays, last = tf.while_loop(
        lambda at, *_: at < steps, body, [tf.constant(1), arrays, carry]
    )
    stacked = iter([array.stack() for array in arrays])
    return last, tf.nest.pack_sequence_as(
        y, [None if output is None else next(stacked) for output in outputs]
    )


_IN_GRAPHS: dict[str, Callable[..., Any]] = {
    "lax.cond": lambda pred, true_fun, false_fun, *operands: tf.cond(
        pred, lambda: true_fun(*operands), lambda: false_fun(*operands)
    ),
    "lax.while_loop": lambda cond_fun, body, init: tf.while_loop(
        cond_fun, lambda value: [body(value)], [init]
    )[0],
    "lax.scan": _scan,
}
