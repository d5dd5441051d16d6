"""Tapes in a rule that an accumulator runs: TensorFlow 2.21 lets them record nothing there, without an error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import tensorflow as tf

from cgshim.backend import RuleScope
from cgshim_tensorflow._private import GradientTape, pack_tangents

if TYPE_CHECKING:
    from cgshim.backend import Call

call_of_rule: RuleScope[Call | None] = RuleScope("cgshim_tensorflow_call_of_rule")
"""the call whose rule is running"""


def _checked(push: Callable[[tf.GradientTape], None]) -> Callable[[tf.GradientTape], None]:
    """Refuse a tape that would record nothing; TensorFlow's own are pushed where they record."""

    @functools.wraps(push)
    def pushed(tape: tf.GradientTape) -> None:
        call = call_of_rule.current
        if call is not None and pack_tangents([]).indices and not call_of_rule.run(None, _tapes_record):
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
