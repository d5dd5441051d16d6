"""A Keras model with an op and a layer of declared variables trains alike on each backend, and as
the same model written by hand in NumPy.
"""

import functools
import importlib.util
import subprocess
import sys

import keras_digits
import pytest

from cgshim import ops


@pytest.fixture(scope="module")
def loss_by_hand():
    return keras_digits.losses_by_hand()[0]


@pytest.fixture(scope="module")
def printed():
    """What the program prints on a backend, which needs a process of its own: Keras has one backend
    in each.
    """

    @functools.cache
    def printed(backend):
        program = subprocess.run(
            [sys.executable, keras_digits.__file__, backend], capture_output=True, text=True
        )
        assert program.returncode == 0, program.stderr
        return dict(line.partition(": ")[::2] for line in program.stdout.splitlines())

    return printed


def test_the_loss_is_that_of_the_model_by_hand(backend, printed, loss_by_hand):
    assert float(printed(backend)["loss"]) == pytest.approx(loss_by_hand, abs=1e-4)


BY_AUTODIFF = {"stretched": lambda x: x, "affine": lambda x, w, b: ops.matmul(x, w) + b}


@pytest.mark.parametrize("name", BY_AUTODIFF)
def test_the_rule_matters(loss_by_hand, monkeypatch, name):
    monkeypatch.setattr(keras_digits, name, BY_AUTODIFF[name])
    assert abs(keras_digits.losses_by_hand()[0] - loss_by_hand) > 0.1


@pytest.mark.skipif(
    importlib.util.find_spec("keras") is None, reason="Keras has no place beside NumPy alone"
)
def test_a_symbolic_tensor_is_refused(backend, printed):
    assert printed(backend)["symbolic"] == (
        "cgshim: an op is called with tensors of a framework, got a symbolic KerasTensor; "
        "call the op in the call method of a keras.Layer"
    )
