"""A Keras model with an op inside trains alike on each backend, and as the same model written by hand in NumPy."""

import importlib.util
import os
import subprocess
import sys

import keras_digits
import pytest


@pytest.fixture(scope="module")
def loss_by_hand():
    return keras_digits.losses_by_hand()[0]


def test_the_loss_is_that_of_the_model_by_hand(backend, loss_by_hand):
    program = subprocess.run([sys.executable, keras_digits.__file__, backend], capture_output=True, text=True)
    assert program.returncode == 0, program.stderr
    word, loss = program.stdout.splitlines()[-1].split()
    assert word == "loss"
    assert float(loss) == pytest.approx(loss_by_hand, abs=1e-4)


def test_the_rule_matters(loss_by_hand, monkeypatch):
    monkeypatch.setattr(keras_digits, "stretched", lambda x: x)
    assert abs(keras_digits.losses_by_hand()[0] - loss_by_hand) > 0.1


SYMBOLIC = """
import keras, cgshim
op = cgshim.op_custom_gradient(lambda x: (2 * x, lambda u: 7 * u))
try:
    op(keras.Input((3,)))
except cgshim.BackendError as error:
    print(error)
"""


@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras has no place beside NumPy alone")
def test_a_symbolic_tensor_is_refused(backend):
    environment = {**os.environ, "KERAS_BACKEND": backend}
    program = subprocess.run([sys.executable, "-c", SYMBOLIC], capture_output=True, text=True, env=environment)
    assert program.stdout == (
        "cgshim: an op is called with tensors of a framework, got a symbolic KerasTensor; "
        "call the op in the call method of a keras.Layer\n"
    ), program.stderr
