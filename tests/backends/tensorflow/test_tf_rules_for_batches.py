"""op_custom_gradient(vmap=rule) under tf.vectorized_map: beside a loop over single calls.

TensorFlow's own custom_gradient has no rule for batches, and vectorized_map drops its gradient. The
rules are wrong on purpose, by other factors than autodiff's.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import function

from cgshim import CustomGradientTypeError, op_custom_gradient
from cgshim.testing import check_gradients

X = tf.reshape(tf.range(6.0, dtype=tf.float64), (2, 3)) + 1
W = tf.constant([2.0, -3.0], tf.float64)
U = tf.constant([1.0, 2.0, -3.0], tf.float64)


class Kernel:
    """x * x * w of a vector and a number, without batching; it counts what runs."""

    def __init__(self, **options):
        self.batches = []
        self.op = op_custom_gradient(self.one, vmap=self.many, name="kernel", **options)

    def one(self, x, w):
        return x * x * w, lambda u: (7.0 * u * 2 * x * w, 11.0 * tf.reduce_sum(u * x * x))

    def many(self, size, in_batched, x, w):
        self.batches.append((size, in_batched))
        x_is, w_is = in_batched
        xs, ws = x if x_is else x[None], (w if w_is else w[None])[:, None]

        def grad(u):
            of_x, of_w = 7.0 * u * 2 * xs * ws, 11.0 * tf.reduce_sum(u * xs * xs, -1)
            return of_x if x_is else tf.reduce_sum(of_x, 0), of_w if w_is else tf.reduce_sum(
                of_w, 0
            )

        return xs * xs * ws, grad, True


def mapped(f, flags):
    """f over the first axis of some of its arguments."""

    def over(*args):
        def of_one(elements):
            rest = iter(elements)
            return f(*[next(rest) if has else x for x, has in zip(args, flags, strict=True)])

        given = tuple(x for x, has in zip(args, flags, strict=True) if has)
        # as in tf_modes: what AutoGraph makes of an op under vectorized_map others see
        traced = tf.autograph.experimental.do_not_convert(of_one)
        return tf.vectorized_map(traced, given, fallback_to_while_loop=False)

    return over


def looped(f, flags):
    """The same, one call after the other."""

    def over(*args):
        size = next(x.shape[0] for x, has in zip(args, flags, strict=True) if has)
        rows = [
            f(*[x[at] if has else x for x, has in zip(args, flags, strict=True)])
            for at in range(size)
        ]
        return tf.nest.map_structure(lambda *each: tf.stack(each), *rows)

    return over


def grad(f):
    def gradients(*args):
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = f(*args)
        return tape.gradient(y, args)

    return gradients


def jacobian(f):
    def jacobians(*args):
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = f(*args)
        return tape.jacobian(y, args)

    return jacobians


def weighted(f):
    return lambda x, w: tf.reduce_sum(f(x, w) * U)


def squared(tree):
    return sum(tf.reduce_sum(x * x) for x in tf.nest.flatten(tree))


PROGRAMS = {
    "vmap": lambda f, vmap: vmap(f),
    "function of vmap": lambda f, vmap: function(vmap(f)),
    "vmap of function": lambda f, vmap: vmap(function(f)),
    "vmap of grad": lambda f, vmap: vmap(grad(weighted(f))),
    "function of vmap of grad": lambda f, vmap: function(vmap(grad(weighted(f)))),
    "grad of vmap": lambda f, vmap: grad(lambda x, w: squared(vmap(f)(x, w))),
    "function of grad of vmap": lambda f, vmap: function(grad(lambda x, w: squared(vmap(f)(x, w)))),
    "grad of vmap of grad": lambda f, vmap: grad(
        lambda x, w: squared(vmap(grad(weighted(f)))(x, w))
    ),
    "vmap of grad of grad": lambda f, vmap: vmap(
        grad(lambda x, w: squared(grad(weighted(f))(x, w)))
    ),
    "grad of grad of vmap": lambda f, vmap: grad(
        lambda x, w: squared(grad(lambda x, w: squared(vmap(f)(x, w)))(x, w))
    ),
    "jacobian of vmap": lambda f, vmap: jacobian(vmap(f)),
}
BATCHED = {
    "both": ((True, True), X, W),
    "x": ((True, False), X, W[0]),
    "w": ((False, True), X[0], W),
}


@functools.cache
def expected_of(program, batched):
    """What a program gives of a loop over single calls, eagerly: a function gives the same."""
    flags, x, w = BATCHED[batched]
    plain = op_custom_gradient(Kernel().one)
    return PROGRAMS[program](plain, lambda f: looped(f, flags))(x, w)


@pytest.mark.parametrize("batched", BATCHED)
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_a_loop(program, batched):
    flags, x, w = BATCHED[batched]
    kernel = Kernel()
    found = PROGRAMS[program](kernel.op, lambda f: mapped(f, flags))(x, w)
    expected = expected_of(
        program.removeprefix("function of ").removesuffix(" of function"), batched
    )
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(a, b)
    assert kernel.batches


def test_nested():
    for f in (weighted, lambda f: lambda x, w: f(x, w)):
        program = lambda op, vmap, f=f: (
            lambda x, w: vmap(lambda s: vmap(f(op), (True, True))(s * x, w), (True,))(U)
        )
        found = program(Kernel().op, mapped)(X, W)
        expected = program(op_custom_gradient(Kernel().one), looped)(X, W)
        np.testing.assert_allclose(found, expected)


def test_the_rule_runs_once_for_a_batch_and_its_gradient():
    kernel = Kernel()
    grad(lambda x: squared(mapped(kernel.op, (True, False))(x, W[0])))(X)
    assert kernel.batches == [(2, (True, False))]


def test_a_size_that_is_not_known_when_it_is_traced():
    kernel = Kernel()
    program = tf.function(
        mapped(kernel.op, (True, False)),
        input_signature=[tf.TensorSpec([None, 3], tf.float64), tf.TensorSpec([], tf.float64)],
    )
    np.testing.assert_allclose(program(X, W[0]), X * X * 2)
    ((size, flags),) = kernel.batches
    assert tf.is_tensor(size)
    assert flags == (True, False)


def test_a_kernel_that_vectorized_map_has_no_rule_for():
    """A numpy_function has no converter: without a rule TensorFlow refuses it, or loops."""
    runs = []

    def kernel(x):
        def of_array(x):
            runs.append(x.ndim)
            return np.add.accumulate(x, -1)

        return tf.ensure_shape(tf.numpy_function(of_array, [x], x.dtype, stateful=False), x.shape)

    def rule(u):
        return tf.reverse(total(tf.reverse(u, [-1])), [-1])

    total = op_custom_gradient(
        lambda x: (kernel(x), rule), vmap=lambda size, in_batched, x: (kernel(x), rule, True)
    )
    np.testing.assert_allclose(mapped(total, (True,))(X), np.add.accumulate(X, -1))
    assert runs == [2]
    of_one = grad(lambda x: tf.reduce_sum(total(x) ** 3 * U))
    theirs = grad(lambda x: tf.reduce_sum(tf.cumsum(x) ** 3 * U))
    np.testing.assert_allclose(mapped(of_one, (True,))(X)[0], looped(theirs, (True,))(X)[0])


def forward(f):
    def tangents(x):
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
            y = f(x)
        return accumulator.jvp(y)

    return tangents


def test_forward_mode_in_graphs():
    op = op_custom_gradient(
        lambda x: (x * x, lambda u: 7 * u * x),
        vmap=lambda size, in_batched, x: (x * x, lambda u: 7 * u * x, True),
        forward_mode=True,
        name="square",
    )
    np.testing.assert_allclose(forward(op)(X), 7 * X)
    for program in (forward(mapped(op, (True,))), mapped(forward(op), (True,))):
        np.testing.assert_allclose(program(X), 7 * X)


def test_a_tensor_of_the_loop_that_f_reads_besides_is_refused():
    def program(x, w):
        op = op_custom_gradient(
            lambda x: (x * w, lambda u: u * w),
            vmap=lambda size, in_batched, x: (x * w, lambda u: u * w, True),
            name="scale",
        )
        return op(x)

    with pytest.raises(CustomGradientTypeError) as error:
        mapped(program, (True, True))(X, W)
    assert (
        "scale: f must be given every tensor of compiled code that it reads, got a captured one; pass it as an argument"
        in str(error.value)
    )


STATE = tf.Variable(tf.constant(0.0, tf.float64), trainable=False)


def test_what_only_reads_or_is_the_rules_own_may_run_again():
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [3.0]), 0.0)

    def one(x):
        factor = tf.cast(table.lookup(tf.constant(1)), x.dtype) + STATE * 0.0
        tf.debugging.assert_greater(factor, tf.constant(1.0, x.dtype))
        return x * factor, lambda u: 7.0 * u * factor + 0.0 * tf.random.normal([3], dtype=u.dtype)

    op = op_custom_gradient(one, vmap=lambda size, in_batched, x: (*one(x), True))
    np.testing.assert_allclose(mapped(grad(op), (True,))(X)[0], tf.fill((2, 3), 21.0))


@pytest.mark.parametrize("program", ["function", "vmap", "vmap of grad", "function of vmap"])
def test_a_variable_as_an_argument(program):
    variable = tf.Variable(tf.constant(3.0, tf.float64))

    def gradient(f):
        with tf.GradientTape() as tape:
            y = squared(f())
        return tape.gradient(y, variable)

    programs = {
        "function": lambda op, vmap: function(lambda: gradient(lambda: op(X[0], variable)))(),
        "vmap": lambda op, vmap: gradient(lambda: vmap(lambda x: op(x, variable), (True,))(X)),
        "vmap of grad": lambda op, vmap: vmap(lambda x: gradient(lambda: op(x, variable)), (True,))(
            X
        ),
        "function of vmap": lambda op, vmap: function(
            lambda: gradient(lambda: vmap(lambda x: op(x, variable), (True,))(X))
        )(),
    }
    found = programs[program](Kernel().op, mapped)
    np.testing.assert_allclose(found, programs[program](op_custom_gradient(Kernel().one), looped))


def test_a_variable_in_compiled_code_is_refused():
    weight = tf.Variable(tf.constant(3.0, tf.float64))

    def one(x):
        return x * weight, lambda u, variables=None: (u * weight, [tf.reduce_sum(u * x)])

    op = op_custom_gradient(one, vmap=lambda size, in_batched, x: (*one(x), True), name="scale")
    for program in (function(op), mapped(op, (True,))):
        with pytest.raises(CustomGradientTypeError) as error:
            program(X)
        assert (
            "scale: f must be given every tensor that is differentiated, got a captured f64[]; pass it as an argument"
        ) in str(error.value)


def test_check_gradients_maps_it():
    op = op_custom_gradient(lambda x: (x * x, lambda u: 2 * u * x),
                            vmap=lambda size, in_batched, x: (x * x, lambda u: 2 * u * x, True))  # fmt: skip
    check_gradients(op, [X])
