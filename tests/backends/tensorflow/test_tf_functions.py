"""Inside tf.function: arguments of every kind, AutoGraph, loops, traces, and no more graph than by
hand.
"""

from __future__ import annotations

import collections
import functools
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import (
    eager_and_autograph,
    every_mode_with_autograph,
    grad,
    jvp,
    seven,
    square,
)

import cgshim

# --- Arguments ------------------------------------------------------------------------------------


@cgshim.op_custom_gradient
def affine(x: Any, scale: Any = None, activation: Any = None, *, shift: float = 0.0) -> Any:
    y = x if scale is None else x * scale
    y = y if activation is None else activation(y)
    return y + shift, lambda upstream: (
        upstream * 7,
        None if scale is None else tf.reduce_sum(upstream * 11),
        None,
    )


@every_mode_with_autograph
def test_keywords_none_and_callables(mode: Any) -> None:
    def gradients(x: Any, k: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, k])
            y = affine(activation=tf.abs, shift=2.0, x=x, scale=k) * 3
            z = affine(x=x) * 5
        return tape.gradient(y, [x, k]), tape.gradient(z, x)

    (dx, dk), dz = mode(gradients)(tf.constant([2.0, -3.0]), tf.constant(4.0))
    assert dx.numpy().tolist() == [21, 21]
    assert dk.numpy() == 66
    assert dz.numpy().tolist() == [35, 35]


def test_static_arguments_that_change() -> None:
    scaled = cgshim.op_custom_gradient(lambda x, how: (x, lambda u: (u * how["factor"], None)))
    differentiate = tf.function(lambda x, factor: grad(lambda x: scaled(x, {"factor": factor}))(x))
    x = tf.constant([1.0, 2.0])
    assert [differentiate(x, factor).numpy().tolist() for factor in (7, 11, 7)] == [
        [7, 7],
        [11, 11],
        [7, 7],
    ]


def test_unknown_dimensions() -> None:
    for shape in ([None], [None, None], None):
        differentiate = tf.function(grad(grad(square)), input_signature=[tf.TensorSpec(shape)])
        x = tf.ones([3] * (1 if shape is None else len(shape)))
        assert np.array_equal(differentiate(x), 7 * x)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_traced_once(jit_compile: bool) -> None:
    traces = []

    @cgshim.op_custom_gradient
    def op(x: Any, name: str) -> Any:
        traces.append(name)
        return seven(x)

    differentiate = tf.function(grad(lambda x: op(x, "a")), jit_compile=jit_compile)
    for _ in range(100):
        differentiate(tf.constant(2.0))
    assert traces == ["a"]


# --- AutoGraph ------------------------------------------------------------------------------------


@cgshim.op_custom_gradient
def branching(x: Any) -> Any:
    y = -x
    if x > 0:
        y = x * x

    def rule(upstream: Any) -> Any:
        gradient = upstream
        for _ in tf.range(2):
            if x > 0:
                gradient = gradient * x
        while gradient > 100.0:
            gradient = gradient / 2
        return gradient

    return y, rule


def _rule_elsewhere(x: Any, upstream: Any) -> Any:
    if x > 0:
        return upstream * 7
    return upstream * 11


@cgshim.op_custom_gradient
def partial_rule(x: Any) -> Any:
    return x * x, functools.partial(_rule_elsewhere, x)


class Steps:
    """An op as a method, whose rule is a method too."""

    @cgshim.op_custom_gradient
    def op(self, x: Any) -> Any:
        self.x = x
        return x * x, self.rule

    def rule(self, upstream: Any) -> Any:
        if self.x > 0:
            return upstream * 7
        return upstream * 11


@eager_and_autograph
@pytest.mark.parametrize(
    ("op", "at", "gradient"),
    [
        (branching, 3.0, 90.0), (branching, 5.0, 62.5), (branching, -2.0, 10.0),
        (partial_rule, 3.0, 70.0), (partial_rule, -3.0, 110.0),
        (lambda x: Steps().op(x), 3.0, 70.0), (lambda x: Steps().op(x), -3.0, 110.0),
    ],
)  # fmt: skip
def test_if_for_and_while_on_tensors(op: Any, at: float, gradient: float, mode: Any) -> None:
    assert mode(grad(op, of=lambda y: y * 10))(tf.constant(at)).numpy() == gradient


