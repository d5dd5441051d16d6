"""TensorFlow: loops and branches in a graph, in the signatures of jax.lax; in eager mode they are Python's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

Tensor = Any
Tree = Any


def control_function(name: str) -> Callable[..., Any] | None:
    return None if tf.executing_eagerly() else _IN_GRAPHS[name]


def _cond(pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *operands: Any) -> Any:
    return tf.cond(pred, lambda: true_fun(*operands), lambda: false_fun(*operands))


def _while_loop(cond_fun: Callable[[Any], Any], body: Callable[[Any], Any], init: Tree) -> Tree:
    leaves = tf.nest.flatten(init)
    found = tf.while_loop(
        lambda *carried: cond_fun(tf.nest.pack_sequence_as(init, carried)),
        lambda *carried: tf.nest.flatten(body(tf.nest.pack_sequence_as(init, carried))),
        leaves,
    )
    return tf.nest.pack_sequence_as(init, found)


def _scan(step: Callable[[Any, Any], tuple[Any, Any]], carry: Tree, xs: Tree, steps: Any) -> tuple[Tree, Tree]:
    """Take the first step outside of the loop, because it tells how y is structured."""
    rows = tf.nest.flatten(xs)
    steps = tf.shape(rows[0])[0] if steps is None else steps
    carry, y = step(carry, tf.nest.map_structure(lambda x: x if x is None else x[0], xs))
    leaves, outputs = tf.nest.flatten(carry), tf.nest.flatten(y)
    present = [output for output in outputs if output is not None]
    arrays = [tf.TensorArray(o.dtype, steps, element_shape=o.shape).write(0, o) for o in present]

    def body(at: Tensor, arrays: list[Any], *carried: Tensor) -> Any:
        x = tf.nest.map_structure(lambda x: x if x is None else x[at], xs)
        next_carry, y = step(tf.nest.pack_sequence_as(carry, carried), x)
        made = [output for output in tf.nest.flatten(y) if output is not None]
        return at + 1, [array.write(at, o) for array, o in zip(arrays, made, strict=True)], *tf.nest.flatten(next_carry)

    _, arrays, *last = tf.while_loop(lambda at, *_: at < steps, body, [tf.constant(1), arrays, *leaves])
    stacked = iter([array.stack() for array in arrays])
    ys = tf.nest.pack_sequence_as(y, [None if output is None else next(stacked) for output in outputs])
    return tf.nest.pack_sequence_as(carry, last), ys


_IN_GRAPHS: dict[str, Callable[..., Any]] = {"cond": _cond, "while_loop": _while_loop, "scan": _scan}
