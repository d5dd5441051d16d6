"""What the examples that train have in common: scikit-learn's digits, first weights, a loss and
Adam.
"""

import importlib
from itertools import pairwise

import numpy as np
from sklearn.datasets import load_digits

from cgshim import (
    config_backend,
    op_convert_to_numpy,
    op_convert_to_tensor,
    op_exp,
    op_grad,
    op_log,
    op_max,
    op_mean,
    op_sqrt,
    op_stop_gradient,
    op_sum,
)


def digits():
    """Images of 8 x 8 grey levels from 0 to 1, as rows, and their labels: 1200 to train on, and 597
    to test.
    """
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    return (images[:1200], labels[:1200]), (images[1200:], labels[1200:])


def one_hot(labels):
    return op_convert_to_tensor(np.eye(10)[labels], "float32")


def first_weights(seed, *sizes):
    """The weights of dense layers, drawn by NumPy: the same on every backend."""
    rng = np.random.default_rng(seed)
    drawn = [rng.normal(0, rows**-0.5, (rows, columns)) for rows, columns in pairwise(sizes)]
    return [op_convert_to_tensor(weights, "float32") for weights in drawn]


def cross_entropy(logits, target):
    shifted = logits - op_stop_gradient(op_max(logits, axis=-1, keepdims=True))
    log_sum = op_log(op_sum(op_exp(shifted), axis=-1, keepdims=True))
    return op_mean(op_sum(target * (log_sum - shifted), axis=-1))


def accuracy(logits, labels):
    return float(np.mean(op_convert_to_numpy(logits).argmax(-1) == labels))


COMPILERS = {"jax": "jit", "tensorflow": "function"}


def compiled(fn):
    """fn, compiled where everybody compiles it: by jax.jit or tf.function."""
    framework = config_backend()
    compile = COMPILERS.get(framework)
    return getattr(importlib.import_module(framework), compile)(fn) if compile else fn


def adam(loss, weights, steps, rate=0.01):
    """Yield the weights after each of so many steps down the gradient of loss(weights)."""

    @compiled
    def step(weights, means, squares, size):
        gradients = op_grad(loss)(weights)
        means = [0.9 * m + 0.1 * g for m, g in zip(means, gradients, strict=True)]
        squares = [0.99 * s + 0.01 * g * g for s, g in zip(squares, gradients, strict=True)]
        moves = [size * m / (op_sqrt(s) + 1e-8) for m, s in zip(means, squares, strict=True)]
        return [w - move for w, move in zip(weights, moves, strict=True)], means, squares

    means, squares = ([0.0 * w for w in weights] for _ in range(2))
    for at in range(1, steps + 1):
        size = op_convert_to_tensor(rate * (1 - 0.99**at) ** 0.5 / (1 - 0.9**at), "float32")
        weights, means, squares = step(weights, means, squares, size)
        yield weights
