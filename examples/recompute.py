"""A part of a network that keeps its arguments alone and runs again in the backward pass: time for memory.

With `--memory plain` and `--memory recomputed` it measures by how much the peak memory of the process grows.
"""

import argparse

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


def recompute(fn):
    """fn, with a rule that keeps nothing of what fn computes."""

    @op_custom_gradient
    def recomputed(*args):
        constants = map(op_stop_gradient, args)  # of which no framework records anything
        return fn(*constants), lambda upstream: op_vjp(fn, *args)[1](upstream)

    return recomputed


runs = 0


def block(x, scale):
    """Four layers, of which a plain backward pass needs every intermediate result."""
    global runs
    runs += 1
    for _ in range(4):
        x = op_tanh(scale * x)
    return x


def loss(block):
    def of(scales, x):
        for at in range(4):
            x = block(x, scales[at])
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
        print(f"{name:11} loss {value:.4f}, gradient {np.round(gradient, 4)}, {runs} runs of a block")


def measure_memory(name):
    import resource  # POSIX alone has it

    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    run(SPELLINGS[name], 9)  # what a framework sets up when it is first used is not counted
    before = peak()
    run(SPELLINGS[name], 10 * 2**20)
    print(f"{name:11} the peak grows by {peak() - before:.0f} MB, where an array has 40 MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", choices=SPELLINGS, help="measure the peak memory")
    measured = parser.parse_args().memory
    measure_memory(measured) if measured else main()
