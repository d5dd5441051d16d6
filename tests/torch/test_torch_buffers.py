"""What a rule writes to: variables, containers and buffers that it shares with f, its helpers and
the caller.
"""

import pytest
import torch

from cgshim import op_custom_gradient


def leaf(*values):
    return torch.tensor(values, requires_grad=True)


# --- Variables and containers ---------------------------------------------------------------------


def _accumulator(x):
    total = 0

    def add(value):
        nonlocal total
        total = total + value

    def rule(u):
        add(5 * u)
        add(2 * u)
        return total

    return x * 2, rule


def _tape(x):
    tape = []

    def push(value):
        tape.append(value)
        return value

    y = push(x * 7) * push(x * 3)

    def rule(u):
        second, first = tape.pop(), tape.pop()
        return u * first / x + 0 * second

    return y, rule


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("f", [_accumulator, _tape])
def test_what_a_helper_and_the_rule_share(f, create_graph):
    op, x = op_custom_gradient(f), leaf(2.0)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(3 * op(x), x, create_graph=create_graph)
        assert gradient.tolist() == [21]


def _undecorated(rule):
    return rule


@pytest.mark.parametrize("decorate", [_undecorated, torch.no_grad()])
def test_what_a_rule_writes_for_its_caller(decorate):
    seen, total = {"before": torch.ones(1)}, 0.0

    def note(key, value):
        seen[key] = value

    @op_custom_gradient
    def op(x):
        kept = x * 7

        @decorate
        def rule(u):
            nonlocal total
            total = total + u.item()
            note("by a helper", u * kept)
            seen["itself"] = kept
            return u * kept

        return x * 2, rule

    x = leaf(2.0)
    for upstream in (3.0, 5.0):
        op(x).backward(torch.tensor([upstream]))
    assert (total, x.grad.item()) == (8, 112)
    assert (seen["by a helper"].item(), seen["itself"].item(), seen["before"].item()) == (70, 14, 1)


# --- Buffers --------------------------------------------------------------------------------------


class Average(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(1))


def _assign(average, u):
    average[...] = average + u


def _out(average, u):
    with torch.no_grad():  # out= is not differentiable
        torch.add(average, u, out=average.detach())


WRITES = {
    "add_": lambda average, u: average.add_(u),
    "an index": _assign,
    "out": _out,
    "mul_": lambda a, u: a.mul_(u),
}


def _in_a_cell(write):
    average = torch.ones(1)

    def f(x):
        def rule(u):
            write(average, u.detach())
            average.add_(0)
            return 7 * u

        return x * 2, rule

    return f, average


def _of_a_module(write):
    module = Average()
    module.average.add_(1)

    def f(x):
        average = module.average

        def rule(u):
            write(average, u.detach())
            average[...] = average
            return 7 * u

        return x * 2, rule

    return f, module.average


@pytest.mark.parametrize("once", [False, True], ids=["", "once_differentiable"])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("held", [_in_a_cell, _of_a_module])
def test_a_buffer_that_the_rule_writes_to(held, write, create_graph, once):
    """By hand it would not be saved with save_for_backward; two calls come before the first
    backward pass.
    """
    f, average = held(write)
    op = op_custom_gradient(f, once_differentiable=once)
    x, expected = leaf(2.0), torch.ones(1)
    y = 3 * op(x) + 5 * op(x)
    (gradient,) = torch.autograd.grad(y, x, create_graph=create_graph)
    for u in (5.0, 3.0):
        write(expected, torch.tensor([u]))
    assert (gradient.tolist(), average.tolist()) == ([56], expected.tolist())
    assert not average.requires_grad


def test_a_buffer_that_others_write_to_raises():
    average = torch.ones(1)

    @op_custom_gradient
    def smoothed(x):
        def rule(u):
            average.mul_(2)
            return 7 * u * average

        return x * 2, rule

    x = leaf(2.0)
    smoothed(x).backward()
    y = smoothed(x)
    average.add_(1)
    with pytest.raises(RuntimeError) as error:
        y.backward()
    assert str(error.value) == (
        "smoothed: a tensor that grad_fn keeps must not be changed in place but by rules, got f32[1] that was; "
        "keep a copy of it"
    )


def test_a_buffer_that_f_writes_to_between_two_rules_raises():
    average = torch.ones(1)

    @op_custom_gradient
    def op(x):
        average.add_(x.detach())
        return x * 2, lambda u: 7 * u * average

    x = leaf(2.0)
    first = op(x)
    op(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


def test_a_name_that_is_given_to_another_tensor_leads_the_rule_there():
    """As in a function by hand that reads a variable: the rule is the very function that f
    returned.
    """
    mask = torch.tensor([1.0])
    op = op_custom_gradient(lambda x: (x * 2, lambda u: 7 * u * mask))
    x = leaf(2.0)
    y = op(x)
    mask = torch.tensor([100.0])
    y.backward()
    assert x.grad.item() == 700


def test_a_second_order_beside_a_buffer():
    count = torch.zeros(1)

    @op_custom_gradient
    def cube(x):
        square = x * x

        def rule(u):
            count.add_(1)
            return u * 5 * square

        return square * x, rule

    x = leaf(2.0)
    (first,) = torch.autograd.grad(cube(x) + cube(x), x, create_graph=True)
    assert (first.item(), count.item()) == (40, 2)


def test_a_rule_that_writes_to_what_f_has_made_is_told_so():
    """As autograd tells one that writes to what it has saved, the second time."""

    @op_custom_gradient
    def op(x):
        factor = torch.full((2,), 7.0)

        def grad(u):
            gradient = u * factor
            factor.mul_(3)
            return gradient

        return x * 1, grad

    x = leaf(2.0, 3.0)
    y = op(x).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    torch.testing.assert_close(first, torch.tensor([7.0, 7.0]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x)
