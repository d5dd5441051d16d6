"""The functions of cgshim.ops that are measured, and the programs that are written with them: each
once, for all frameworks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cgshim import op_custom_gradient, ops

BY_OPS: dict[str, Callable[..., Any]] = {
    "exp": lambda m, v: ops.exp(m),
    "add": lambda m, v: ops.add(m, v),
    "maximum": lambda m, v: ops.maximum(m, 0.0),
    "where": lambda m, v: ops.where(m > 1.0, m, v),
    "clip": lambda m, v: ops.clip(m, 0.7, 1.2),
    "power": lambda m, v: ops.power(m, 2.0),
    "sum": lambda m, v: ops.sum(m),
    "sum_of_axis": lambda m, v: ops.sum(m, axis=0),
    "mean_of_axis": lambda m, v: ops.mean(m, axis=1),
    "max_of_axis": lambda m, v: ops.max(m, axis=1, keepdims=True),
    "reshape": lambda m, v: ops.reshape(m, (16, 64)),
    "transpose": lambda m, v: ops.transpose(m),
    "expand_dims": lambda m, v: ops.expand_dims(m, 0),
    "stack": lambda m, v: ops.stack([m, m]),
    "concatenate": lambda m, v: ops.concatenate([m, m], axis=1),
    "matmul": lambda m, v: ops.matmul(m, m),
    "outer": lambda m, v: ops.outer(v, v),
    "einsum": lambda m, v: ops.einsum("ij,ij->i", m, m),
    "zeros_like": lambda m, v: ops.zeros_like(m),
    "softmax": lambda m, v: ops.softmax(m),
}
"""of a matrix of 32 rows and a vector"""


@op_custom_gradient
def log1pexp(x):
    """An activation: the softplus, as the README writes it."""
    value = ops.maximum(x, 0.0) + ops.log1p(ops.exp(-ops.abs(x)))
    return value, lambda upstream: upstream / (1.0 + ops.exp(-x))


def kalman(observations, mean, covariance, transition, seen, noise, error):
    """Return the log likelihood of observations, and the last state with its covariance."""
    likelihood = 0.0
    for at in range(observations.shape[0]):
        mean = ops.matmul(transition, mean)
        covariance = ops.matmul(ops.matmul(transition, covariance), ops.transpose(transition))
        covariance = covariance + noise
        of_seen = ops.matmul(seen, covariance)
        expected = ops.matmul(of_seen, ops.transpose(seen)) + error
        surprise = observations[at] - ops.matmul(seen, mean)
        gain = ops.transpose(ops.linalg.solve(expected, of_seen))
        weighed = ops.sum(surprise * ops.linalg.solve(expected, surprise))
        likelihood = likelihood - 0.5 * (weighed + ops.linalg.slogdet(expected)[1])
        mean = mean + ops.matmul(gain, surprise)
        covariance = covariance - ops.matmul(gain, of_seen)
    return likelihood - 0.5 * math.log(2 * math.pi) * observations.shape[0] * 2, mean, covariance


def tracked():
    """What `kalman` is given: a body in a plane, whose place is seen at 50 times."""
    times, step = 50, 0.1
    drawn = np.random.default_rng(7).normal(size=(times, 2)).cumsum(0)
    transition, seen = np.eye(4) + step * np.eye(4, k=2), np.eye(2, 4)
    arrays = (drawn, np.zeros(4), np.eye(4), transition, seen, 0.01 * np.eye(4), 0.3 * np.eye(2))
    return tuple(array.astype("float32") for array in arrays)
