"""The most memory that the gradient of twelve ops in a row takes; each op keeps one tensor of 16 MB for its rule."""

import sys
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

import cgshim

which, tapes = sys.argv[1:]


def f(x: Any) -> Any:
    i = tf.tanh(2.0 * tf.sigmoid(x))
    return x * i, lambda upstream: upstream * 7.0 * i


def unrecorded(x: Any) -> Any:
    """By hand: what f computes is on no tape, and so nothing is kept but what the rule keeps."""
    with record.stop_recording():
        return f(x)


op = {
    "by hand": tf.custom_gradient(unrecorded),
    "once": cgshim.op_custom_gradient(f, once_differentiable=True),
    "twice": cgshim.op_custom_gradient(f),
}[which]


def gradient(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x
        for _ in range(12):
            y = op(y)
        loss = tf.reduce_sum(y)
    return tape.gradient(loss, x)


def nested(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        return gradient(x)


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process, in kB."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if name in line)


run = nested if tapes == "nested" else gradient
run(tf.ones([4]))
x = tf.ones([4 * 2**20])
Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
before = resident("VmRSS")
run(x)
print((resident("VmHWM") - before) / 1024)
