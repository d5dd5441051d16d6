"""Rows of docs/porting.md by hand, as a tf.custom_gradient, and with cgshim."""

import numpy as np
import tensorflow as tf
from twins import Twins

from cgshim import op_custom_gradient, op_stop_gradient, op_vjp

W = tf.constant([2.0, -3.0, 5.0, 0.5], dtype="float64")
twins = Twins({})


def both(f):
    return tf.custom_gradient(f), op_custom_gradient(f)


def gradients(op, *variables):
    """Return a function of a vector: its gradient, and those of variables, flat."""

    def flat(x):
        with tf.GradientTape() as tape:
            tape.watch([x, *variables])
            loss = tf.reduce_sum(op(x) * W)
        found = tape.gradient(loss, [x, *variables], unconnected_gradients="zero")
        return tf.concat([tf.reshape(g, [-1]) for g in found], 0)

    return flat


def variables():
    return [tf.Variable(W * factor, name=name) for factor, name in ((2, "first"), (3, "second"))]


@twins.add("`grad(*upstream)`")
def _():
    def pair(x):
        return (x * x, 3 * x), lambda square, triple: 5 * square * x + 7 * triple

    return [lambda x, op=op: tf.multiply(*op(x)) for op in both(pair)]


@twins.add("`grad(*upstream, variables=None)`", orders=0)
def _():
    first, second = variables()

    def product(x):
        def grad(upstream, variables):
            of_variables = [7 * upstream * x * second, 11 * upstream * x * first]
            return 5 * upstream * first * second, of_variables

        return x * first * second, grad

    ops = tf.custom_gradient(product), op_custom_gradient(product, variables=[first, second])
    return [gradients(op, first, second) for op in ops]


@twins.add("order of `variables`", orders=0)
def _():
    kept = variables()

    def function(names):
        def scaled(x):
            def grad(upstream, variables):
                assert [variable.name.split(":")[0] for variable in variables] == names
                factors = {"first": 7, "second": 11}
                return 5 * upstream, [factors[name] * upstream * x for name in names]

            return x * kept[1] + x * kept[0], grad

        return scaled

    by_hand = tf.custom_gradient(function(["first", "second"]))
    here = op_custom_gradient(function(["second", "first"]), variables=kept[::-1])
    return gradients(by_hand, *kept), gradients(here, *kept)


@twins.add("keyword arguments of `f` (without the rule)")
def _():
    def scaled(x, *, factor):
        return x * x * factor, lambda upstream: 5 * upstream * x * factor

    return [lambda x, op=op: op(x, factor=3.5) for op in both(scaled)]


@twins.add("`f` without a tensor argument", orders=0)
def _():
    kept = tf.Variable(W)

    def square(none):
        return kept * kept, lambda upstream, variables: (none, [5 * upstream * kept])

    by_hand = tf.custom_gradient(lambda: square([]))
    argument = op_custom_gradient(lambda w: (w * w, lambda upstream: 5 * upstream * w))
    by_name = op_custom_gradient(lambda: square(()), variables=[kept])
    ops = by_hand, lambda: argument(kept), lambda: by_name()
    return [gradients(lambda x, op=op: op() * x, kept) for op in ops]


@twins.add("`tf.recompute_grad`")
def _():
    @op_custom_gradient
    def here(x):
        def grad(upstream):
            return op_vjp(tf.sin, x, as_in_rules=True)[1](upstream)

        return tf.sin(op_stop_gradient(x)), grad

    return tf.recompute_grad(tf.sin), here


@twins.add("`tf.stop_gradient`")
def _():
    return lambda x: tf.stop_gradient(x**2) * x**3, lambda x: op_stop_gradient(x**2) * x**3


@twins.add("`tf.grad_pass_through(f)`")
def _():
    here = op_custom_gradient(lambda x: (tf.round(x), lambda upstream: upstream))
    return lambda x: tf.grad_pass_through(tf.round)(x) ** 3, lambda x: here(x) ** 3


@twins.add("`tape.stop_recording()`")
def _():
    def by_hand(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.sin(x)
            with tape.stop_recording():
                cosine = tf.cos(x)
        return y + 0 * tape.gradient(y, x), lambda upstream: 5 * upstream * cosine

    here = op_custom_gradient(lambda x: (tf.sin(x), lambda upstream: 5 * upstream * tf.cos(x)))
    return tf.custom_gradient(by_hand), here


@twins.add("`tf.IndexedSlices`", orders=0)
def _():
    rows = tf.constant([3, 0, 3])

    def lookup(table):
        def grad(upstream):
            return tf.IndexedSlices(5 * upstream, rows, tf.constant([4]))

        return tf.gather(table, rows), grad

    upstream = tf.constant([0.7, 1.1, 2.3], dtype="float64")

    def gradient(op):
        def dense(table):
            with tf.GradientTape() as tape:
                tape.watch(table)
                found = op(table)
            slices = tape.gradient(found, table, upstream)
            assert isinstance(slices, tf.IndexedSlices)
            return tf.convert_to_tensor(slices)

        return dense

    return [*map(gradient, both(lookup))]


@twins.add("a watched `tf.Variable(trainable=False)` that `f` captures", orders=0)
def _():
    kept = tf.Variable(W, trainable=False)
    product = lambda x, w: (x * w, lambda upstream: (5 * upstream * w, 7 * upstream * x))
    return [gradients(lambda x, op=op: op(x, kept), kept) for op in both(product)]


@twins.add("an op in `grad_fn` that captures a tensor")
def _():
    def function(define):
        """With 5 and 7 in the first derivative and 11 in the second, on purpose."""

        def cube(x):
            def grad(upstream):
                slope = 5 * x**2

                @define
                def first(x):
                    return slope, lambda second: 11 * second * slope

                return upstream * first(x)

            return x**3, grad

        return define(cube)

    return function(tf.custom_gradient), function(op_custom_gradient)


@twins.add("`tf.numpy_function` with a rule", orders=1)
def _():
    slope = lambda upstream, x: 5 * upstream * np.cos(x)

    @tf.custom_gradient
    def by_hand(x):
        y = tf.numpy_function(np.sin, [x], tf.float64)
        grad = lambda upstream: tf.numpy_function(slope, [upstream, x], tf.float64)
        return tf.ensure_shape(y, x.shape), grad

    @op_custom_gradient(host_outputs=lambda x: x)
    def here(x):
        return np.sin(x), lambda upstream: slope(upstream, x)

    return by_hand, here
