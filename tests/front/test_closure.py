"""convert_closure finds what a function holds, here floats, and makes it again round others."""

import functools
from typing import NamedTuple

import pytest

from cgshim import op_custom_gradient
from cgshim._closures import convert_closure


class Pair(NamedTuple):
    left: object
    right: object


def _is_float(x):
    return isinstance(x, float)


def _in_a_cell(a, b):
    return lambda: (a, b)


def _in_containers(a, b):
    held = {"list": [a, "static"], "pair": Pair(b, None)}
    return lambda: (held["list"][0], held["pair"].left)


def _in_a_nested_function(a, b):
    def inner():
        return a

    return lambda: (inner(), b)


def _in_defaults(a, b):
    return lambda x=a, *, y=b: (x, y)


def _in_a_partial(a, b):
    return functools.partial(lambda x, y: (x, y), a, y=b)


def _in_a_decorated_function(a, b):
    @functools.wraps(_in_a_cell)
    def decorated():
        return _in_a_cell(a, b)()

    return decorated


HOLDERS = [_in_a_cell, _in_containers, _in_a_nested_function, _in_defaults, _in_a_partial, _in_a_decorated_function]


@pytest.mark.parametrize("make", HOLDERS)
def test_what_is_held_is_found_and_replaced(make):
    function = make(2.5, 3.5)
    tensors, round_others = convert_closure(function, _is_float, make)
    others = [100 * t for t in tensors]
    assert sorted(tensors) == [2.5, 3.5]
    assert round_others(others)() == (250, 350)
    assert function() == (2.5, 3.5)


def test_a_tensor_is_found_once_and_after_the_known_ones():
    known, other = 1.5, 2.5
    tensors, round_others = convert_closure(_in_containers(known, other), _is_float, _in_containers, known=[7.5, known])
    assert tensors == [7.5, known, other]
    assert round_others([0.0, 10.0, 20.0])() == (10, 20)


def test_what_holds_nothing_stays_the_same():
    static = {"list": [1, 2]}
    function = lambda: static
    tensors, round_others = convert_closure(function, _is_float, _in_a_cell)
    assert tensors == []
    assert round_others([]) is function


def test_containers_of_the_maker_stay_the_same():
    seen = [1.5]

    def make(a):
        return lambda: (seen.append(a), seen)[1]

    tensors, round_others = convert_closure(make(2.5), _is_float, make)
    assert tensors == [2.5]
    assert round_others([9.5])() is seen
    assert seen == [1.5, 9.5]


def _of_own_containers(a, b):
    both, swapped, named = [a, b], (b, a), {"a": a, "b": b}
    return lambda: (both, swapped, named)


def test_containers_of_its_own_are_made_again_as_they_are():
    known = 3.5
    function = _of_own_containers(2.5, known)
    tensors, round_others = convert_closure(function, _is_float, _of_own_containers, known=[known])
    assert tensors == [3.5, 2.5]
    again = round_others([10.0, 20.0])()
    assert again == ([20.0, 10.0], (10.0, 20.0), {"a": 20.0, "b": 10.0})
    assert list(map(type, again)) == [list, tuple, dict]
    assert round_others([10.0, 20.0])()[0] is not again[0]


def _empty(a):
    kept = []
    return lambda: (kept, a)


def test_an_empty_container_is_the_authors_own():
    function = _empty(2.5)
    _, round_others = convert_closure(function, _is_float, _empty)
    assert round_others([9.5])() == ([], 9.5)
    assert round_others([9.5])()[0] is function()[0]


def _in_two_cells(a):
    kept = [a]
    same = kept
    return lambda: (kept, same)


def test_a_container_in_two_cells_stays_one():
    _, round_others = convert_closure(_in_two_cells(2.5), _is_float, _in_two_cells)
    kept, same = round_others([9.5])()
    assert kept == [9.5]
    assert kept is same


def test_a_function_that_calls_itself_and_a_name_without_a_value():
    def make(a):
        def count_down(n):
            return a if n == 0 else count_down(n - 1)

        def unassigned():
            return never

        if a is None:
            never = 0
        return lambda n: (count_down(n), unassigned)[0]

    tensors, round_others = convert_closure(make(2.5), _is_float, make)
    assert tensors == [2.5]
    assert round_others([9.5])(0) == 9.5


def test_keywords_and_names_survive():
    def make(a):
        def rule(upstream, *, factor=2):
            return upstream * factor * a

        return rule

    _, round_others = convert_closure(make(2.5), _is_float, make)
    assert (round_others([3.0])(1), round_others([3.0])(1, factor=5)) == (6, 15)
    assert round_others([3.0]).__name__ == "rule"


def test_an_op_is_made_again_with_its_options():
    def make(a):
        options = {"forward_mode": True, "once_differentiable": True, "name": "held"}
        op = op_custom_gradient(lambda n: (n * a, lambda upstream: upstream), **options)
        op.remark = "the user's own"
        return lambda: op

    tensors, round_others = convert_closure(make(2.5), _is_float, make)
    again = round_others([9.5])()
    assert (again.forward_mode, again.once_differentiable, again.name) == (True, True, "held")
    assert (again.remark, repr(again)) == ("the user's own", "<op held with a custom gradient>")
    assert (tensors, again(2)) == ([2.5], 19.0)
    assert again.__wrapped__(2)[0] == 19.0
