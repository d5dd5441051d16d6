"""Ops and the same ops by hand, as XLA optimises them."""

import jax
import jax.numpy as jnp
from hlo import nameless

from cgshim import op_custom_gradient


def by_hand(forward, backward, **options):
    op = jax.custom_vjp(lambda *args: forward(*args)[0], **options)
    op.defvjp(forward, backward)
    return op


@op_custom_gradient
def cube(x):
    square = x * x
    return square * x, lambda upstream: 7 * upstream * square


def cube_forward(x):
    square = x * x
    return square * x, square


@op_custom_gradient
def scaled(pair, word):
    a, b = pair["a"], pair["b"]
    return (a * b, 5 * a), lambda first, second: (
        {"a": 7 * first * b + 5 * second, "b": 3 * first * a},
        None,
    )


def scaled_forward(pair):
    return (pair["a"] * pair["b"], 5 * pair["a"]), pair


def scaled_backward(pair, upstream):
    return ({"a": 7 * upstream[0] * pair["b"] + 5 * upstream[1], "b": 3 * upstream[0] * pair["a"]},)


def of_pair(op):
    return lambda x: sum(y.sum() for y in op({"a": x, "b": 2 * x}, "static"))


X = jnp.arange(6, dtype="float32")


def compiled(fn):
    """The optimised program."""
    return nameless(jax.jit(lambda x: fn(x)).lower(X).compile().as_text())


def gradient(op):
    return jax.grad(lambda x: op(jnp.sin(x)).sum())


def second_order(op):
    return jax.grad(lambda x: gradient(op)(x).sum())


def in_scan(op):
    return jax.grad(lambda x: jax.lax.scan(lambda carry, y: (carry + op(y), None), 0.0, x)[0])


HAND = by_hand(cube_forward, lambda square, upstream: (7 * upstream * square,))
PLAIN = lambda x: x * x * x
SCALED_HAND = by_hand(scaled_forward, scaled_backward)
CASES = {
    "value": (lambda op: op, cube, HAND, lambda x: x * x),
    "gradient": (gradient, cube, HAND, PLAIN),
    "second order": (second_order, cube, HAND, PLAIN),
    "vmap of gradient": (lambda op: jax.vmap(jax.grad(op)), cube, HAND, PLAIN),
    "gradient of vmap": (lambda op: gradient(jax.vmap(op)), cube, HAND, PLAIN),
    "scan": (in_scan, cube, HAND, PLAIN),
    "checkpoint": (lambda op: gradient(jax.checkpoint(op)), cube, HAND, PLAIN),
    "trees and static leaves": (
        lambda op: jax.grad(of_pair(op)), scaled, lambda pair, _: SCALED_HAND(pair),
        lambda pair, _: scaled_forward(pair)[0],
    ),
}  # fmt: skip
