"""What a rule keeps, told apart, and what another run of f must not change; floats stand for tensors."""

import collections
import functools
import random
from typing import NamedTuple

import numpy as np
import pytest

import cgshim
from cgshim import TransformationError, op_custom_gradient
from cgshim._call import Call
from cgshim._gradients import Arguments
from cgshim._registry import load
from cgshim._trees import partition_each
from cgshim.backend import Residuals, has_a_derivative, run_again

backend = load("numpy")


def called(f, *arguments):
    """A call of an op, with its inputs, its outputs and its rule."""
    inputs, specs = partition_each("op", backend, arguments)
    call = Call(Arguments("op", backend, [f"x{at}" for at in range(len(arguments))], specs, False), f, {})
    outputs, rule = call(inputs)
    return call, inputs, outputs, rule


def residuals_of(f, *arguments):
    call, inputs, outputs, rule = called(f, *arguments)
    return Residuals(call, rule, backend.is_tensor, inputs, outputs)


X, Y = np.array([1.0, 2.0]), np.array([3.0, 5.0])


class Pair(NamedTuple):
    left: object
    right: object


# --- Inputs, outputs, others ---------------------------------------------------------------------------------------


def test_each_kind_is_told_apart():
    def f(x, y):
        z, square, integers = x * y, x * x, np.array([1, 2])
        kept = [z, {"square": square}]
        return (x + y, z), lambda u: (u[1] * kept[0] * kept[1]["square"], u[0] * y * integers)

    found = residuals_of(f, X, Y)
    assert (list(found.inputs), list(found.outputs)) == ([1], [1])
    integers, square = sorted(found.others, key=lambda x: x.dtype.kind, reverse=True)
    np.testing.assert_array_equal(square, X * X)
    np.testing.assert_array_equal(integers, [1, 2])
    assert not found.rule.grad_fn.__closure__


def test_an_output_that_is_an_argument_is_an_argument():
    found = residuals_of(lambda x: (x, lambda u: u * x), X)
    assert (list(found.inputs), list(found.outputs), found.others) == ([0], [], [])


def test_an_output_that_is_returned_twice_is_the_first():
    def f(x):
        y = x * x
        return (y, y), lambda u: u[0] * y

    assert list(residuals_of(f, X).outputs) == [0]


def test_a_rule_that_is_called_with_arguments_keeps_all_of_them():
    found = residuals_of(lambda x, y: (x * y, lambda *args, upstream: (upstream, upstream)), X, Y)
    assert list(found.inputs) == [0, 1]


def test_a_rule_that_keeps_nothing():
    found = residuals_of(lambda x: (x * x, lambda u: u), X)
    assert (list(found.inputs), list(found.outputs), found.others) == ([], [], [])


KEEPERS = {
    "a closure": lambda y: lambda u: u * y,
    "a list": lambda y: (lambda kept: lambda u: u * kept[0])([y]),
    "a namedtuple": lambda y: (lambda kept: lambda u: u * kept.right)(Pair(None, y)),
    "a partial": lambda y: functools.partial(lambda y, u: u * y, y),
    "a bound method": lambda y: y.__mul__,
    "an ordered dict": lambda y: (lambda kept: lambda u: u * kept["y"])(collections.OrderedDict(y=y)),
    "a deque": lambda y: (lambda kept: lambda u: u * kept[0]["y"])(collections.deque([{"y": y}])),
    "a dict in an ordered dict": lambda y: (lambda kept: lambda u: u * kept["y"]["y"])(
        collections.OrderedDict(y={"y": y})
    ),
}
"""Where a rule may keep a tensor, with the containers that only the backend's registry knows."""


@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS.keys())
@pytest.mark.parametrize("kind", ["an input", "an output", "another"])
def test_a_rule_is_made_around_other_tensors(keep, kind):
    def f(x):
        y = x * x
        return y, keep({"an input": x, "an output": y, "another": y + 1}[kind])

    found = residuals_of(f, X)
    rule = found.around([10 * X], [100 * X], [1000 * X for _ in found.others])
    scale = {"an input": 10, "an output": 100, "another": 1000}[kind]
    np.testing.assert_array_equal(rule([X], [Y])[0][0], scale * X * Y)


def test_what_is_not_kept_may_be_none():
    found = residuals_of(lambda x, y: (x * y, lambda u: (u * y, u)), X, Y)
    rule = found.around([None, 10 * Y], [None], [])
    np.testing.assert_array_equal(rule([], [X])[0][0], 10 * X * Y)


class Holder:
    def __init__(self, held):
        self.held = held


def test_tensors_in_attributes_are_hidden():
    def f(x):
        holder, integers = Holder({"deep": [x * x]}), Holder(np.array([1, 2]))
        return x * x, lambda u: u * holder.held["deep"][0] * integers.held

    found = residuals_of(f, X)
    assert found.others == []
    (hidden,) = found.hidden()
    np.testing.assert_array_equal(hidden, X * X)
    assert residuals_of(lambda x: (x * x, lambda u: u * x), X).hidden() == []


def writing_to_an_object(holder):
    def f(x):
        holder.held = x * x
        return x * x, lambda u: u * holder.held

    return f


def reading_an_object(holder):
    return lambda x: (x * x, lambda u: u * holder.held)


def writing_in_the_rule(holder):
    def f(x):
        def grad(u):
            holder.runs = 1
            return u * holder.held

        return x * x, grad

    return f


