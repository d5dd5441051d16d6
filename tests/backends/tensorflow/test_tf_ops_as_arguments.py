"""An op is what it is, whatever TensorFlow finds in its __wrapped__: as an argument, a default,
behind a decorator.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.util import tf_decorator
from tf_modes import grad

import cgshim


def clipped(x: Any) -> Any:
    """x**3, with a clipped gradient: 1 for 12."""
    return x**3, lambda upstream: tf.clip_by_value(upstream, -1.0, 1.0)


clip = cgshim.op_custom_gradient(clipped)
X = tf.constant(2.0)


class Steps:
    @cgshim.op_custom_gradient
    def op(self, x: Any) -> Any:
        return clipped(x)


@tf.function
def call(x: Any, op: Any = clip) -> Any:
    return op(x)


@tf.function
def call_first(x: Any, ops: Any) -> Any:
    return ops["first"][0](x)


class Holder(tf.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    @tf.function
    def __call__(self, x: Any) -> Any:
        return self.op(x)


def derivatives(op: Any) -> list[float]:
    """The gradient of the op, called and handed around in every way."""
    ways = [
        op, tf.function(op), lambda x: call(x, op), lambda x: call(x, op=op), lambda x: call_first(x, {"first": [op]}),
        Holder(op), tf.function(functools.partial(call, op=op)),
    ]  # fmt: skip
    return [grad(way)(X).numpy().item() for way in ways]


def test_an_argument_of_a_tf_function() -> None:
    assert derivatives(clip) == [1.0] * 7
    assert grad(call)(X).numpy() == 1
    assert derivatives(Steps().op) == [1.0] * 7


def test_another_op_is_traced_again_and_the_same_method_is_not() -> None:
    traces: list[int] = []

    @tf.function
    def traced(x: Any, op: Any) -> Any:
        traces.append(1)
        return op(x)

    steps = Steps()
    found = [
        traced(X, op).numpy()
        for op in (clip, clip, cgshim.op_custom_gradient(lambda x: (x, lambda u: u)))
    ]
    assert (found, len(traces)) == ([8, 8, 2], 2)
    assert [traced(X, steps.op).numpy() for _ in range(3)] == [8, 8, 8]
    assert len(traces) == 3


def test_decorators_that_write_into_an_op_leave_it_as_it_is() -> None:
    for decorate in (
        lambda op: tf_decorator.make_decorator(lambda x: 12 * x, op),
        lambda op: functools.wraps(lambda x: 12 * x)(op),
    ):
        op = decorate(cgshim.op_custom_gradient(clipped))
        assert op(X).numpy() == 8
        assert derivatives(op) == [1.0] * 7
