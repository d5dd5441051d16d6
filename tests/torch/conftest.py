"""What the tests of the torch backend share."""

import pytest
import torch

from cgshim import op_custom_gradient

DYNAMO_WARNS = [  # seen with torch 2.13, November 2026, in code of torch's own
    "ignore:.*should not be instantiated:DeprecationWarning",  # Dynamo makes a Function to stand for ctx
    "ignore:The .grad attribute:UserWarning",  # Dynamo reads .grad of what torch.autograd.grad is given
    "ignore:`torch.jit.script:DeprecationWarning",  # inductor's own imports
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "compiling" in getattr(item, "fixturenames", ()):
            for warning in DYNAMO_WARNS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def _same_numbers_on_one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def compiling():
    """For a test of torch.compile: nothing is left of what the others compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def fused():
    """x**4, with the first derivative as a residual, and an op in the rule that makes the second one 5 x."""

    @op_custom_gradient
    def fused(x):
        first = 4 * x**3

        def rule(upstream):
            @op_custom_gradient
            def derivative(x):
                return first, lambda upstream: upstream * 5 * x

            return upstream * derivative(x)

        return x**4, rule

    return fused
