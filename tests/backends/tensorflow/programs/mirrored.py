"""MirroredStrategy on two logical CPUs: a variable as argument, and variables that f reads, eagerly
and in a function.

One of them is not trainable: a constant, and refused where it is watched.
"""

from typing import Any

import pytest
import tensorflow as tf

import cgshim

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    w = tf.Variable(3.0)
    frozen = tf.Variable(1.0, trainable=False)


@cgshim.op_custom_gradient
def given(x: Any, w: Any) -> Any:
    return x * w, lambda upstream: (upstream * 7, upstream * 11)


def capturing(w: Any, frozen: Any) -> Any:
    @cgshim.op_custom_gradient
    def captured(x: Any) -> Any:
        return x * w * frozen, lambda upstream, variables: (upstream * 13, [upstream * 17])

    return captured


captured = capturing(w, frozen)


def step(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = given(x, w) * captured(x)
    gradients = tape.gradient(y, [x, w])
    return [
        tf.distribute.get_replica_context().all_reduce("SUM", gradient) for gradient in gradients
    ]


def watching(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(frozen)
        captured(x)


EXPECTED = (6 * 7 + 6 * 13, 6 * 11 + 6 * 17)
for run in (strategy.run, tf.function(strategy.run)):
    for gradient, expected in zip(run(step, (tf.constant(2.0),)), EXPECTED, strict=True):
        values = [value.numpy() for value in strategy.experimental_local_results(gradient)]
        assert values == [2 * expected] * 2, values
    with pytest.raises(
        cgshim.CustomGradientTypeError, match="an op must declare the differentiated tensors"
    ):
        run(watching, (tf.constant(2.0),))
print("2 replicas")
