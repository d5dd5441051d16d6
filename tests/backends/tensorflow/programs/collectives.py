"""all_reduce in rules, in MirroredStrategy on two logical CPUs: a layer whose weights are split
over the replicas.

One op is the identity, and adds up the gradients of all replicas; the other gives the sum of the
outputs, which is made before it, and its gradient is the identity. The numbers are those of one
device, and of tf.custom_gradient.
"""

from typing import Any

import numpy as np
import tensorflow as tf

import cgshim

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

X = tf.constant([[1.0, -2.0, 0.5], [0.3, 0.7, -1.1]])
FIRST = tf.reshape(tf.range(12.0), (3, 4)) / 7.0 - 1.0
SECOND = tf.sin(tf.reshape(tf.range(8.0), (4, 2)))
UPSTREAM = tf.constant([[2.0, -3.0], [0.5, 7.0]])


def summed(x: Any) -> Any:
    return tf.distribute.get_replica_context().all_reduce("SUM", x)


def replica() -> Any:
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def ops(custom_gradient: Any) -> Any:
    @custom_gradient
    def copy(x: Any) -> Any:
        return tf.identity(x), summed

    @custom_gradient
    def instead(x: Any, total: Any) -> Any:
        return tf.identity(total), lambda upstream: (upstream, None)

    return copy, lambda x: instead(x, tf.stop_gradient(summed(x)))


def gradients(copy: Any, reduce: Any, first: Any, second: Any) -> Any:
    sources = [X, first, second]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        loss = tf.reduce_sum(UPSTREAM * reduce(tf.tanh(copy(X) @ first) @ second))
    return tape.gradient(loss, sources)


def in_replica(copy: Any, reduce: Any) -> Any:
    start = 2 * replica()
    return gradients(copy, reduce, FIRST[:, start : start + 2], SECOND[start : start + 2])


def wrong_factors() -> Any:
    """The gradient by the rule, and not by autodiff: 7 times the sum of what the replicas have."""
    op = cgshim.op_custom_gradient(
        lambda x: (5.0 * x, lambda u: 7.0 * summed(u * (1.0 + tf.cast(replica(), u.dtype))))
    )
    x = tf.constant([1.0, 5.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = op(x)
    return tape.gradient(y, x, output_gradients=tf.constant([2.0, -3.0]))


def in_f() -> Any:
    """While f waits for the other replicas, they run in its place."""
    op = cgshim.op_custom_gradient(lambda x: (summed(x), lambda upstream: upstream), name="summed")
    with tf.GradientTape() as tape:
        tape.watch(X)
        return op(tf.tanh(X))


def check(found: Any, expected: Any) -> None:
    for value, of_replica in zip(strategy.experimental_local_results(found), expected, strict=True):
        np.testing.assert_allclose(value, of_replica, rtol=1e-4, atol=1e-5)


of_x, of_first, of_second = gradients(tf.identity, tf.identity, FIRST, SECOND)
for run in (strategy.run, tf.function(strategy.run, autograph=False)):
    for custom_gradient in (cgshim.op_custom_gradient, tf.custom_gradient):
        pair = ops(custom_gradient)
        found = run(lambda pair=pair: in_replica(*pair))
        check(found[0], [of_x, of_x])
        check(found[1], [of_first[:, :2], of_first[:, 2:]])
        check(found[2], [of_second[:2], of_second[2:]])
    check(run(wrong_factors), [[7 * 3 * 2.0, 7 * 3 * -3.0]] * 2)
    run(in_f)
print("2 replicas")
