"""What the tests of the torch backend share."""

import subprocess
from contextlib import AbstractContextManager

import pytest
import torch
import torch._dynamo

from cgshim import op_custom_gradient
from cgshim_torch._versions import STAYS_IN_GRAPH

DYNAMO_WARNS = [  # seen with torch 2.13 and 2.15, November 2026, in code of torch's own
    # Dynamo makes a Function to stand for ctx
    "ignore:.*should not be instantiated:DeprecationWarning",
    # Dynamo reads .grad of what torch.autograd.grad is given
    "ignore:The .grad attribute:UserWarning",
    "ignore:`torch.jit.script",  # inductor's own imports
]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "stays_in_graph: needs a torch whose torch.compile keeps an op in its graph"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not STAYS_IN_GRAPH and item.get_closest_marker("stays_in_graph"):
            reason = "this version of torch leaves the graph at an op, and refuses fullgraph=True"
            item.add_marker(pytest.mark.xfail(reason=reason, raises=REFUSALS, strict=True))
        if "compiling" in getattr(item, "fixturenames", ()):
            for warning in DYNAMO_WARNS:
                item.add_marker(pytest.mark.filterwarnings(warning))


REFUSALS = (torch._dynamo.exc.Unsupported, subprocess.CalledProcessError)
"""what a test raises for which an op should stay in the graph: a program of its own, the second"""


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
def refuses_whole_graph():
    """A block in which Dynamo refuses a whole graph, with this reason if it had traced the op at
    all.
    """

    def block(reason: str) -> AbstractContextManager[object]:
        match = reason if STAYS_IN_GRAPH else r"cgshim.*\.py"
        return pytest.raises(torch._dynamo.exc.Unsupported, match=match)

    return block


@pytest.fixture
def fused():
    """x**4, with the first derivative as a residual, and an op in the rule that makes the second
    one 5 x.
    """

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
