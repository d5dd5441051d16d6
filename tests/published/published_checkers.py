"""The frameworks' own checkers of first and second derivatives."""

import functools
import importlib

import numpy as np


def check_by_autograd(op, args, order):
    check_grads = importlib.import_module("autograd.test_util").check_grads
    tuples = importlib.import_module("autograd.builtins")
    in_one_tuple = lambda *xs: (lambda y: tuples.tuple(y) if isinstance(y, tuple) else y)(op(*xs))
    check_grads(in_one_tuple, modes=["rev"], order=order)(*args)


def check_by_jax(op, args, order):
    importlib.import_module("jax.test_util").check_grads(op, args, order=order, modes=["rev"])


def check_by_torch(op, args, order):
    autograd = importlib.import_module("torch").autograd
    inputs = [x.requires_grad_() for x in args]
    assert autograd.gradcheck(op, inputs)
    assert order == 1 or autograd.gradgradcheck(op, inputs)


def check_by_tensorflow(op, args, _):
    """Of the first order: TensorFlow's checker has no other, and takes seconds for each."""
    tf = importlib.import_module("tensorflow")
    values = lambda *xs: tf.nest.flatten(op(*xs))[-1]
    for at, arg in enumerate(args):
        of_one = functools.partial(with_argument, values, args, at)
        theoretical, numerical = tf.test.compute_gradient(of_one, [arg])
        np.testing.assert_allclose(theoretical, numerical, rtol=1e-4, atol=1e-6)


def with_argument(fn, args, at, x):
    return fn(*args[:at], x, *args[at + 1 :])


OWN_CHECKERS = {
    "numpy": check_by_autograd,
    "jax": check_by_jax,
    "torch": check_by_torch,
    "tensorflow": check_by_tensorflow,
}
