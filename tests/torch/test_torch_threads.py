"""Tensors that other threads have made: autograd numbers its nodes in each thread by itself.

On a GPU each backward pass runs in a thread of torch's own.
"""

from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import pytest
import torch

from cgshim import CustomGradientTypeError, op_custom_gradient


def in_another_thread(function, nodes_before=0):
    """What a function returns in a thread of its own, which has made this many nodes before."""

    def run():
        x = torch.zeros((), requires_grad=True)
        for _ in range(nodes_before):
            x * 1
        return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def number():
    """The number of the next node of this thread."""
    return torch.autograd._get_sequence_nr()


CAPTURED = r"scaled: f must be given every tensor that is differentiated, got a captured f32\[2\]"


@pytest.mark.parametrize("ahead", [-2, -1, 0, 1, 2, 50])
@pytest.mark.parametrize("read_by", ["f", "the rule"])
def test_a_captured_tensor_of_another_thread_is_refused(read_by, ahead):
    """Its numbers may be those of f's own nodes; its leaf would get a gradient that is not its own."""
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    captured = in_another_thread(lambda: weight * 6, nodes_before=max(number() + ahead, 0))

    @op_custom_gradient
    def scaled(x):
        y = x * captured if read_by == "f" else x * 2
        return y, lambda u, variables=None: (u * captured, [u for _ in variables or ()])

    with pytest.raises(CustomGradientTypeError, match=CAPTURED):
        scaled(torch.ones(2))
    assert weight.grad is None


@pytest.mark.parametrize("ahead", [-1, 0, 1, 50])
def test_an_argument_of_another_thread(ahead):
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    given = in_another_thread(lambda: weight * 6, nodes_before=max(number() + ahead, 0))
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

    for before in (0, number(), number() + 50):
        assert in_another_thread(derivative, before) == {1: 45, 2: 30}[order]


def test_variables_of_a_call_and_its_backward_pass_in_different_threads():
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))

    @op_custom_gradient
    def op(x):
        kept = x * weight
        return kept * 1, lambda u, variables: (7 * u * kept, [11 * u])

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = in_another_thread(lambda: op(x), 7)
    of_x, of_weight = in_another_thread(
        lambda: torch.autograd.grad(y.sum(), (x, weight), create_graph=True), 3
    )
    assert (of_x.tolist(), of_weight.tolist()) == ([14, 42], [11, 11])
    assert torch.autograd.grad(of_x.sum(), weight)[0].tolist() == [7, 14]


@pytest.mark.parametrize("nodes_before", [0, 1, 10_000])
def test_what_a_rule_hides_of_the_thread_of_f(nodes_before):
    """It was made before the rule ran, whatever the thread of the backward pass has counted."""
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    for _ in range(100):
        weight * 1

    @op_custom_gradient
    def op(x):
        hidden = MappingProxyType({"kept": x * x * weight})
        return hidden["kept"] * x, lambda u, variables: (5 * u * hidden["kept"], [7 * u * x])

    x = torch.tensor([1.5, -2.0], requires_grad=True)
    y = op(x)

    def derivatives():
        (of_x,) = torch.autograd.grad(y, x, torch.tensor([3.0, 11.0]), create_graph=True)
        return of_x, *torch.autograd.grad(of_x @ torch.tensor([1.0, 2.0]), (x, weight))

    found = [t.tolist() for t in in_another_thread(derivatives, nodes_before)]
    assert found == [[67.5, 660], [90, -1320], [33.75, 440]]
