"""Calls of NumPy's functions, written as NumPy is: each is run on NumPy itself and on the backends."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

_random = np.random.default_rng(7)
_square = _random.uniform(-1, 1, (3, 3))

ARRAYS: dict[str, Any] = {
    "a": _random.uniform(0.2, 0.9, (3, 4)),
    "b": _random.uniform(0.2, 0.9, (3, 4)),
    "n": _random.uniform(-3, 3, (3, 4)),
    "f": _random.uniform(-3, 3, (3, 4)).astype(np.float32),
    "t": _random.uniform(-2, 2, (2, 3, 4)),
    "v": _random.uniform(-2, 2, 4),
    "w": _random.uniform(-2, 2, 4),
    "p": _random.uniform(-1, 1, 3),
    "q": _random.uniform(-1, 1, 3),
    "m": _square,
    "s": _square @ _square.T + np.eye(3),
    "c": _random.uniform(-2, 2, (3, 4)) + 1j * _random.uniform(-2, 2, (3, 4)),
    "z": np.array(0.7),
    "e": np.zeros((0, 3)),
    "i": _random.integers(1, 7, (3, 4)),
    "j": _random.integers(1, 7, (3, 4)),
    "k": _random.integers(0, 3, 4),
    "h": np.array(
        [[True, False, True, True], [False, True, False, True], [True, True, False, False]]
    ),
    "o": np.array([-1.5, 0.0, 1.5]),
    "nan": np.array(
        [[1.0, np.nan, -2.0, 3.0], [np.inf, 0.5, np.nan, -np.inf], [4.0, -5.0, 6.0, 7.5]]
    ),
    "complex_nan": np.array([complex(np.nan, 1), complex(2, np.nan), complex(-np.inf, 0), 3 - 4j]),
}
"""float64 but f (float32), c and complex_nan, i, j, k (integers) and h (booleans); z is 0-d, e is empty"""


def _each(names: str, *arguments: str) -> list[str]:
    return [f"{name}({those})" for name in names.split() for those in arguments]


CALLS = [
    # elementwise
    *_each(
        "sin cos tan sinh cosh tanh arcsinh arctan exp expm1 exp2 square abs absolute sign negative positive sinc "
        "deg2rad rad2deg cbrt fabs reciprocal isnan isinf isfinite floor ceil trunc rint fix signbit real imag conj "
        "conjugate atan asinh nan_to_num",
        "n", "f", "z", "e", "t",
    ),
    *_each("arcsin arccos arctanh log log1p log2 log10 sqrt asin acos atanh", "a", "a[0]", "z", "e"),
    *_each("arccosh acosh", "a + 1.0"),
    *_each("abs sign square negative positive floor ceil trunc round real conj nan_to_num", "i"),
    *_each("sin cos exp abs square negative conj conjugate real imag angle sqrt log isnan", "c"),
    *_each("isnan isinf isfinite nan_to_num isposinf isneginf", "nan"),
    *_each("isnan isinf isfinite", "complex_nan", "i"),
    *_each("angle i0", "n", "z"),
    *_each("isreal iscomplexobj", "n", "c"),
    *_each("round around", "n", "n, 1", "10.0 * n, decimals=1", "100.0 * n, -1", "f"),
    *_each("logical_not", "h", "n"),
    *_each("invert bitwise_not bitwise_invert bitwise_count", "i"),
    *_each(
        "add subtract multiply divide true_divide maximum minimum fmax fmin arctan2 atan2 hypot equal not_equal less "
        "less_equal greater greater_equal logaddexp logaddexp2 remainder mod fmod floor_divide float_power "
        "logical_and logical_or logical_xor divmod",
        "a, b", "a, b[0]", "a, 2.5", "2.5, a", "t, b[0]", "z, b", "i, j", "f, 2.5", "e, 1.5",
    ),
    *_each("power pow", "a, b", "a, 2.5", "2.5, a", "i, j", "n, 2", "n, 3.0", "f, 2"),
    *_each("remainder mod fmod floor_divide", "n, a", "n, -a", "-i, j"),
    *_each("maximum minimum fmax fmin", "nan, a"),
    *_each("add subtract multiply divide equal not_equal", "c, c", "c, 2.0", "c, n"),
    *_each("copysign nextafter heaviside", "n, a", "n, a[0]", "n, 0.5"),
    *_each("bitwise_and bitwise_or bitwise_xor gcd lcm left_shift right_shift bitwise_left_shift", "i, j", "i, 2"),
    *_each("bitwise_right_shift", "i, j"), "ldexp(n, i)", "frexp(n)", "modf(n)", "modf(nan)", "sign(nan)",
    *_each("round", "123456780 + i, -1"),
    *_each("clip", "n, -1.0, 1.0", "n, -1, 1", "n, None, 1.0", "n, 0.5, None", "n, a_min=-1.0, a_max=1.0",
           "n, min=-1.0, max=1.0", "n, a, a + 1.0", "i, 2, 5"),
    *_each("where", "h, n, a", "h, n, 0.0", "h, 1.0, n", "h, n, v", "n > 0.0, 1, 0", "h"),
    "select([h, n > 0.0], [n, a], 0.5)", "piecewise(v, [v > 0.0], [1.0, 2.0])", "choose(i % 2, [n, a])",
    "unwrap(3.0 * v)", "unwrap(3.0 * n, axis=0)", "unwrap(2.0 * o, period=6.0)",
    *_each("interp", "v, o, p", "n, o, p", "v, [-1.5, 0.0, 1.5], p"),
    *_each("digitize", "v, o", "v, o, right=True", "v, -o", "v, -o, right=True", "v, [-1.5, 0.0, 1.5]",
           "f, [-1.5, 0.0, 1.5]"),
    *_each("isclose allclose", "n, n + 1e-9", "n, n + 1e-3", "n, n + 1e-3, atol=1e-2"),
    *_each("array_equal", "n, n", "n, a", "n, v"), *_each("array_equiv", "n, n"),
    *_each("isin", "i, k", "i, [1, 2]", "i, [1.5, 2]", "i, []"),
    # reductions
    *_each(
        "sum prod max min mean std var any all amax amin ptp count_nonzero median average nansum nanprod nanmean "
        "nanmax nanmin nanstd nanvar argmax argmin",
        "n", "f", "t", "v", "i", "z", "n, axis=0", "n, axis=-1", "t, axis=1", "n, 0", "i, axis=0",
    ),
    *_each(
        "sum prod max min mean std var any all ptp count_nonzero median average nansum nanmean nanmax nanmin nanstd "
        "nanvar argmax argmin",
        "n, keepdims=True", "t, axis=1, keepdims=True",
    ),
    *_each(
        "sum prod max min mean std var any all ptp count_nonzero median average nansum nanmean nanmax nanmin nanstd "
        "nanvar",
        "t, axis=(0, 2)", "t, axis=(0, -1), keepdims=True",
    ),
    *_each("sum", "n, axis=()"), *_each("sum prod mean", "c", "n, dtype='float32'", "i, dtype='float64'", "e, axis=0"),
    *_each("sum prod any all", "e", "h", "h, axis=0"),
    *_each("sum mean", "n, where=h"), *_each("sum max", "n, axis=0, initial=2.0"),
    *_each("std var", "c", "n, ddof=1", "n, axis=1, ddof=1", "n, axis=0, ddof=2, keepdims=True", "n, correction=1"),
    *_each("nansum nanprod nanmean nanmax nanmin nanstd nanvar nanmedian nanargmax nanargmin nancumsum",
           "nan[2]", "nan[::2, :2]", "nan[::2, :2], axis=0"),
    *_each("max min argmax argmin median sort", "nan[2]"), "median(nan[::2], axis=1)",
    *_each("std var", "n, axis=1, ddof=4", "n, axis=1, ddof=5", "e, axis=0", "e, axis=0, ddof=1"),
    *_each("nanvar nanstd", "nan", "nan, axis=1", "n, axis=1, ddof=5"), "median(nan[::2, ::3], axis=0)",
    *_each("median", "array([[inf, inf, 1.0]])", "array([[-inf, inf]])", "n, axis=()"),
    *_each("average", "n, weights=a", "n, axis=1, weights=w", "n, axis=1, weights=w, keepdims=True"),
    *_each("quantile", "n, 0.3", "n, 0.3, axis=1", "n, [0.1, 0.5], axis=0", "t, 0.8, axis=(0, 1)",
           "n, 0.3, keepdims=True", "n, 0.3, method='lower'",
           "n, [[0.1, 0.9]], axis=0"),
    *_each("percentile", "n, 30", "n, [10, 50], axis=0"),
    *_each("cumsum cumprod", "n", "t", "v", "i", "n, axis=1", "n, 0", "n, axis=0, dtype='float32'"),
    *_each("cumulative_sum cumulative_prod", "v", "n, axis=0", "v, include_initial=True"),
    *_each("diff", "n", "n, axis=0", "n, 2", "v, n=2", "n, prepend=0.0"), "ediff1d(n)",
    *_each("trapezoid", "v", "v, dx=0.5", "v, w", "n, axis=0", "n, v"), *_each("gradient", "v", "v, 0.5"),
    # order and search
    *_each("sort argsort", "n", "n, axis=0", "n, 0", "n, axis=None", "v", "i[0]", "n, kind='stable'"),
    "argsort(i, axis=1, stable=True)", "lexsort((v, w))", "partition(v, 2)", "argpartition(v, 2)", "unique(i)",
    *_each("searchsorted", "sort(v), 0.3", "sort(v), w", "sort(v), v", "sort(v), v, side='right'"),
    *_each("nonzero flatnonzero argwhere", "h"), *_each("bincount", "k", "k, weights=v", "k, minlength=6"),
    "histogram(v, o)", "unravel_index(k, (2, 3))",
    # shapes
    *_each("reshape", "n, (4, 3)", "n, -1", "n, (2, -1)", "n, [4, 3]", "n, shape=(4, 3)", "z, (1,)", "e, (3, 0)",
           "n, (4, 3), order='F'"),
    *_each("ravel", "n", "z", "n, order='F'"),
    *_each("transpose permute_dims", "t, (1, 0, 2)", "t, axes=(2, 0, 1)"), *_each("transpose", "n", "t", "v"),
    "swapaxes(t, 0, 2)", *_each("moveaxis", "t, 0, -1", "t, (0, 1), (2, 0)"), "rollaxis(t, 2)", "matrix_transpose(t)",
    *_each("expand_dims", "n, 0", "n, axis=-1", "n, (0, 2)"),
    *_each("squeeze", "n[None]", "n[None], axis=0", "n[None, :, None], axis=(0, 2)"),
    *_each("broadcast_to", "v, (3, 4)", "z, (2,)"), "broadcast_arrays(n, v)",
    *_each("atleast_1d atleast_2d atleast_3d", "z", "v", "n"),
    *_each("concatenate concat", "[n, a]", "[n, a], axis=1", "(n, a), 1", "[n, a], axis=None"),
    *_each("stack", "[n, a]", "[n, a], axis=-1", "[n, a], 1"),
    *_each("vstack hstack dstack", "[n, a]", "[v, w]"), *_each("column_stack", "[v, w]", "[v, transpose(n)]"),
    *_each("append", "n, a", "n, a, axis=0"), "block([[n, a]])",
    *_each("split", "t, 2", "t, 2, axis=2", "v, [1, 3]"), *_each("array_split", "v, 3", "n, [1], axis=1"),
    "hsplit(n, 2)", "hsplit(v, 2)", "array_split(n, 2)", "vsplit(t, 2)", *_each("unstack", "n", "n, axis=1"),
    *_each("repeat", "n, 2", "n, 2, axis=0", "v, [1, 2, 0, 1]"), *_each("tile", "n, 2", "n, (2, 1)", "v, (2, 3)"),
    *_each("roll", "n, 1", "n, 1, axis=0", "n, 1, 0", "n, (1, 2), axis=(0, 1)", "v, shift=2"),
    *_each("flip", "n", "n, axis=0", "n, 0", "t, axis=(0, 1)"), *_each("fliplr flipud", "n"),
    *_each("rot90", "n", "n, 2", "n, k=-1"),
    *_each("pad", "n, 1", "n, ((1, 0), (0, 2))", "n, 1, mode='edge'", "v, (1, 2), constant_values=3.0",
           "v, 1, constant_values=(1.0, 2.0)", "n, 1, constant_values=((1.0, 2.0), (3.0, 4.0))",
           "n, 1, mode='reflect'", "n, ((1, 1), (0, 2)), mode='symmetric'", "n, 1, mode='wrap'", "v, 1, mode='mean'"),
    *_each("take", "n, [0, 2], axis=0", "n, k, axis=1", "n, [0, 5]", "v, 1", "n, array([[0, 1], [2, 0]]), axis=0"),
    *_each("take_along_axis", "n, argsort(n, 1), axis=1", "n, argsort(n, 0), axis=0", "n, argsort(n)"),
    "delete(v, 1)", "delete(v, [0, 2])", "insert(v, 1, 5.0)",
    "compress([True, False, True], n, axis=0)", "extract(h, n)",
    *_each("diag", "p", "n", "m, 1", "p, k=1"), *_each("diagflat", "p", "p, 1"),
    *_each("diagonal", "m", "t", "t, 1", "t, axis1=1, axis2=2", "m, 1", "m, offset=-1"),
    *_each("trace", "m", "t", "m, offset=1", "t, axis1=1, axis2=2"),
    *_each("tril triu", "m", "m, 1", "m, k=-1", "t"), *_each("tri", "3", "3, 4, 1"), *_each("vander", "p", "p, 2"),
    *_each("ndim", "t", "z"), *_each("size", "t", "t, 1"), *_each("shape", "t", "z"),
    # products
    *_each("dot", "n, v", "v, w", "m, m", "t, v", "t, transpose(n)", "2.0, n"), *_each("vdot", "v, w", "n, a", "c, c"),
    *_each("inner", "v, w", "n, a"), *_each("outer", "v, w", "n, v"), *_each("kron", "m, m", "v, w"),
    *_each("matmul", "n, v", "m, m", "t, transpose(n)", "v, w", "c, v"),
    *_each("vecdot", "n, a", "c, c"), "matvec(n, v)",
    *_each("tensordot", "n, a", "n, a, axes=0", "n, transpose(n), axes=1", "n, a, axes=((0,), (0,))",
           "n, a, axes=([0, 1], [0, 1])", "t, n, axes=(-1, -1)"),
    *_each("einsum", "'ij,ij->i', n, a", "'ij,jk', n, transpose(n)", "'ii', m", "'ij->ji', n"),
    *_each("cross", "p, q", "stack([p, q]), stack([q, p + 1.0])"), "polyval(p, v)", "polyfit(v, w, 1)",
    *_each("convolve correlate", "v, w", "v, p, 'same'", "v, p, mode='valid'", "v, p, mode='full'", "p, v, 'full'"),
    *_each("cov", "n", "n, ddof=0", "n, rowvar=False", "n, ddof=4", "n, ddof=5"), "corrcoef(n)",
    *_each("meshgrid", "v, p", "v, p, indexing='ij'"), "indices((2, 3))",
    # linear algebra
    *_each("linalg.norm", "v", "n", "t", "v, 1", "n, 1", "n, axis=0", "n, ord=1, axis=1", "n, axis=1, keepdims=True",
           "v, inf", "v, 0", "v, 3", "n, 'fro'", "n, 'nuc'", "n, 2", "n, -2", "n, inf", "n, axis=(0, 1)",
           "t, ord=2, axis=(1, 2)", "t, ord=1, axis=(0, 2), keepdims=True", "c", "i"),
    *_each("linalg.vector_norm", "n", "n, axis=0", "n, axis=0, ord=1", "n, axis=0, ord=inf, keepdims=True",
           "t, axis=(0, 1), keepdims=True"),
    *_each("linalg.matrix_norm", "n", "t", "t, ord=1", "n, keepdims=True"),
    *_each("linalg.det linalg.inv linalg.slogdet linalg.matrix_rank linalg.cond linalg.svdvals", "m"),
    *_each("linalg.solve", "m, p", "m, m + 1.0", "stack([s, s, s]), s", "s, stack([s, m])"),
    *_each("linalg.cholesky", "s", "s, upper=True"),
    "linalg.eigvalsh(s)", "sort(real(linalg.eigvals(s)))", "linalg.pinv(n)",
    "matmul(*linalg.qr(n))", "shape(linalg.qr(n)[1])", "shape(linalg.qr(n[:, :2], 'complete')[0])",
    "sort(real(linalg.eig(s)[0]))",
    "(lambda l, u: matmul(u * l, matrix_transpose(u)))(*linalg.eigh(s))",
    "(lambda u, d, w: matmul(u * d, w))(*linalg.svd(n, full_matrices=False))", "linalg.svd(n, compute_uv=False)",
    "shape(linalg.svd(n)[2])", "linalg.svd(n)[1]", "linalg.lstsq(transpose(n), v)", "linalg.tensorsolve(m, p)",
    *_each("linalg.matrix_power", "m, 3", "m, -1", "m, 1", "m, 5"), "linalg.multi_dot([m, m, s])",
    *_each("linalg.outer", "v, w"), *_each("linalg.cross", "p, q", "m, s", "m, s, axis=0"),
    *_each("linalg.vecdot linalg.tensordot", "n, a"),
    *_each("linalg.matmul", "m, s"),
    *_each("linalg.matrix_transpose linalg.trace linalg.diagonal", "t[:, :, :3]", "m"),
    # Fourier transforms
    *_each("fft.fft fft.ifft", "v", "n", "c", "n, axis=0", "v, n=8", "v, 3", "v, norm='ortho'", "v, norm='forward'",
           "v, norm='backward'", "i"),
    *_each("fft.rfft", "v", "n, axis=0", "v, n=8", "v, norm='ortho'", "i"),
    *_each("fft.irfft", "c", "c, n=7", "reshape(c, (3, 2, 2)), axis=0", "c, norm='ortho'", "c, norm='backward'"),
    *_each("fft.hfft", "c"),
    *_each("fft.fft2 fft.ifft2 fft.fftn fft.ifftn", "n", "t", "n, norm='ortho'"), "fft.fftn(t, axes=(0, 1))",
    *_each("fft.rfft2 fft.rfftn", "n"), *_each("fft.irfftn fft.irfft2", "c"),
    *_each("fft.fftshift fft.ifftshift", "v", "n", "n, axes=0"), *_each("fft.fftfreq fft.rfftfreq", "8", "7, 0.5"),
    # new arrays
    *_each("zeros ones", "(2, 3)", "3", "2, dtype='int64'", "(2,), 'float32'"), "full((2,), 3.5)", "full(2, 7)",
    *_each("eye", "3", "3, 4", "3, k=1", "3, dtype='int64'"), "identity(3)",
    *_each("arange", "5", "1, 5, 2", "0.0, 1.0, 0.25", "5, dtype='float32'"),
    *_each("linspace", "0.0, 1.0, 5", "1, 3, 5, endpoint=False", "1.0, 3.0, num=4"),
    "logspace(0.0, 1.0, 4)", "geomspace(1.0, 8.0, 4)",
    *_each("zeros_like ones_like", "n", "i", "n, dtype='float32'"), *_each("full_like", "n, 2.5", "i, 2"),
    *_each("array asarray", "[1.0, 2.0]", "n", "[1, 2], dtype='float64'"), "copy(n)",
    *("astype(n, 'float32')", "astype(n, 'int32')", "asarray(n, dtype='int32')"),
    *_each("triu_indices tril_indices diag_indices", "3"), "resize(n, (2, 2))", "apply_along_axis(sum, 0, n)",
    # SciPy's special functions
    *_each("special.erf special.erfc special.expit special.gammaln special.digamma", "a", "f * f + 0.5", "z"),
    *_each("special.logit special.erfinv", "a"), *_each("special.xlogy special.xlog1py", "a, b", "e, e"),
    *_each("special.logsumexp", "n", "n, axis=0", "n, axis=1, keepdims=True", "1000.0 * n", "t, axis=(0, 1)"),
    *_each("special.gamma", "a", "o - 0.25", "o * o * o"),
    *_each("special.softmax special.log_softmax", "n", "n, axis=0", "n, axis=-1", "n, 0", "1000.0 * n, axis=1"),
    *_each("special.entr", "a", "n", "f", "z", "o", "e"),
    *_each("special.rel_entr special.kl_div", "a, b", "n, a", "a, n", "0.0 * a, b", "a, b[0]", "h, n > 0"),
    *_each("special.log_expit", "n", "f", "1000.0 * n", "z"), *_each("special.ndtr", "n", "f", "10.0 * v", "z"),
    # what networks are made of
    *_each("softmax log_softmax", "n", "f", "v", "n, axis=0", "n, 0", "t, axis=1", "1000.0 * n",
           "n, axis=None"),
    *_each("logsumexp", "n", "n, axis=0", "n, axis=1, keepdims=True", "1000.0 * n", "t, axis=(0, 1)"),
    *_each("relu", "n", "f", "o", "i", "nan[2]", "nan", "z"),
    *_each("sigmoid softplus", "n", "f", "o", "z", "1000.0 * n", "20.0 + a"),
    *_each("one_hot", "k, 3", "i, 4", "k, 3, axis=0", "i, 3, axis=1", "k, 3, dtype='float32'",
           "k, num_classes=5, dtype='int64'"),
    *_each("top_k", "v, 2", "n, 3", "t, k=1", "i, 3", "array([[1.0, 2.0, 1.0, 2.0]]), 3"),
    *_each("linalg.solve_triangular", "s, p", "s, m", "m, p, lower=True", "m, p, 'T'", "m, m, trans=1, lower=True",
           "m, p, unit_diagonal=True", "m, p, trans=1, lower=True, unit_diagonal=True",
           "c[:, :3], c[:, 3], trans=2", "c[:, :3], c, 'T'"),
]  # fmt: skip


DERIVATIVES = [
    "transpose(m, (-1, 0))", "transpose(t, (-1, 0, 1))", "repeat(n, 2, axis=-1)", "repeat(v, [1, 2, 0, 1])",
    *_each("tile", "n, 2", "t, (2, 1)", "v, (2, 3)", "n, (2, 1, 3)"), "kron(t, t)", "kron(v, n)",
    "roll(n, (1, 2), axis=(0, 1))", "diag(n)", "diag(m, -1)", "take(n, [True, False, True], axis=1)",
    *_each("where", "h, n, v", "h, z, n", "h, v, 0.0"), "special.xlogy(a, v * v)", "special.rel_entr(a, b[0])",
    *_each("linspace", "z, 2.0, 4", "m, m * m, 3", "v, 1.0, 3, endpoint=False"), "logspace(0.0, z, 3)",
    *_each("full", "(2, 3), z", "3, z"), "full_like(b, z)", "pad(b, 1, constant_values=z)", "array([z, 2.0 * z])",
    *_each("geomspace", "z, 2.0, 4"), "asarray([[z, 1.0], [z * z, z]])",
    "real((1 + 1j) * fft.rfft(n, n=4, axis=0))", "real((1 + 1j) * fft.rfft(v, norm='forward'))",
    "real((1 + 1j) * fft.rfft(n[:, :3]))", "real((1 + 1j) * fft.rfft2(n, norm='forward'))",
    *_each("fft.irfft", "v, norm='forward'", "v, norm='backward'", "n, n=4, axis=0, norm='forward'"),
    *_each("fft.irfftn", "n, norm='forward'", "n, norm='backward'"),
    *_each("std var nanstd nanvar", "n, axis=1", "n, axis=1, ddof=1"), "median(n, axis=())", "cov(n, ddof=2)",
    "quantile(n, [[0.1, 0.9]], axis=0)", "pad(n, 1, constant_values=((1.0, 2.0), (3.0, 4.0)))", "sign(n)",
]  # fmt: skip
"""more calls by whose first array of float64 is differentiated"""


def name_of(call: str) -> str:
    """The function that a call is about: the last of linalg's, fft's or special's in it, or the
    outermost.
    """
    inner = re.findall(r"(?:linalg|fft|special)\.\w+", call)
    return inner[-1] if inner else re.split(r"\W", call)[0]
