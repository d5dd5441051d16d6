"""The published functions, each with arguments and with its value by another formula, in plain
NumPy or SciPy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import scipy.integrate
import scipy.linalg
import scipy.optimize
import scipy.special
from adjoint_ode import odeint
from custom_root import custom_root, dense_solve, newton
from entmax import entmax
from fake_quantise import fake_quantise
from float8 import matmul_in_float8
from focal_loss import focal_loss
from linear_cross_entropy import linear_cross_entropy
from matern import matern
from nearest_neighbours import nearest_neighbours
from published_ops import eigh
from reversible import reversible

from cgshim import op_host, ops


@dataclass(frozen=True)
class Case:
    """An op of arrays, of which the first are differentiated."""

    op: Callable[..., Any]
    args: list[Any]
    value: Callable[..., Any]
    """what the op returns, by another formula"""
    differentiated: Sequence[int] = (0, 1, 2)
    """which of them"""
    surrogate: Callable[..., Any] | None = None
    """the function whose derivatives the op has on purpose"""
    order: int = 2
    """the highest derivative that is compared"""
    breaks_graph: bool = False
    """True if torch.compile runs a part of it uncompiled"""


SCORES = np.array([[0.5, 1.5, -2.0, 1.0], [0.25, -0.5, 0.75, 0.1]])
WEIGHTS = np.array([[0.3, -0.5, 0.2], [0.1, 0.4, -0.6], [-0.2, 0.7, 0.1]])
MATRIX = np.array([[2.0, 0.5, -0.3], [0.1, -1.0, 0.6], [0.4, 0.2, 0.5]])
BIAS, COLUMN = np.array([0.5, -1.0, 0.75]), np.array([0.2, 0.6, -0.4])
POINTS = np.array([[0.3, 1.2], [-0.7, 0.4], [1.5, -0.2], [0.1, -1.1], [-1.3, 0.9]])
QUERIES = np.array([[0.2, 0.1], [-0.9, 1.0], [1.1, 0.8]])
LABELS = np.array([0, 2, 1, 1, 0])
LOGITS, TARGETS = np.array([-3.0, -0.5, 0.25, 4.0]), np.array([0.0, 1.0, 1.0, 0.0])


# --- Values by other formulas ---------------------------------------------------------------------


def entmax_by_root(scores, alpha):
    def row(scores, alpha):
        at = lambda t: np.maximum((alpha - 1) * scores - t, 0) ** (1 / (alpha - 1))
        highest = (alpha - 1) * scores.max()
        return at(
            scipy.optimize.brentq(lambda t: at(t).sum() - 1, highest - 1, highest, xtol=1e-15)
        )

    return np.array(
        [
            row(s, a)
            for s, a in zip(scores, np.broadcast_to(alpha, (len(scores), 1))[:, 0], strict=True)
        ]
    )


def matern_by_bessel(nu):
    """The general Matern covariance, of any nu."""

    def covariance(x1, x2, lengthscale):
        a = np.sqrt(2 * nu) * np.linalg.norm(x1[:, None] - x2, axis=-1) / lengthscale
        return 2 ** (1 - nu) / scipy.special.gamma(nu) * a**nu * scipy.special.kv(nu, a)

    return covariance


def neighbours_by_sorting(queries, points):
    squares = ((queries[:, None] - points) ** 2).sum(-1)
    return np.sort(squares, axis=-1)[:, :2], squares.argsort(-1)[:, :2]


def cross_entropy_of_all_logits(x, weight, labels):
    log_p = scipy.special.log_softmax(x @ weight.T, axis=-1)
    return -log_p[np.arange(len(labels)), labels].mean()


def eigenproblem_by_scipy(matrix):
    """LAPACK's general solver, for eigenvectors whose largest element is positive."""
    values, vectors = scipy.linalg.eig((matrix + matrix.T) / 2)
    order = values.real.argsort()
    vectors = vectors[:, order].real
    return values.real[order], vectors * np.sign(
        vectors[abs(vectors).argmax(0), range(len(values))]
    )


def slope(parameters, t, y):
    weights, bias = parameters
    return ops.tanh(ops.matmul(weights, y) + t * bias)


def path_by_scipy(weights, bias, y, times):
    right = lambda t, y: np.tanh(weights @ y + t * bias)
    found = scipy.integrate.solve_ivp(
        right, (times[0], times[-1]), y, t_eval=times, rtol=1e-10, atol=1e-12
    )
    return found.y.T


def layer(x, weights):
    return ops.tanh(ops.matmul(x, weights))


def blocks_in_numpy(x1, x2, *weights):
    for a, b in zip(weights[::2], weights[1::2], strict=True):
        x1 = x1 + np.tanh(x2 @ a)
        x2 = x2 + np.tanh(x1 @ b)
    return x1, x2


def in_float8(x, dtype):
    scale = float(ml_dtypes.finfo(dtype).max) / np.abs(x).max()
    return (x * scale).astype(dtype).astype(x.dtype) / scale


def product_in_float8(x, weight):
    return in_float8(x, ml_dtypes.float8_e4m3fn) @ in_float8(weight, ml_dtypes.float8_e4m3fn)


def nearest_level(x, low, high):
    step = (high - low) / 7
    levels = (np.arange(8) - np.round(-low / step)) * step
    return levels[abs(x[..., None] - levels).argmin(-1)]


def focal_loss_by_probability(logits, targets):
    p = np.where(targets == 1, scipy.special.expit(logits), scipy.special.expit(-logits))
    return np.where(targets == 1, 0.25, 0.75) * (1 - p) ** 2 * -np.log(p)


# --- An equilibrium (Bai, Kolter and Koltun 2019): the z of z = tanh(weights z + x), by a loop in
# NumPy ---------------


