"""What is kept alive, and for how long: with the garbage collector off."""

import gc
import weakref

import pytest
import torch

from cgshim import op_custom_gradient


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


HELD = {
    "its output": lambda y, intermediate: y,
    "a view of it": lambda y, intermediate: y[:1],
    "an intermediate": lambda y, intermediate: intermediate,
    "both in containers": lambda y, intermediate: {"list": [y, (intermediate,)]},
}


@pytest.mark.parametrize("ending", ["dropped", "backward", "twice differentiated", "loss held"])
@pytest.mark.parametrize("held", HELD)
@pytest.mark.usefixtures("no_collector")
def test_nothing_is_kept_alive(held, ending):
    alive = []

    @op_custom_gradient
    def op(x):
        intermediate = x.exp()
        y = intermediate * 2
        alive.extend(
            [weakref.ref(y.untyped_storage()), weakref.ref(intermediate.untyped_storage())]
        )
        kept = HELD[held](y, intermediate)
        return y, lambda upstream: (kept, upstream * 7 * x)[1]

    x = torch.ones(3, requires_grad=True)
    y = op(x)
    loss = y.sum()
    if ending == "backward" or ending == "loss held":
        loss.backward()
    elif ending == "twice differentiated":
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradient.sum().backward()
        del gradient
    del y
    if ending != "loss held":
        del loss
    assert [ref() for ref in alive] == [None] * len(alive)


@pytest.mark.usefixtures("no_collector")
def test_unused_arguments_are_freed_with_the_graph():
    op = op_custom_gradient(lambda x: (x * 2, lambda upstream: upstream * 7))
    x = torch.ones(3, requires_grad=True)
    hidden = x * 1
    alive = weakref.ref(hidden)
    y = op(hidden)
    del hidden
    y.sum().backward()
    assert alive() is None


@pytest.mark.usefixtures("no_collector")
def test_the_graph_that_f_records_of_its_variable_is_not_kept():
    weight, alive = torch.nn.Parameter(torch.ones(3)), []

    @op_custom_gradient
    def op(x):
        intermediate = (x * weight).exp()
        alive.append(weakref.ref(intermediate.untyped_storage()))
        residual = intermediate.sin()
        return residual * 2, lambda u, variables: (7 * u * residual, [None])

    x = torch.ones(3, requires_grad=True)
    y = op(x)
    assert alive[0]() is None
    y.sum().backward()
    assert torch.equal(x.grad, 7 * torch.ones(3).exp().sin())


ARGUMENTS = {
    "an argument": lambda op, held: op(torch.ones(3, requires_grad=True), held),
    "a list of arguments": lambda op, held: op(torch.ones(3, requires_grad=True), [held]),
}


@pytest.mark.parametrize("give", ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.usefixtures("no_collector")
def test_arguments_that_a_rule_keeps_are_freed(give):
    """As with save_for_backward: though the graph is held."""

    @op_custom_gradient
    def op(x, held):
        factor = held if torch.is_tensor(held) else held[0]
        return x * factor, lambda u: (u * 7 * factor, None)

    held = torch.full((3,), 2.0)
    alive = weakref.ref(held)
    loss = give(op, held).sum()
    del held
    loss.backward(retain_graph=True)
    assert alive() is not None
    loss.backward()
    assert alive() is None


def test_an_option_is_there_for_every_order():
    @op_custom_gradient
    def cube(x, *, by):
        square = x * x * by
        return square * x, lambda u: u * 5 * square

    x = torch.tensor(2.0, requires_grad=True)
    y = cube(x, by=torch.tensor(3.0))
    (first,) = torch.autograd.grad(y, x, create_graph=True, retain_graph=False)
    (second,) = torch.autograd.grad(first, x, create_graph=True)
    assert [first.item(), second.item(), torch.autograd.grad(second, x)[0].item()] == [60, 60, 30]