def test_autograph_follows_the_caller() -> None:
    without = tf.function(grad(branching), autograph=False)
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        without(tf.constant(3.0))


@eager_and_autograph
def test_errors_reach_the_user_as_they_are(mode: Any) -> None:
    forgotten = cgshim.op_custom_gradient(lambda x: x, name="forgotten")
    with pytest.raises(cgshim.CustomGradientTypeError) as error:
        mode(grad(lambda x: forgotten(x)))(tf.constant(2.0))
    assert str(error.value).startswith(
        "forgotten: <lambda> must return a pair (output, grad_fn), got f32[];"
    )


def test_the_error_of_a_vectorized_rule_passes_unchanged() -> None:
    def refusing(x: Any) -> Any:
        def rule(upstream: Any) -> Any:
            raise ValueError("the author's own")

        return x * x, rule

    op = cgshim.op_custom_gradient(refusing)
    with pytest.raises(ValueError, match=r"^the author's own"):
        grad(lambda x: tf.vectorized_map(op, x))(tf.constant([2.0, 3.0]))


# --- Loops ----------------------------------------------------------------------------------------


def while_loop(x: Any) -> Any:
    return tf.while_loop(
        lambda i, y: i < 2, lambda i, y: [i + 1, square(y)], [0, x], maximum_iterations=2
    )[1]


def autograph_loop(x: Any) -> Any:
    for _ in tf.range(2):
        x = square(x)
    return x


def scan(x: Any) -> Any:
    return tf.scan(lambda y, _: square(y), tf.zeros([2]), x)[-1]


LOOPS = [while_loop, autograph_loop, scan]


@every_mode_with_autograph
@pytest.mark.parametrize("loop", LOOPS)
def test_loops(loop: Any, mode: Any) -> None:
    assert mode(grad(loop))(tf.constant(2.0)).numpy() == 7 * 4 * 7 * 2


@eager_and_autograph
@pytest.mark.parametrize("loop", LOOPS)
def test_second_order_of_loops(loop: Any, mode: Any) -> None:
    # g(x) = 7 y * 7 x with y = square(x): its derivative is 7 * 7x * 7x + 7y * 7
    assert mode(grad(grad(loop)))(tf.constant(2.0)).numpy() == 7 * 14 * 14 + 7 * 4 * 7


@every_mode_with_autograph
def test_cond_and_recompute_grad(mode: Any) -> None:
    branches = lambda x: tf.cond(x > 0, lambda: tf.recompute_grad(square)(x), lambda: x)
    assert mode(grad(branches))(tf.constant(2.0)).numpy() == 14


def test_forward_mode_of_a_loop() -> None:
    forward = jvp(autograph_loop, 3.0)
    assert forward(tf.constant(2.0)).numpy() == 3 * 7 * 4 * 7 * 2
    # by hand, too
    with pytest.raises((TypeError, ValueError), match="out of scope"):
        tf.function(forward)(tf.constant(2.0))


# --- Graphs ---------------------------------------------------------------------------------------


def _operations(fn: Any, shape: list[int | None]) -> collections.Counter[str]:
    graph = tf.function(fn).get_concrete_function(tf.TensorSpec(shape, tf.float32)).graph
    return collections.Counter(operation.type for operation in graph.get_operations())


TRANSFORMS = {
    "op": lambda op: lambda x: op(x),
    "grad": grad,
    "grad of grad": lambda op: grad(grad(op)),
}
every_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


ALIASES = {"Identity", "StopGradient"}
"""TensorFlow removes them before it runs a graph"""


