"""The most memory that the gradient of twelve ops in a row takes; each op keeps one tensor of 4 MB
for its rule.

Prints the peak of each op under one tape and under nested ones, in MB.
"""

import os
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

import cgshim


def f(x: Any) -> Any:
    i = tf.tanh(2.0 * tf.sigmoid(x))
    return x * i, lambda upstream: upstream * 7.0 * i


def unrecorded(x: Any) -> Any:
    """Run f: what it computes is on no tape, and so nothing is kept but what the rule keeps."""
    with record.stop_recording():
        return f(x)


OPS = {
    "by hand": tf.custom_gradient(f),
    "unrecorded by hand": tf.custom_gradient(unrecorded),
    "once": cgshim.op_custom_gradient(f, once_differentiable=True),
    "twice": cgshim.op_custom_gradient(f),
}


def gradient(op: Any, x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x
        for _ in range(12):
            y = op(y)
        loss = tf.reduce_sum(y)
    return tape.gradient(loss, x)


def nested(op: Any, x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        return gradient(op, x)


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process, in kB."""
    return next(
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if name in line
    )


def print_peak(name: str, run: Any) -> None:
    run(OPS[name], tf.ones([4]))
    x = tf.ones([2**20])
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
    before = resident("VmRSS")
    run(OPS[name], x)
    print(f"{name}, {run.__name__}: {(resident('VmHWM') - before) / 1024}", flush=True)


for run in (gradient, nested):
    for name in OPS:
        # what TensorFlow has allocated it keeps; before it has run anything it may be forked
        if os.fork() == 0:
            print_peak(name, run)
            os._exit(0)
        os.wait()
