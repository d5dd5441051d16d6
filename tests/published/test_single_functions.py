"""What single published functions are there for: the points at which the plain formula fails,
formats, and memory.
"""

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from float8 import E4M3, E5M2, matmul_in_float8, round_to
from focal_loss import focal_loss
from linear_cross_entropy import linear_cross_entropy
from matern import matern
from nearest_neighbours import nearest_neighbours
from published_cases import POINTS, QUERIES, in_float8, product_in_float8

from cgshim import (
    TransformationError,
    op_convert_to_numpy,
    op_convert_to_tensor,
    op_grad,
    op_vjp,
    ops,
)
from cgshim.testing import check_gradients

ALL = np.concatenate([QUERIES, POINTS])  # with the queries among them


@pytest.mark.parametrize("nu", [1.5, 2.5])
def test_the_matern_covariance_of_coinciding_points(nu):
    """For nu = 3/2 the third derivative jumps there: the differences of the second one are less
    exact.
    """
    args = [op_convert_to_tensor(x) for x in (QUERIES, ALL, np.array(0.7))]
    op = lambda x1, x2, lengthscale: matern(x1, x2, lengthscale, nu=nu)
    check_gradients(op, args, modes=["reverse"], rtol=2e-4)


def test_matern_of_coinciding_points_by_lengthscale():
    """For nu = 1/2 there is a kink, but not along the lengthscale."""
    queries, points = op_convert_to_tensor(QUERIES), op_convert_to_tensor(ALL)
    op = lambda scale: matern(queries, points, scale, nu=0.5)
    check_gradients(op, [op_convert_to_tensor(0.7, "float64")], modes=["reverse"])


def test_more_neighbours_than_there_are_points():
    points = op_convert_to_tensor(POINTS)
    message = "nearest_neighbours: k must be at most 5, the number of points, got 6"
    with pytest.raises(ValueError, match=message):
        nearest_neighbours(points, points, k=6)


@pytest.mark.parametrize("gamma", [0.5, 1.5, 2.0])
@pytest.mark.parametrize("logit", [-20.0, 10.0, 40.0, 110.0])
def test_focal_loss_of_sure_examples_in_float32(logit, gamma):
    """Where 1 - p is 0 in float32, its powers below 1 and 2 have no finite first and second
    derivative.
    """
    target = op_convert_to_tensor(1.0, "float32")
    loss = lambda x: focal_loss(x, target, gamma=gamma)
    found = [op_convert_to_numpy(fn(op_convert_to_tensor(logit, "float32")))
             for fn in (loss, op_grad(loss), op_grad(op_grad(loss)))]  # fmt: skip
    step = 1e-3
    exact = lambda x: 0.25 * np.exp(-gamma * np.logaddexp(0, x)) * np.logaddexp(0, -x)
    below, at, above = exact(logit - step), exact(logit), exact(logit + step)
    differences = [at, (above - below) / (2 * step), (above - 2 * at + below) / step**2]
    np.testing.assert_allclose(found, differences, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(E4M3, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2)]
)
def test_float8_rounds_as_the_format_does(kind, dtype):
    """Each number of the format, each middle of two neighbours, and what lies a little beside them."""
    numbers = np.arange(256, dtype="uint8").view(dtype).astype("float32")
    numbers = np.unique(numbers[np.isfinite(numbers)])
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, middles, middles * np.float32(1.001), numbers * np.float32(0.999)])
    found = op_convert_to_numpy(round_to(op_convert_to_tensor(x), *kind))
    expected = np.clip(x, numbers[0], numbers[-1]).astype(dtype).astype("float32")
    np.testing.assert_array_equal(found, expected)


def test_the_gradients_of_a_product_in_float8():
    """Its upstream gradient in e5m2, and the factors in e4m3; not those of any function."""
    upstream = np.linspace(-0.7, 1.9, 15).reshape(3, 5)
    x, weight = (op_convert_to_tensor(each.astype("float32")) for each in (QUERIES, POINTS.T))
    product, pullback = op_vjp(matmul_in_float8, x, weight)
    found = pullback(op_convert_to_tensor(upstream.astype("float32")))
    np.testing.assert_allclose(
        op_convert_to_numpy(product), product_in_float8(QUERIES, POINTS.T), rtol=1e-5
    )
    x8, weight8 = (in_float8(each, ml_dtypes.float8_e4m3fn) for each in (QUERIES, POINTS.T))
    upstream8 = in_float8(upstream, ml_dtypes.float8_e5m2)
    for gradient, expected in zip(found, (upstream8 @ weight8.T, x8.T @ upstream8), strict=True):
        np.testing.assert_allclose(op_convert_to_numpy(gradient), expected, rtol=1e-5, atol=1e-6)


WITHOUT_SECOND_ORDER = {
    "matmul_in_float8": lambda x: matmul_in_float8(x, ops.transpose(x)),
    "linear_cross_entropy": lambda x: linear_cross_entropy(x, ops.ones_like(x), ops.arange(3)),
}


@pytest.mark.parametrize("name", WITHOUT_SECOND_ORDER)
def test_a_second_order_is_refused(name):
    first = op_grad(lambda x: ops.sum(WITHOUT_SECOND_ORDER[name](x) ** 2))
    penalty = lambda x: ops.sum(first(x) ** 2)
    with pytest.raises(TransformationError, match=f"{name}: a rule that is once_differentiable"):
        op_grad(penalty)(op_convert_to_tensor(QUERIES))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_memory(backend):
    """The logits have 128 MB; two arrays for each reversible block, 192 MB.

    glibc's malloc may keep ten times what is in use, unless it asks the system for each array.
    """
    command = [sys.executable, str(Path(__file__).with_name("memory.py"))]
    environment = {**os.environ, "CGSHIM_BACKEND": backend, "MALLOC_MMAP_THRESHOLD_": "65536"}
    printed = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert int(printed) < 100e6