def gap(parameters, z):
    weights, x = parameters
    return z - ops.tanh(ops.matmul(weights, z) + x)


@op_host(outputs=lambda weights, x, z: z)
def iterate(weights, x, z):
    for _ in range(200):
        z = np.tanh(weights @ z + x)
    return z


def equilibrium_by_scipy(weights, x, z):
    return scipy.optimize.fsolve(lambda z: z - np.tanh(weights @ z + x), z, xtol=1e-14)


# --- The surrogates of those that have other derivatives on purpose -------------------------------


def clipped(x, low, high):
    return ops.where(x < low, low + 0 * x, ops.where(x > high, high + 0 * x, x))


def weighted_product(x, weight, by):
    """`by` is the upstream gradient of the product; e5m2 has its numbers, so that scaling and
    rounding keep them.
    """
    return ops.sum(by * matmul_in_float8(x, weight))


def weighted_product_without_rounding(x, weight, by):
    """The product is linear in one factor, and the other one is in float8."""
    x8, weight8 = (in_float8(each, ml_dtypes.float8_e4m3fn) for each in (QUERIES, POINTS.T))
    return ops.sum(by * (ops.matmul(x8, weight) + ops.matmul(x, weight8)))


FIVE_BY_THREE = np.array(
    [[0.25, -1.75, 3.0, 1.0, -0.5], [2.0, 7.0, -1.0, 0.0, 5.0], [-4.0, 1.5, 0.125, 6.0, -2.5]]
)
SMALL = [[[0.5, -1.0]], [[0.25, 0.75]], [[0.3, -0.5], [0.8, 0.4]], [[-0.6, 0.2], [0.1, 0.9]],
         [[0.7, 0.1], [-0.4, -0.3]], [[0.2, -0.8], [0.5, 0.6]]]  # fmt: skip
CLIPPED = np.array([[-3.0, -0.5, 0.2], [0.7, 1.9, -0.1]])

CASES = {
    "entmax": Case(entmax, [SCORES[:1], 1.4], entmax_by_root, differentiated=(0, 1)),
    "entmax of rows": Case(
        entmax, [SCORES, [[1.3], [2.2]]], entmax_by_root, differentiated=(0, 1), order=1,
    ),
    "matern 1/2": Case(lambda *args: matern(*args, nu=0.5), [QUERIES, POINTS, 0.7], matern_by_bessel(0.5)),
    "matern 3/2": Case(lambda *args: matern(*args, nu=1.5), [QUERIES, POINTS, 0.7], matern_by_bessel(1.5)),
    "matern 5/2": Case(matern, [QUERIES, POINTS, 0.7], matern_by_bessel(2.5)),
    "nearest neighbours": Case(
        lambda queries, points: nearest_neighbours(queries, points, k=2),
        [QUERIES, POINTS], neighbours_by_sorting, differentiated=(0, 1),
    ),
    "linear cross entropy": Case(
        lambda *args: linear_cross_entropy(*args, chunk=2),
        [POINTS, QUERIES, LABELS], cross_entropy_of_all_logits, differentiated=(0, 1), order=1, breaks_graph=True,
    ),
    "custom root, by Newton": Case(
        lambda weights, x, guess: custom_root(gap, (weights, x), guess, newton, dense_solve),
        [WEIGHTS, BIAS, COLUMN], equilibrium_by_scipy, differentiated=(0, 1), order=1,
    ),
    "custom root, by an opaque solver": Case(
        lambda weights, x, guess: custom_root(
            gap, (weights, x), guess, lambda _, parameters, guess: iterate(*parameters, guess), dense_solve
        ),
        [WEIGHTS, BIAS, COLUMN], equilibrium_by_scipy, differentiated=(0, 1),
    ),
    "adjoint of a differential equation": Case(
        lambda weights, bias, y, times: odeint(slope, (weights, bias), y, times, steps=2),
        [WEIGHTS, BIAS, COLUMN, [0.0, 0.1, 0.25]], path_by_scipy, differentiated=(0, 1, 2, 3), order=1,
    ),
    "adjoint, of one step": Case(
        lambda weights, bias, y, times: odeint(slope, (weights, bias), y, times, steps=1),
        [WEIGHTS[:2, :2], BIAS[:2], COLUMN[:2], [0.0, 0.05]], path_by_scipy, differentiated=(0, 1, 2, 3),
    ),
    "reversible": Case(
        lambda x1, x2, a, b, c, d: reversible(layer, layer, x1, x2, [(a, b), (c, d)]),
        SMALL, blocks_in_numpy, differentiated=range(6),
    ),
    "float8": Case(
        weighted_product, [QUERIES, POINTS.T, FIVE_BY_THREE],
        lambda x, weight, by: (by * product_in_float8(x, weight)).sum(), differentiated=(0, 1),
        surrogate=weighted_product_without_rounding, order=1, breaks_graph=True,
    ),
    "fake quantisation": Case(
        lambda x, low, high: fake_quantise(x, low, high, bits=3), [CLIPPED, -1.0, 1.3], nearest_level,
        surrogate=clipped,
    ),
    "fake quantisation of channels": Case(
        lambda x, low, high: fake_quantise(x, low, high, bits=3), [CLIPPED, -1.0, [1.3, 2.5, 0.5]],
        lambda x, low, high: np.stack([nearest_level(x[:, at], low, high[at]) for at in range(3)], -1),
        surrogate=clipped,
    ),
    "eigh": Case(eigh, [MATRIX], eigenproblem_by_scipy, differentiated=(0,)),
    "focal loss": Case(focal_loss, [LOGITS, TARGETS], focal_loss_by_probability, differentiated=(0,)),
}  # fmt: skip
