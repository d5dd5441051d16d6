"""What is alive between a call and its gradient: no more than the rule keeps, and never more than
by hand.

y is the op's own output, which the operation that follows keeps.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import cgshim


def _masked(x: Any) -> Callable[[Any], Any]:
    mask = x > 0
    return lambda u: tf.where(mask, u * 7, 0.0)


RULES: dict[str, tuple[Callable[..., Any], str]] = {
    "nothing": (lambda x, i, j, y: lambda u: u * 7, "y"),
    "a mask": (lambda x, i, j, y: _masked(x), "y"),
    "an output": (lambda x, i, j, y: lambda u: u * y, "y"),
    "the argument": (lambda x, i, j, y: lambda u: u * x, "xy"),
    "called with the argument": (lambda x, i, j, y: lambda x, upstream: upstream * x, "xy"),
    # and x, for the derivative of what is kept
    "a residual": (lambda x, i, j, y: lambda u: u * i, "xiy"),
    "a residual, once": (lambda x, i, j, y: lambda u: u * i, "iy"),
}
ONCE = cgshim.op_custom_gradient(once_differentiable=True)


def _f(rule: str, alive: dict[str, weakref.ref[Any]]) -> Callable[[Any], Any]:
    def f(x: Any) -> Any:
        i, j = tf.sin(x), tf.cos(x)
        y = i * j
        alive.update(x=weakref.ref(x), i=weakref.ref(i), j=weakref.ref(j), y=weakref.ref(y))
        return y, RULES[rule][0](x, i, j, y)

    return f


def _handed_to_the_gradient(op: Callable[[Any], Any], shape: Any) -> collections.Counter[str]:
    """What the graph of three ops in a row hands to the graph of their gradient, by dtype."""

    def three(x: Any) -> Any:
        return op(op(op(x)))

    function = tf.function(three).get_concrete_function(tf.TensorSpec(shape, tf.float32))
    forward, _ = function._delayed_rewrite_functions.forward_backward(1)
    return collections.Counter(output.dtype.name for output in forward.graph.outputs[1:])


OF_TENSORFLOW = [
    rule for rule in RULES if not rule.startswith("called") and not rule.endswith("once")
]


@pytest.mark.parametrize("rule", OF_TENSORFLOW)
def test_a_graph_hands_over_what_it_does_by_hand(rule: str) -> None:
    by_hand = tf.custom_gradient(_f(rule, {}))
    op = cgshim.op_custom_gradient(_f(rule, {}))
    assert _handed_to_the_gradient(op, [4]) == _handed_to_the_gradient(by_hand, [4])
