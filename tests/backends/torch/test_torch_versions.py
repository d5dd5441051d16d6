"""Limits of versions of PyTorch, beside the tests that are marked `stays_in_graph`."""

import runpy

import pytest
import torch

import cgshim_torch
from cgshim import op_custom_gradient, op_grad
from cgshim_torch import _versions

X = torch.tensor([0.5, -1.25])


def test_the_limits_are_those_of_the_installed_version():
    assert list(_versions.LIMITS) == sorted(_versions.LIMITS)
    assert cgshim_torch.version_limits() == [
        limit
        for newer, limits in _versions.LIMITS.items()
        for limit in limits
        if newer > _versions.VERSION
    ]


@pytest.mark.parametrize(
    ("version", "stays_in_graph", "limits"),
    [("2.8.0+cpu", False, 2), ("2.9.1", False, 2), ("2.10.0", False, 1), ("2.12.1", False, 1), ("2.13.0", True, 0)],
)  # fmt: skip
def test_limits_of_each_version(monkeypatch, version, stays_in_graph, limits):
    monkeypatch.setattr(torch, "__version__", version)
    found = runpy.run_path(_versions.__file__)
    assert found["STAYS_IN_GRAPH"] == stays_in_graph
    assert len(found["version_limits"]()) == limits


def _defaults(x, *, scale=3.0):
    def rule(upstream, *, factor=7.0):
        return factor * scale * upstream

    return scale * x, lambda upstream: rule(upstream)


@pytest.mark.usefixtures("compiling")
def test_nested_functions_with_defaults():
    """Dynamo hides their attributes before 2.13."""
    op = op_custom_gradient(_defaults)
    x = X.clone().requires_grad_()
    y = torch.compile(lambda x: op(x) * x.detach(), backend="aot_eager")(x)
    torch.testing.assert_close(
        torch.autograd.grad(y, x, torch.tensor([2.0, -3.0]))[0], torch.tensor([42.0, -63.0]) * X
    )


@pytest.mark.usefixtures("compiling")
def test_op_grad_in_compiled_code():
    """Not the zero that op_grad returned before 2.13."""
    op = op_custom_gradient(_defaults)
    derivative = torch.compile(
        lambda x: op_grad(lambda x: (op(x) * x).sum())(x), backend="aot_eager"
    )
    torch.testing.assert_close(derivative(X), 3.0 * X + 21.0 * X)
