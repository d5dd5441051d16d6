"""A function on the host on the second of two logical CPUs, and in MirroredStrategy on both."""

from typing import Any

import numpy as np
import tensorflow as tf

import cgshim

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
double = cgshim.op_host(lambda x: 2 * x, outputs=lambda x: x)
for run in (double, tf.function(double)):
    with tf.device("CPU:1"):
        x = tf.constant([1.0, 3.0])
        y = run(x)
    assert np.array_equal(y, [2, 6])
    assert y.device == x.device, (y.device, x.device)

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
op = cgshim.op_custom_gradient(lambda x: (double(x), lambda u: double(u) * 7.0))
with strategy.scope():
    v = tf.Variable([1.0, 3.0])


def step() -> Any:
    with tf.GradientTape() as tape:
        y = op(v)
    return tape.gradient(y, v)


for run in (strategy.run, tf.function(strategy.run)):
    for gradient in strategy.experimental_local_results(run(step)):
        assert np.array_equal(gradient, [14, 14]), gradient
print("2 devices")
