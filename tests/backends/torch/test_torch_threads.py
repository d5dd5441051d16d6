"""Tensors, calls and backward passes of several threads.

On a GPU each backward pass runs in a thread of torch's own.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cgshim import op_custom_gradient


def in_another_thread(function):
    """Return what a function returns in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_a_captured_tensor_of_another_thread():
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    captured = in_another_thread(lambda: weight * 6)

    @op_custom_gradient
    def scaled(x):
        return x * captured, lambda u, variables: (u * captured, [11 * u * x])

    scaled(torch.tensor([1.0, 2.0])).sum().backward()
    assert weight.grad.tolist() == [66, 132]


def test_an_argument_of_another_thread():
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    given = in_another_thread(lambda: weight * 6)
    scale = torch.nn.Parameter(torch.tensor(5.0))
    op = op_custom_gradient(
        lambda x: (x * scale, lambda u, variables: (7 * u * scale, [11 * (u * x).sum()]))
    )
    (2 * op(given)).sum().backward()
    assert (weight.grad.tolist(), scale.grad.item()) == ([420, 420], 660)


@pytest.mark.parametrize("order", [1, 2])
def test_a_backward_pass_in_another_thread(order):
    @op_custom_gradient
    def cube(x):
        square = x * x
        return square * x, lambda u: 5 * u * square

    x = torch.tensor(3.0, requires_grad=True)
    y = cube(x)

    def derivative():
        found = y
        for _ in range(order):
            (found,) = torch.autograd.grad(found, x, create_graph=True)
        return found.item()

    assert in_another_thread(derivative) == {1: 45, 2: 30}[order]


def test_a_call_and_its_backward_pass_in_different_threads():
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))

    @op_custom_gradient
    def op(x):
        kept = x * weight
        return kept * 1, lambda u, variables: (7 * u * kept, [11 * u])

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = in_another_thread(lambda: op(x))
    of_x, of_weight = in_another_thread(
        lambda: torch.autograd.grad(y.sum(), (x, weight), create_graph=True)
    )
    assert (of_x.tolist(), of_weight.tolist()) == ([14, 42], [11, 11])
    assert torch.autograd.grad(of_x.sum(), weight)[0].tolist() == [7, 14]
