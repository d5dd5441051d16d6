"""Published custom gradients have right second derivatives on every backend: against central differences."""

import functools
import importlib

import numpy as np
import pytest
from published_ops import eigh, entmax, equilibrium, neural_ode, reversible

from cgshim import use_backend
from cgshim._registry import load
from cgshim.testing import check_gradients

SCORES = [[0.5, 1.5, -2.0, 1.0], [0.25, -0.5, 0.75, 0.1]]
WEIGHTS = [[0.3, -0.5, 0.2], [0.1, 0.4, -0.6], [-0.2, 0.7, 0.1]]
COLUMN = [[0.5], [-1.0], [0.75]]
MATRIX = [[2.0, 0.5, -0.3], [0.1, -1.0, 0.6], [0.4, 0.2, 0.5]]
SMALL = ([[0.5, -1.0]], [[0.25, 0.75]], [[0.3, -0.5], [0.8, 0.4]], [[-0.6, 0.2], [0.1, 0.9]])

PUBLISHED = {
    "entmax": (entmax, [SCORES]),
    "equilibrium": (equilibrium, [WEIGHTS, COLUMN]),
    "reversible": (reversible, SMALL),
    "eigh": (eigh, [MATRIX]),
    "neural_ode": (neural_ode, [WEIGHTS, COLUMN]),
}


@pytest.mark.parametrize(("op", "args"), PUBLISHED.values(), ids=PUBLISHED.keys())
def test_published_op(backend, op, args):
    with use_backend(backend):
        check_gradients(op, _tensors(backend, args), order=2)


@pytest.mark.parametrize(("op", "args"), PUBLISHED.values(), ids=PUBLISHED.keys())
def test_the_framework_is_of_the_same_opinion(backend, op, args):
    with use_backend(backend):
        OWN_CHECKERS[backend](op, _tensors(backend, args))


def _tensors(backend, args):
    return [load(backend).convert_to_tensor(np.asarray(arg)) for arg in args]


# --- The frameworks' own checkers, of both orders -----------------------------------------------------------------


def _check_by_autograd(op, args):
    check_grads = importlib.import_module("autograd.test_util").check_grads
    tuples = importlib.import_module("autograd.builtins")
    in_one_tuple = lambda *xs: (lambda y: tuples.tuple(y) if isinstance(y, tuple) else y)(op(*xs))
    check_grads(in_one_tuple, modes=["rev"], order=2)(*args)


def _check_by_jax(op, args):
    importlib.import_module("jax.test_util").check_grads(op, args, order=2, modes=["rev"])


def _check_by_torch(op, args):
    autograd = importlib.import_module("torch").autograd
    inputs = [x.requires_grad_() for x in args]
    assert autograd.gradcheck(op, inputs)
    assert autograd.gradgradcheck(op, inputs)


def _check_by_tensorflow(op, args):
    tf = importlib.import_module("tensorflow")

    def gradients(*xs):
        with tf.GradientTape() as tape:
            tape.watch(xs)
            outputs = op(*xs)
            total = tf.add_n([tf.reduce_sum(tf.sin(y)) for y in tf.nest.flatten(outputs)])
        return tape.gradient(total, xs)

    for fn in (lambda *xs: tf.nest.flatten(op(*xs))[-1], lambda *xs: gradients(*xs)[0]):
        for at, arg in enumerate(args):
            of_one = functools.partial(_with_argument, fn, args, at)
            theoretical, numerical = tf.test.compute_gradient(of_one, [arg])
            np.testing.assert_allclose(theoretical, numerical, rtol=1e-4, atol=1e-6)


def _with_argument(fn, args, at, x):
    return fn(*args[:at], x, *args[at + 1 :])


OWN_CHECKERS = {
    "numpy": _check_by_autograd,
    "jax": _check_by_jax,
    "torch": _check_by_torch,
    "tensorflow": _check_by_tensorflow,
}
