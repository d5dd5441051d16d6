"""What a derivative keeps alive: what the rule keeps, and nothing else, as a primitive that is
written by hand.
"""

import functools
import weakref

import numpy as np
import pytest
from autograd.core import make_vjp
from autograd.extend import defvjp, primitive

from cgshim import op_custom_gradient

X = np.array([1.0, -2.0, 3.0])


def _rule_of_nothing(x, y, mask):
    return lambda u: 7.0 * u


def _rule_of_the_input(x, y, mask):
    return lambda u: 7.0 * u * x


def _rule_of_arguments(x, y, mask):
    return lambda x, upstream: 7.0 * upstream * x


def _rule_of_the_output(x, y, mask):
    return lambda u: 7.0 * u * y


def _rule_of_a_mask(x, y, mask):
    return lambda u: 7.0 * u * mask


RULES = {
    "nothing": (_rule_of_nothing, [], np.ones(3)),
    "the input": (_rule_of_the_input, ["x"], X),
    "the arguments": (_rule_of_arguments, ["x"], X),
    "the output": (_rule_of_the_output, ["y"], np.maximum(X, 0.0)),
    "a mask": (_rule_of_a_mask, ["mask"], X > 0),
}
"""What a rule of the positive part keeps, which arrays live for it, and what 7 upstream is multiplied with."""


@pytest.fixture
def watched():
    """Arrays by name, as long as other references to them exist."""
    return weakref.WeakValueDictionary()


def _by_hand(watched, write):
    def positive(x):
        y, mask = np.maximum(x, 0.0), x > 0
        watched.update(x=x, y=y, mask=mask)
        rules.append(write(x, y, mask))
        return y

    rules = []

    def vjp(ans, x):
        rule = rules.pop()
        return functools.partial(rule, x) if write is _rule_of_arguments else rule

    op = primitive(positive)
    defvjp(op, vjp)
    return op


def _by_an_op(watched, write):
    @op_custom_gradient
    def positive(x):
        y, mask = np.maximum(x, 0.0), x > 0
        watched.update(x=x, y=y, mask=mask)
        return y, write(x, y, mask)

    return positive


@pytest.mark.parametrize(("write", "kept", "factor"), RULES.values(), ids=RULES)
@pytest.mark.parametrize("make", [_by_hand, _by_an_op], ids=["by hand", "by an op"])
def test_a_pullback_keeps_what_the_rule_keeps(watched, make, write, kept, factor):
    """The op stands between two ops that keep no arrays."""
    op = make(watched, write)
    alone = op_custom_gradient(lambda x: (x + 0.0, lambda u: u))

    pullback, output = make_vjp(lambda x: alone(op(alone(x))), X)
    del output
    assert sorted(watched) == kept
    np.testing.assert_allclose(
        pullback(np.array([2.0, 3.0, 5.0])), 7.0 * np.array([2.0, 3.0, 5.0]) * factor
    )
    del pullback
    assert not watched
