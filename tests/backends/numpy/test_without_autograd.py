"""A program may call ops before autograd is imported, and differentiate them later."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEFORE = """
import functools, sys
import numpy as np
import cgshim
from cgshim import ops

X = np.array([0.3, -0.7])

@cgshim.op_custom_gradient
def op(x):
    return ops.sin(x) * w, lambda u: 5.0 * u * ops.cos(x) * w

@cgshim.op_custom_gradient
def first(xs):
    return xs["x"] * 2.0, lambda u: {"x": 7.0 * u}

def other(x):
    at = np.array([0])
    return ops.sum(ops.take(ops.index_add(x, at, x[1:]), at) * 3.0) + ops.sum(ops.special.expit(0.0 * x))

def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-12)

def scaled(weight):
    f = lambda x: (x * weight, lambda u, variables: (5.0 * u, [7.0 * u]))
    return cgshim.op_custom_gradient(f)(X[0])

w = 2.0
close(scaled(2.0), 2.0 * X[0])
close(op(X), 2.0 * np.sin(X))
close(first({"x": X}), 2.0 * X)
close(other(X), -1.2 + 1.0)
assert "autograd" not in sys.modules
from autograd import elementwise_grad, grad
assert "cgshim_numpy._primitive" not in sys.modules
"""

LATER = {
    "a plain call": "close(op(X), 2.0 * np.sin(X)); assert 'cgshim_numpy._primitive' not in sys.modules",
    "first order": "close(elementwise_grad(op)(X), 10.0 * np.cos(X))",
    "second order": "close(elementwise_grad(elementwise_grad(op))(X), -10.0 * np.sin(X))",
    "functions": "close(grad(other)(X), [3.0, 3.0])",
    "a container in a box": "close(grad(lambda xs: ops.sum(3.0 * first(xs)))({'x': X})['x'], [21.0, 21.0])",
    "cgshim's own": "close(cgshim.op_grad(lambda x: ops.sum(op(x)))(X), 10.0 * np.cos(X))",
    "a box that f closes over": "close(grad(scaled)(3.0), 7.0)",
}


@pytest.mark.parametrize("later", LATER.values(), ids=LATER.keys())
def test_what_comes_after_is_as_if_it_had_been_imported_first(later: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", BEFORE + later], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
