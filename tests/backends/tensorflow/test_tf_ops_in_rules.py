"""An op that is called while a rule runs: what it captures is differentiated as anywhere else."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import tensorflow as tf
from tf_modes import every_mode, function, grad, jvp, square

import cgshim

CAPTURED = "^inner: grad_fn must take variables"


@every_mode
@pytest.mark.parametrize(
    "outer", [lambda op: grad(op), lambda op: grad(grad(op))], ids=["first order", "second order"]
)
def test_what_op_vjp_differentiates_in_a_rule_is_differentiated(outer: Any, mode: Any) -> None:
    """Though it was made of x, which the inner op is given."""

    @cgshim.op_custom_gradient
    def op(x: Any) -> Any:
        def of(z: Any) -> Any:
            return cgshim.op_custom_gradient(lambda x: (x * z, lambda u: u * z), name="inner")(x)

        return x * x, lambda upstream: upstream * cgshim.op_vjp(of, 3 * x)[1](tf.ones_like(x))[0]

    with pytest.raises(cgshim.CustomGradientTypeError, match=CAPTURED):
        mode(outer(op))(tf.constant(2.0))


# TensorFlow captures small tensors in another way than large ones
@pytest.mark.parametrize("size", [1, 1000])
def test_an_inner_op_captures_an_eager_tensor_in_a_function(size: int) -> None:
    c = tf.fill([size], 3.0)

    @cgshim.op_custom_gradient
    def op(x: Any) -> Any:
        inner = cgshim.op_custom_gradient(lambda u: (u * c[0], lambda v: v * 7))
        return x * x, lambda upstream: inner(upstream) * x

    assert function(grad(op, of=lambda y: y * 5))(tf.constant(2.0)).numpy() == 5 * 3 * 2


@every_mode
def test_what_an_accumulator_computes_is_not_captured(mode: Any) -> None:
    twice = lambda x: square(2 * x)
    for outer in (grad, lambda fn: jvp(fn, 1.0)):
        assert mode(outer(jvp(twice, 1.0)))(tf.constant(3.0)).numpy() == 2 * 2 * 7

    @cgshim.op_custom_gradient(forward_mode=True)
    def op(x: Any) -> Any:
        return x * x, lambda u: u * 7 * x

    assert mode(jvp(op, 3.0))(tf.constant(2.0)).numpy() == 42


def _plus(read: Any, x: Any) -> Any:
    return x + read(), lambda upstream: upstream


def test_threads_see_what_they_capture_each() -> None:
    missed: list[int] = []

    def work() -> None:
        for _ in range(20):
            x, c = tf.constant(2.0), tf.constant(3.0)
            add = functools.partial(tf.py_function, lambda c: c, [c], x.dtype)
            op = cgshim.op_custom_gradient(functools.partial(_plus, add))
            with tf.GradientTape() as tape:
                tape.watch([x, c])
                try:
                    op(x)
                except cgshim.CustomGradientTypeError:
                    continue
                missed.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not missed


# --- Rules that say "not differentiable" ----------------------------------------------------------


class NotDifferentiableError(Exception):
    """The author's own."""


@cgshim.op_custom_gradient(forward_mode=True)
def forbidden(x: Any) -> Any:
    def rule(upstream: Any) -> Any:
        raise NotDifferentiableError("not here")

    return x * x, rule


@every_mode
def test_a_rule_that_raises_does_so_when_a_gradient_is_taken(mode: Any) -> None:
    x = tf.constant([2.0, 3.0])
    forward = {
        "call": forbidden,
        "vectorized_map": lambda x: tf.vectorized_map(forbidden, x),
        "map_fn": lambda x: tf.map_fn(forbidden, x),
        "an accumulator of another tensor": lambda x: jvp(lambda z: z * forbidden(x), [1.0, 1.0])(
            tf.constant([0.0, 0.0])
        ),
    }
    for fn in forward.values():
        assert mode(fn)(x).numpy().tolist() == [4, 9]
    for transform in (grad(forbidden), grad(forward["vectorized_map"]), jvp(forbidden, [1.0, 1.0])):
        with pytest.raises(NotDifferentiableError, match="not here"):
            mode(transform)(x)
