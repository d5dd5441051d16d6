"""What counts as the same after another run of a function: floats stand for tensors where a test needs some."""

import dataclasses
import functools
import types

import numpy as np
import pytest

from cgshim._same import same


def no_tensors(a, b):
    return None


def nearly(a, b):
    """Floats are the tensors here: the same but for a rounding error."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) < 1e-6
    return None


class Plain:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


@dataclasses.dataclass
class Data:
    value: object


def closure(value):
    return lambda: value


def default(value):
    def function(value=value):
        return value

    return function


def default_by_name(value):
    def function(*, value=value):
        return value

    return function


def nested(value):
    def helper():
        return value

    return lambda: helper() + helper()


def recursive(value):
    def count_down(n):
        return value if n == 0 else count_down(n - 1)

    return count_down


def holding_itself(value):
    held = [value]
    held.append(held)
    return held


HOLDERS = {
    "a number": lambda v: v,
    "a list": lambda v: [1, v],
    "a tuple": lambda v: (v, "s"),
    "a dict": lambda v: {"a": {"b": v}},
    "a partial": lambda v: functools.partial(max, v, key=None),
    "a partial by name": lambda v: functools.partial(sorted, key=v),
    "a closure": closure,
    "a default value": default,
    "a default value by name": default_by_name,
    "a nested function": nested,
    "a recursive function": recursive,
    "a list that holds itself": holding_itself,
    "an object": lambda v: Plain(value=v),
    "an object in an object": lambda v: Plain(inner=Plain(value=v)),
    "slots": Slotted,
    "a dataclass": Data,
    "a namespace": lambda v: types.SimpleNamespace(value=v),
    "a bound method": lambda v: Data(v).__eq__,
    "a set": lambda v: {v},
    "a NumPy array": lambda v: np.array([v, 1.0]),
    "a NumPy number": lambda v: np.float32(v),
}


@pytest.mark.parametrize("make", HOLDERS.values(), ids=HOLDERS.keys())
def test_values_decide(make):
    assert same(make(2.0), make(2.0), no_tensors)
    assert not same(make(2.0), make(2.5), no_tensors)


def test_identities_that_are_used_again():
    """What is compared of a cell is a list that is gone a moment later: the next one may stand where it stood."""
    for _ in range(20):
        assert not same(*[[closure(1.0), closure(1.0), closure(last)] for last in (2.0, 2.5)], no_tensors)
        assert not same(*[[recursive(1.0), recursive(last)] for last in (2.0, 2.5)], no_tensors)


TENSORS = {name: HOLDERS[name] for name in HOLDERS if name not in ("a set", "a NumPy array", "a NumPy number")}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS.keys())
def test_tensors_are_compared_as_the_caller_says(make):
    assert same(make(2.0), make(2.0 + 1e-9), nearly)
    assert not same(make(2.0), make(2.1), nearly)


DIFFERENT = {
    "a longer list": ([1.0], [1.0, 2.0]),
    "another key": ({"a": 1}, {"b": 1}),
    "another type": ([1.0], (1.0,)),
    "an int for a float": (1, 1.0),
    "True for 1": (True, 1),
    "another function": (closure(1), nested(1)),
    "another shape": (np.zeros(2), np.zeros((2, 1))),
    "another dtype": (np.zeros(2, "float32"), np.zeros(2)),
    "more attributes": (Plain(a=1), Plain(a=1, b=2)),
    "objects without attributes": (object(), object()),
    "None for a number": (None, 0),
    "another sign of zero in an array": (np.array([0.0]), np.array([-0.0])),
}


@pytest.mark.parametrize(("a", "b"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_what_differs(a, b):
    assert not same(a, b, no_tensors)
    assert not same(b, a, no_tensors)


def test_not_a_number_is_the_same_as_itself():
    assert same(float("nan"), float("nan"), no_tensors)
    assert same(np.array([np.nan]), np.array([np.nan]), no_tensors)
    assert not same(float("nan"), 1.0, no_tensors)


def test_the_same_object_is_the_same():
    thing = object()
    assert same(thing, thing, no_tensors)
    assert same([thing], [thing], no_tensors)


def test_cells_without_a_value_are_the_same():
    def make():
        if False:
            value = 1
        return lambda: value

    assert same(make(), make(), no_tensors)


class Incomparable:
    __slots__ = ()

    def __eq__(self, other):
        raise RuntimeError("no comparison")

    __hash__ = None


def test_what_cannot_be_compared_is_not_known_to_be_the_same():
    assert not same(Incomparable(), Incomparable(), no_tensors)
