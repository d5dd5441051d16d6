"""An eager call: what it returns, in which memory; and that it costs little."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import calls_of, grad, seven, square

import cgshim

by_hand = tf.custom_gradient(seven)


def recorded(op: Any) -> Callable[[Any], Any]:
    def forward(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            return op(x)

    return forward


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11),
    reason="TensorFlow's own calls depend on Python's typing module",
)
@pytest.mark.parametrize(
    ("use", "most"),
    [(lambda op: op, 0.8), (recorded, 1.2), (grad, 1.1)],
    ids=["plain", "forward", "backward"],
)
def test_a_call_calls_about_as_many_functions_as_by_hand(use: Any, most: float) -> None:
    x = tf.constant(2.0)
    ours, theirs = use(square), use(by_hand)
    assert calls_of(lambda: ours(x)) < most * calls_of(lambda: theirs(x))


def _memory_of(x: Any) -> int:
    return int(np.asarray(memoryview(x)).__array_interface__["data"][0])


def test_an_output_that_f_reads_is_another_tensor_in_its_memory() -> None:
    made = []

    def f(x: Any) -> Any:
        made.append(x * x)
        made.append(made[0] * 5)
        return made[0], lambda u: u * 7

    x = tf.constant([2.0, 3.0])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = cgshim.op_custom_gradient(f)(x)
    assert y is not made[0]
    assert _memory_of(y) == _memory_of(made[0])
    assert tape.gradient(y, x).numpy().tolist() == [7, 7]
    assert tape.gradient(made[1], x).numpy().tolist() == [20, 30]  # f's own derivative


def test_the_handle_of_a_resource_stays_one() -> None:
    variable = tf.Variable([2.0, 3.0])
    op = cgshim.op_custom_gradient(lambda x: ((x * x, variable.handle), lambda a, b: a * 7))
    _, handle = op(tf.constant(2.0))
    assert handle._handle_data.shape_and_type == variable.handle._handle_data.shape_and_type
    assert tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32).numpy().tolist() == [2, 3]
