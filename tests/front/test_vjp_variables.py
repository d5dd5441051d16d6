"""op_vjp by variables, where a backend differentiates only by arguments."""

import numpy as np
import pytest

from cgshim import CustomGradientTypeError, op_vjp
from cgshim._registry import load
from cgshim.testing.conformance import Framework

ARGUMENTS_ALONE = (
    "op_vjp(scaled): {} differentiates only by arguments, got 1 variable; pass them as arguments"
)


@pytest.fixture
def without_variables(backend, monkeypatch):
    """The backend of a third party that has heard of no variables."""
    monkeypatch.delattr(load(backend), "vjp_with_variables", raising=False)
    return Framework(backend)


def test_a_backend_that_differentiates_by_arguments_alone(without_variables):
    framework = without_variables
    w, x = framework.tensor(5.0), framework.tensor([1.0, 2.0])

    def scaled(x):
        return x * w

    with pytest.raises(CustomGradientTypeError) as raised:
        op_vjp(scaled, x, variables=[w])
    assert str(raised.value) == ARGUMENTS_ALONE.format(framework.name)


def test_without_variables_nothing_is_asked_of_it(without_variables):
    framework = without_variables
    _, pullback = op_vjp(lambda x: x * x, framework.tensor([1.0, 2.0]), variables=None)
    framework.check_equal(pullback(framework.tensor([2.0, -3.0])), (np.array([4.0, -12.0]),))
