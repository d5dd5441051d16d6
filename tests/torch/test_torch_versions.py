"""What depends on the version of PyTorch, beside the tests that are marked `stays_in_graph`."""

import runpy
import sys

import pytest
import torch

import cgshim_torch
from cgshim import op_custom_gradient, op_grad
from cgshim_torch._versions import limits as module
from cgshim_torch._versions import LIMITS, VERSION
from cgshim_torch._versions.private import _callback_of_its_own, frame_callback

X = torch.tensor([0.5, -1.25])


def test_the_limits_are_those_of_the_installed_version():
    assert list(LIMITS) == sorted(LIMITS)
    assert cgshim_torch.version_limits() == [
        limit for newer in LIMITS if newer > VERSION for limit in LIMITS[newer]
    ]


@pytest.mark.parametrize(
    ("version", "stays_in_graph", "gives_away_callback", "limits"),
    [("2.6.0", False, True, 4), ("2.8.0+cpu", False, False, 2), ("2.9.1", False, False, 2), ("2.10.0", False, False, 1),
     ("2.12.1", False, False, 1), ("2.13.0", True, False, 0)],
)  # fmt: skip
def test_what_each_version_cannot_do(
    monkeypatch, version, stays_in_graph, gives_away_callback, limits
):
    monkeypatch.setattr(torch, "__version__", version)
    found = runpy.run_path(module.__file__)
    assert (found["STAYS_IN_GRAPH"], found["GIVES_AWAY_CALLBACK"]) == (
        stays_in_graph,
        gives_away_callback,
    )
    assert len(found["version_limits"]()) == limits


@pytest.mark.parametrize("ask", [frame_callback, _callback_of_its_own])
def test_dynamo_has_no_callback_where_it_does_not_compile(ask):
    assert ask() is None


def test_asking_for_the_callback_gives_no_reference_away():
    before = sys.getrefcount(None)
    for _ in range(1000):
        frame_callback()
    assert abs(sys.getrefcount(None) - before) < 500


def _defaults(x, *, scale=3.0):
    def rule(upstream, *, factor=7.0):
        return factor * scale * upstream

    return scale * x, lambda upstream: rule(upstream)


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_nested_functions_with_defaults(compiler):
    """Whose attributes Dynamo hides before 2.13."""
    op = op_custom_gradient(_defaults)
    x = X.clone().requires_grad_()
    y = torch.compile(lambda x: op(x) * x.detach(), backend=compiler)(x)
    torch.testing.assert_close(
        torch.autograd.grad(y, x, torch.tensor([2.0, -3.0]))[0], torch.tensor([42.0, -63.0]) * X
    )


@pytest.mark.usefixtures("compiling")
def test_a_gradient_in_compiled_code_is_that_of_the_rule():
    """Not the zero that op_grad returned before 2.13."""
    op = op_custom_gradient(_defaults)
    derivative = torch.compile(
        lambda x: op_grad(lambda x: (op(x) * x).sum())(x), backend="aot_eager"
    )
    torch.testing.assert_close(derivative(X), 3.0 * X + 21.0 * X)
