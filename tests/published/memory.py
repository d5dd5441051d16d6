"""By how many bytes the peak memory of the process grows, for values and gradients of published
functions.
"""

import re
import sys
from pathlib import Path

import numpy as np

from cgshim import op_convert_to_numpy, op_convert_to_tensor, op_value_and_grad, ops

sys.path.append(str(Path(__file__).parents[2] / "examples" / "published"))

from linear_cross_entropy import linear_cross_entropy
from reversible import reversible


def of_linear_cross_entropy(rows):
    """For 2048 rows the logits are 32 million numbers in float32, 128 MB."""
    draw = lambda *shape: op_convert_to_tensor(
        np.random.default_rng(0).normal(size=shape), "float32"
    )
    labels = op_convert_to_tensor(np.arange(rows) % 16384)
    loss = lambda x, weight: linear_cross_entropy(x, weight, labels, chunk=128)
    return op_value_and_grad(loss, (0, 1))(draw(rows, 8), draw(16384, 8))


def of_reversible(size):
    """48 blocks, of which autodiff keeps four arrays each, of 2 MB for half a million numbers: 384
    MB.
    """
    half = lambda x, weight: ops.tanh(weight * x)
    x = op_convert_to_tensor(np.linspace(-2.0, 2.0, size), "float32")
    weights = op_convert_to_tensor(np.linspace(-1.0, 1.0, 96), "float32")
    pairs = lambda weights: [(weights[2 * at], weights[2 * at + 1]) for at in range(48)]
    loss = lambda weights: ops.sum(reversible(half, half, x, -x, pairs(weights))[0] ** 2)
    return op_value_and_grad(loss)(weights)


def peak():
    """Of this process; getrusage has the peak of the process that started this one, if it is
    higher.
    """
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


if __name__ == "__main__":
    MEASURED = [(of_linear_cross_entropy, 128, 2048), (of_reversible, 9, 2**19)]
    for fn, small, _ in MEASURED:  # what a framework sets up when it is first used is not counted
        fn(small)
    before = peak()
    for fn, _, large in MEASURED:
        _, gradients = fn(large)
        ops.tree_map(op_convert_to_numpy, gradients)
    print(peak() - before)