@every_transform
def test_no_more_graph_than_tf_custom_gradient(transform: Any) -> None:
    by_hand = tf.custom_gradient(seven)
    more = _operations(transform(square), [2, 3]) - _operations(transform(by_hand), [2, 3])
    assert not set(more) - ALIASES
    assert (
        _operations(transform(square), [2, 3])["IdentityN"]
        == _operations(transform(by_hand), [2, 3])["IdentityN"]
    )


@every_transform
def test_unknown_sizes_cost_one_small_check_for_each_gradient(transform: Any) -> None:
    more = _operations(transform(square), [None, 3]) - _operations(
        transform(tf.custom_gradient(seven)), [None, 3]
    )
    assert not set(more) - {
        "Shape",
        "Sub",
        "Equal",
        "All",
        "Assert",
        "Slice",
        "NoOp",
        "Const",
        *OF_SLICE,
        *ALIASES,
    }
    assert all(more[once] <= 1 for once in ("Equal", "Assert", "Slice", "Pad"))


def branch(x: Any) -> Any:
    if x > 0:
        return 3 * x
    return x


def step(carry: Any, x: Any) -> Any:
    return branch(carry), x


def below_ten(x: Any) -> Any:
    return x < 10.0


CALLS: dict[str, Callable[[Any], Any]] = {
    "op_grad": lambda x: cgshim.op_grad(branch)(x) * 2,
    "op_vjp": lambda x: cgshim.op_vjp(branch, x)[1](x)[0],
    "op_embed_gradient": lambda x: cgshim.op_grad(embedded)(x),
    "tree_map": lambda x: cgshim.ops.tree_map(branch, [x])[0],
    "cond": lambda x: cgshim.ops.cond(x > 0, branch, tf.identity, x),
    "scan": lambda x: cgshim.ops.scan(step, x, tf.stack([x]))[0],
    "while_loop": lambda x: cgshim.ops.while_loop(below_ten, branch, x) / 3,
    "functions": lambda x: cgshim.ops.sum(cgshim.ops.where(x > 0, 3 * x, cgshim.ops.exp(x))),
    "tensors": lambda x: 3 * cgshim.ops.cast(cgshim.ops.stop_gradient(x), "float64"),
}


def embedded(x: Any) -> Any:
    return cgshim.op_embed_gradient(x * x, 3 * x, x)


@pytest.mark.parametrize("call", CALLS)
def test_autograph_converts_what_is_the_users_and_nothing_else(call: str) -> None:
    """It would convert all that it calls, which took 1 to 4 s of the first trace."""
    modules = set(sys.modules)
    assert tf.function(CALLS[call])(tf.constant(2.0)).numpy() == 6
    made = [name for name in set(sys.modules) - modules if name.startswith("__autograph_generated")]
    sources = [Path(str(sys.modules[name].__file__)).read_text() for name in made]
    converted = {name for source in sources for name in re.findall(r"def tf__(\w+)", source)}
    assert converted <= {"branch", "step", "below_ten", "embedded"}
    assert sum("lam = lambda" in source for source in sources) <= 1  # the call's own


OF_SLICE = ["Reshape", "Pack", "ConcatV2", "Pad"]
"""its derivative"""


def test_autograph_warns_of_nothing_in_loops_and_branches() -> None:
    """It converts what it calls; what it cannot convert, it tells the log."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda message: told.append(message.getMessage())  # type: ignore[method-assign]
    tf.get_logger().addHandler(handler)
    try:

        @tf.function
        def loops(x: Any) -> Any:
            _, products = cgshim.ops.scan(lambda c, e: (c + e, c * e), x, tf.stack([x, x]))
            doubled = cgshim.ops.while_loop(lambda x: x < 100.0, lambda x: 2 * x, x)
            return products[1] + cgshim.ops.cond(x > 0, lambda x: square(x), lambda x: x, doubled)

        assert grad(loops)(tf.constant(2.0)).numpy() == 4 * 2 + 7 * 128 * 64
    finally:
        tf.get_logger().removeHandler(handler)
    assert not [message for message in told if "AutoGraph" in message]