def test_what_f_may_have_written_to_is_hidden():
    """An object that was there before is a constant, if f does not write to it."""
    constant = Holder(np.array([1.0, 2.0]))
    assert residuals_of(writing_to_an_object(constant), X).hidden()
    assert residuals_of(reading_an_object(constant), X).hidden() == []
    assert residuals_of(writing_in_the_rule(constant), X).hidden() == []


def test_integers_have_no_derivative():
    assert not has_a_derivative([np.array([1]), np.array([True])])
    assert has_a_derivative([np.array([1]), np.array([1.0])])
    assert not has_a_derivative([])


# --- Another run ---------------------------------------------------------------------------------------------------


def agree(a, b):
    return np.allclose(a, b, rtol=1e-12)


def again(f, *arguments, change=lambda: None, generators=()):
    """The others of another run of f, on the same inputs, after something has changed."""
    call, inputs, outputs, rule = called(f, *arguments)
    found = Residuals(call, rule, backend.is_tensor, inputs, outputs)
    kept = found.around(inputs, outputs, list(found.others))
    change()
    return run_again(call, [np.array(x) for x in inputs], kept, backend.is_tensor, agree, generators=generators)


def test_another_run_gives_the_others():
    (square,) = again(lambda x: (x * 2, (lambda square: lambda u: u * square)(x * x)), X)
    np.testing.assert_array_equal(square, X * X)


generator = np.random.default_rng(0)
settings = {"scale": 2.0}
runs = []

DRAWING = {
    "numpy.random": lambda: np.random.normal(),
    "a Generator": lambda: generator.normal(),
    "random": lambda: random.random(),
}


@pytest.mark.parametrize("draw", DRAWING.values(), ids=DRAWING.keys())
@pytest.mark.parametrize("size", [1.0, 0.0])
def test_a_draw_is_refused_however_small(draw, size):
    """Also where it changes nothing, for nobody can know that."""

    def f(x):
        noisy = x * x * (1 + size * draw())
        return x * 2, lambda u: u * noisy

    with pytest.raises(TransformationError) as caught:
        again(f, X)
    assert str(caught.value) == (
        "op: a second order runs f again, which must give grad_fn the same tensors, got one that draws random numbers; "
        "draw them outside, and pass them as an argument"
    )


def with_a_changed_setting(x):
    scaled = x * settings["scale"]
    return x * 2, lambda u: u * scaled


def with_a_changed_number(x):
    scale, square = settings["scale"], x * x
    return x * 2, lambda u: u * square * scale


def with_a_changed_string(x):
    name, square = f"{settings['scale']}", x * x
    return x * 2, lambda u: u * square * len(name)


def with_another_branch(x):
    square = x * x
    return x * 2, (lambda u: u * square) if settings["scale"] == 2.0 else (lambda u: u * 2 * square)


def with_fewer_tensors(x):
    kept = [x * x] * (1 if settings["scale"] > 2.0 else 2)
    return x * 2, lambda u: u * sum(kept)


def with_another_shape(x):
    kept = x * x if settings["scale"] == 2.0 else np.stack([x * x])
    return x * 2, lambda u: u * kept


def with_another_dtype(x):
    kept = (x * x).astype("float64" if settings["scale"] == 2.0 else "float32")
    return x * 2, lambda u: u * kept


def with_a_changed_array(x):
    kept, held = x * x, Holder(np.array([settings["scale"]]))
    return x * 2, lambda u: u * kept * held.held


CHANGED = [
    with_a_changed_setting, with_a_changed_number, with_a_changed_string, with_another_branch, with_fewer_tensors,
    with_another_shape, with_another_dtype, with_a_changed_array,
]  # fmt: skip


@pytest.mark.parametrize("f", CHANGED, ids=lambda f: f.__name__)
def test_what_another_run_changes_is_refused(f, monkeypatch):
    assert len(again(f, X)) >= 1
    with pytest.raises(TransformationError) as caught:
        again(f, X, change=lambda: monkeypatch.setitem(settings, "scale", 3.0))
    assert str(caught.value) == (
        "op: a second order runs f again, which must give grad_fn the same tensors, got others; "
        "compute them from the arguments alone, or pass them as an argument"
    )


def test_the_rule_that_is_kept_is_not_run(monkeypatch):
    """Another run is a run of f alone."""

    def f(x):
        square = x * x

        def grad(upstream):
            raise AssertionError("the rule ran")

        return x * 2, lambda upstream: grad(upstream) * square

    assert len(again(f, X)) == 1


def test_an_f_that_cannot_run_again_is_refused_and_its_error_is_the_cause():
    def f(x):
        runs.append(1)
        if len(runs) > 1:
            raise KeyError("the second run")
        square = x * x
        return x * 2, lambda u: u * square

    runs.clear()
    with pytest.raises(TransformationError) as caught:
        again(f, X)
    assert str(caught.value) == (
        "op: a second order runs f again, which must give grad_fn the same tensors, got a KeyError in it; "
        "compute in the framework what grad_fn keeps, or keep arguments and outputs alone"
    )
    assert str(caught.value.__cause__) == "'the second run'"


def test_an_op_is_a_function_that_holds_another():
    """A rule that keeps an op keeps what the op's f holds."""

    def f(x):
        square = x * x
        inner = op_custom_gradient(lambda v: (v * square, lambda u: u * square))
        return x * 2, lambda u: inner(u)

    found = residuals_of(f, X)
    np.testing.assert_array_equal(found.others[0], X * X)
    rule = found.around([X], [X], [10 * X])
    np.testing.assert_array_equal(rule([X], [Y])[0][0], 10 * X * Y)
    assert cgshim.op_is_tensor(X)
