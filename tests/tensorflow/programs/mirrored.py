"""MirroredStrategy on two logical CPUs: a variable as argument and one that f reads, eagerly and in a function."""

from typing import Any

import tensorflow as tf

import cgshim

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    w = tf.Variable(3.0)


@cgshim.op_custom_gradient
def given(x: Any, w: Any) -> Any:
    return x * w, lambda upstream: (upstream * 7, upstream * 11)


@cgshim.op_custom_gradient
def captured(x: Any) -> Any:
    return x * w, lambda upstream, variables: (upstream * 13, [upstream * 17])


def step(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = given(x, w) * captured(x)
    gradients = tape.gradient(y, [x, w])
    return [tf.distribute.get_replica_context().all_reduce("SUM", gradient) for gradient in gradients]


for run in (strategy.run, tf.function(strategy.run)):
    for gradient, expected in zip(run(step, (tf.constant(2.0),)), (6 * 7 + 6 * 13, 6 * 11 + 6 * 17), strict=True):
        values = [value.numpy() for value in strategy.experimental_local_results(gradient)]
        assert values == [2 * expected] * 2, values
print("2 replicas")
