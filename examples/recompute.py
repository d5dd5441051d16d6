"""Run a part of a network again in the backward pass instead of keeping its residuals.

With `--memory SIZE` it measures by how much the peak memory of the process grows, on arrays of that
size.
"""

import argparse
import re
from functools import partial
from pathlib import Path

import numpy as np

from cgshim import (
    op_convert_to_numpy,
    op_convert_to_tensor,
    op_custom_gradient,
    op_stop_gradient,
    op_sum,
    op_tanh,
    op_value_and_grad,
    op_vjp,
)


def recompute(fn, variables=None):
    """Return fn with a rule that keeps only the arguments and runs fn again.

    fn must return the same each time. variables lists the trainable tensors that it captures.
    """

    @op_custom_gradient(variables=variables)
    def recomputed(*args, **options):
        run = partial(fn, **options)

        def grad(upstream, variables=None):
            _, pullback = op_vjp(run, *args, variables=variables, as_in_rules=True)
            return pullback(upstream)

        constants = map(op_stop_gradient, args)  # so that the framework records nothing
        return run(*constants), grad

    return recomputed


def dropout(x, seed):
    """x with zeros for a tenth of its elements: the same ones each time, because they are drawn
    from a seed.
    """
    kept = np.random.default_rng(seed).random(tuple(x.shape), "float32") >= 0.1
    return x * op_convert_to_tensor(kept / np.float32(0.9), x.dtype)


runs = 0


def block(x, scale, seed):
    """Four layers, of which a plain backward pass needs every intermediate result."""
    global runs
    runs += 1
    for _ in range(4):
        x = op_tanh(scale * x)
    return dropout(x, seed)


def loss(block):
    def of(scales, x):
        for at in range(4):
            x = block(x, scales[at], seed=at)
        return op_sum(x * x)

    return of


def run(block, size):
    scales = op_convert_to_tensor([1.1, 0.9, 1.3, 0.8], "float32")
    x = op_convert_to_tensor(np.linspace(-2.0, 2.0, size), "float32")
    return [op_convert_to_numpy(result) for result in op_value_and_grad(loss(block))(scales, x)]


SPELLINGS = {"plain": block, "recomputed": recompute(block)}


def main():
    global runs
    for name, spelling in SPELLINGS.items():
        runs = 0
        value, gradient = run(spelling, 9)
        print(
            f"{name:11} loss {value:.4f}, gradient {np.round(gradient, 4)}, {runs} runs of a block"
        )


def measure_memory(size):
    # Linux alone has it; getrusage has the peak of the process that started this one, if it is
    # higher
    peak = lambda: (
        int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
    )
    for spelling in SPELLINGS.values():
        run(spelling, 9)  # what a framework sets up when it is first used is not counted
    before = peak()
    for name in ("recomputed", "plain"):  # a peak only grows: what takes less comes first
        run(SPELLINGS[name], size)
        print(
            f"{name:11} the peak grows by {peak() - before:.0f} MB, where an array has {size / 2**18:.0f} MB"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--memory",
        type=int,
        metavar="SIZE",
        help="measure the peak memory, for arrays of this size",
    )
    size = parser.parse_args().memory
    measure_memory(size) if size else main()
