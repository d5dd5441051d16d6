"""A draw from any generator that a function can reach is noticed, and undone; a function that draws nothing is not."""

import functools
import random
import types

import numpy as np
import pytest

from cgshim._generators import Drawing, Generator, generators_of

numpy_generator = np.random.default_rng(0)
python_generator = random.Random(0)
old_generator = np.random.RandomState(0)
holder = types.SimpleNamespace(generator=np.random.default_rng(0))

another_module = types.ModuleType("another_module")
another_module.generator = np.random.default_rng(0)


def helper():
    return numpy_generator.normal()


def of_a_closure(generator):
    return lambda: generator.normal()


def of_a_list(generator):
    held = [{"generator": generator}]
    return lambda: held[0]["generator"].normal()


def of_a_default_value(generator):
    def draw(generator=generator):
        return generator.normal()

    return draw


def of_a_partial(generator):
    return functools.partial(lambda generator, x: x + generator.normal(), generator, 1.0)


def of_a_global():
    return numpy_generator.normal()


class Sampler:
    def __init__(self):
        self.generator = np.random.default_rng(0)

    def draw(self):
        return self.generator.normal()

    def __call__(self):
        return self.generator.normal()


def of_a_nested_helper(generator):
    def inner():
        return generator.normal()

    def outer():
        return inner() + 1

    return lambda: outer()


DRAWING = {
    "numpy.random": lambda: np.random.normal(),
    "numpy.random, integers": lambda: np.random.randint(10),
    "random": lambda: random.random(),
    "a global Generator": lambda: numpy_generator.normal(),
    "a global RandomState": lambda: old_generator.normal(),
    "a global random.Random": lambda: python_generator.random(),
    "a global helper": lambda: helper(),
    "a comprehension": lambda: [numpy_generator.normal() for _ in range(2)],
    "a partial of a global function": functools.partial(of_a_global),
    "an attribute of a global": lambda: holder.generator.normal(),
    "another module": lambda: another_module.generator.normal(),
    "a decorated function": functools.wraps(of_a_global)(of_a_closure(np.random.default_rng(0))),
    "a closure": of_a_closure(np.random.default_rng(0)),
    "a RandomState in a closure": of_a_closure(np.random.RandomState(0)),
    "a list in a closure": of_a_list(np.random.default_rng(0)),
    "a default value": of_a_default_value(np.random.default_rng(0)),
    "a partial": of_a_partial(np.random.default_rng(0)),
    "a nested helper": of_a_nested_helper(np.random.default_rng(0)),
    "a bound method": Sampler().draw,
    "a callable object": Sampler(),
}


@pytest.mark.parametrize("f", DRAWING.values(), ids=DRAWING.keys())
def test_a_draw_is_noticed_and_undone(f):
    drawing = Drawing(generators_of(f))
    first = f()
    assert drawing.happened()
    assert f() == first


@pytest.mark.parametrize("f", DRAWING.values(), ids=DRAWING.keys())
def test_nothing_drawn_is_nothing_noticed(f):
    assert not Drawing(generators_of(f)).happened()


def test_one_that_draws_nothing():
    drawing = Drawing(generators_of(sum))
    sum([1, 2])
    assert not drawing.happened()


def test_a_frameworks_generator():
    state = [0]
    drawing = Drawing([Generator(lambda: list(state), lambda old: state.__setitem__(slice(None), old))])
    state[0] = 5
    assert drawing.happened()
    assert state == [0]


class Items(dict):
    __getattr__ = dict.__getitem__


class Whatever:
    def __getattr__(self, name):
        return lambda *args: 2.5


@pytest.mark.parametrize("config", [Items(scale=2.5), Whatever()], ids=["a dict", "whatever"])
def test_a_configuration_with_attributes_of_its_own_making(config):
    """It raises a KeyError for a name that it does not know, or has whatever it is asked for."""
    drawing = Drawing(generators_of(lambda: (config, numpy_generator.normal())))
    assert not drawing.happened()
    numpy_generator.normal()
    assert drawing.happened()
