"""By how many bytes the peak memory of the process grows, for the value and the gradient of a published function."""

import resource
import sys
from pathlib import Path

import numpy as np

from cgshim import op_convert_to_numpy, op_convert_to_tensor, op_value_and_grad, ops

sys.path.append(str(Path(__file__).parents[2] / "examples" / "published"))

from linear_cross_entropy import linear_cross_entropy
from reversible import reversible


def of_linear_cross_entropy(rows):
    """For 8192 rows the logits are 128 million numbers in float32, 512 MB."""
    draw = lambda *shape: op_convert_to_tensor(np.random.default_rng(0).normal(size=shape), "float32")
    labels = op_convert_to_tensor(np.arange(rows) % 16384)
    loss = lambda x, weight: linear_cross_entropy(x, weight, labels, chunk=128)
    return op_value_and_grad(loss, (0, 1))(draw(rows, 8), draw(16384, 8))


def of_reversible(size):
    """48 blocks, of which autodiff keeps four arrays each, of 4 MB for a million numbers: 768 MB."""
    half = lambda x, weight: ops.tanh(weight * x)
    x = op_convert_to_tensor(np.linspace(-2.0, 2.0, size), "float32")
    weights = op_convert_to_tensor(np.linspace(-1.0, 1.0, 96), "float32")
    pairs = lambda weights: [(weights[2 * at], weights[2 * at + 1]) for at in range(48)]
    loss = lambda weights: ops.sum(reversible(half, half, x, -x, pairs(weights))[0] ** 2)
    return op_value_and_grad(loss)(weights)


def growth(fn, small, large):
    peak = lambda: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fn(small)  # what a framework sets up when it is first used is not counted
    before = peak()
    _, gradients = fn(large)
    ops.tree_map(op_convert_to_numpy, gradients)
    return peak() - before


if __name__ == "__main__":
    measured = {"linear_cross_entropy": (of_linear_cross_entropy, 128, 8192), "reversible": (of_reversible, 9, 2**20)}
    print(growth(*measured[sys.argv[1]]))
