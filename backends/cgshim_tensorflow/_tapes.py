"""Tapes in a rule that an accumulator runs: TensorFlow 2.21 lets them record nothing there, without an error."""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf

from cgshim_tensorflow._origins import running_rule
from cgshim_tensorflow._private import GradientTape, pack_tangents


def _checked(push: Callable[[tf.GradientTape], None]) -> Callable[[tf.GradientTape], None]:
    """Refuse a tape that would record nothing; TensorFlow's own are pushed where they record."""

    @functools.wraps(push)
    def pushed(tape: tf.GradientTape) -> None:
        call = running_rule.current and running_rule.current.call
        if call and pack_tangents([]).indices and not running_rule.run(None, _tapes_record):
            call.refuse("forward mode needs a rule that takes no derivative itself",
                        "op_vjp or a GradientTape in grad_fn", "use reverse mode")  # fmt: skip
        push(tape)

    return pushed


def _tapes_record() -> bool:
    with tf.GradientTape() as tape:
        x = tf.constant(0.0)
        tape.watch(x)
        y = tf.identity(x)
    return tape.gradient(y, x) is not None


GradientTape._push_tape = _checked(GradientTape._push_tape)
