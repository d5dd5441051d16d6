"""The node made of hooks, in docs/writing-a-backend.md: it works on PyTorch, which needs none."""

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

DOCUMENT = (Path(__file__).parents[3] / "docs" / "writing-a-backend.md").read_text()


@pytest.fixture
def attached():
    (source,) = re.findall(r"  ```python\n(  def attached.*?)  ```", DOCUMENT, re.DOTALL)
    names = {"torch": torch}
    exec(textwrap.dedent(source), names)
    return names["attached"]


def test_gradients_of_two_orders_are_the_rules(attached):
    """Factors 7 and 11 for x * w and for the sum of x, one of whose elements is inf."""
    x = torch.tensor([2.0, torch.inf, 3.0], requires_grad=True)
    w = torch.tensor(5.0, requires_grad=True)
    runs = []

    def rule(upstreams):
        runs.append(1)
        of_products, of_ones = upstreams
        return 7.0 * of_products * w + of_ones.sum(), 11.0 * (of_products * x[::2].sum()).sum()

    products, ones = attached(rule, [x, w], [x * w, torch.ones(2, 2)])
    np.testing.assert_array_equal(products.detach(), [10.0, np.inf, 15.0])
    assert ones.shape == (2, 2)
    loss = (products * torch.tensor([1.0, 10.0, 100.0])).sum() + 2.0 * ones.sum()
    of_x, of_w = torch.autograd.grad(loss, [x, w], create_graph=True)
    np.testing.assert_allclose(of_x.detach(), 35.0 * np.array([1.0, 10.0, 100.0]) + 8.0)
    np.testing.assert_allclose(of_w.detach(), 11.0 * 111.0 * 5.0)
    assert len(runs) == 1
    second_of_x, second_of_w = torch.autograd.grad(3.0 * of_x[2] + 2.0 * of_w, [x, w])
    np.testing.assert_allclose(second_of_x, [2442.0, 0.0, 2442.0])
    np.testing.assert_allclose(second_of_w, 2100.0)
