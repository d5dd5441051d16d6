"""once_differentiable=True: the first order as ever; its derivative is refused, and nothing is kept
for that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import eager_and_function, every_mode, function, grad, jvp, vectorized

import cgshim

X, V = [2.0, -3.0], [1.0, 10.0]
REFUSED = "once: a rule that is once_differentiable gives a gradient without derivatives"


@cgshim.op_custom_gradient(once_differentiable=True, forward_mode=True)
def once(x: Any) -> Any:
    i = tf.sin(x)
    return i * x, lambda upstream: upstream * 7 * i


def jacobian(fn: Any) -> Any:
    def of(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fn(x)
        return tf.linalg.diag_part(tape.jacobian(y, x))

    return of


def persistently(fn: Any) -> Any:
    def gradient(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = fn(x)
            return tape.gradient(y, x)

    return gradient


FIRST = {
    "tape": grad,
    "persistent tape": persistently,
    "jacobian": jacobian,
    "tape of vectorized_map": lambda fn: grad(vectorized(fn)),
    "vectorized_map of tape": lambda fn: vectorized(grad(fn)),
    "tape of map_fn": lambda fn: grad(lambda x: tf.map_fn(fn, x)),
    "tape of recompute_grad": lambda fn: grad(tf.recompute_grad(fn)),
    "tape of tf.function": lambda fn: grad(function(fn)),
    "ForwardAccumulator": lambda fn: jvp(fn, [1.0, 1.0]),
}
SECOND = {
    "tape of tape": lambda fn: grad(grad(fn)),
    "tape of persistent tape": lambda fn: grad(persistently(fn)),
    "jacobian of tape": lambda fn: jacobian(grad(fn)),
    "tape of vectorized_map of tape": lambda fn: grad(vectorized(grad(fn))),
    "tape of tape of map_fn": lambda fn: grad(grad(lambda x: tf.map_fn(fn, x))),
    "tape of tape of tf.function": lambda fn: grad(grad(function(fn))),
    "tape of tf.function of tape": lambda fn: grad(function(grad(fn))),
    "forward over reverse": lambda fn: jvp(grad(fn), [1.0, 1.0]),
    "reverse over forward": lambda fn: grad(jvp(fn, [1.0, 1.0])),
    "forward over forward": lambda fn: jvp(jvp(fn, [1.0, 1.0]), [1.0, 1.0]),
}


@every_mode
@pytest.mark.parametrize("transform", FIRST.values(), ids=FIRST)
def test_first_order(transform: Any, mode: Any) -> None:
    np.testing.assert_allclose(
        mode(transform(once))(tf.constant([1.0, 2.0])), 7 * np.sin([1.0, 2.0]), rtol=1e-5
    )


@every_mode
@pytest.mark.parametrize("transform", SECOND.values(), ids=SECOND)
def test_second_order_is_refused(transform: Any, mode: Any) -> None:
    with pytest.raises(cgshim.TransformationError) as error:
        mode(transform(once))(tf.constant([1.0, 2.0]))
    assert REFUSED in str(error.value)


@eager_and_function
def test_the_derivative_by_upstream_is_refused_too(mode: Any) -> None:
    def by_upstream(u: Any) -> Any:
        x = tf.constant(2.0)
        with tf.GradientTape() as outer:
            outer.watch(u)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = once(x)
            gradient = inner.gradient(y, x, output_gradients=u)
        return outer.gradient(gradient, u)

    with pytest.raises(cgshim.TransformationError, match="once_differentiable"):
        mode(by_upstream)(tf.constant(3.0))


@eager_and_function
def test_variables_and_the_rules_own_tape(mode: Any) -> None:
    w = tf.Variable(3.0)

    @cgshim.op_custom_gradient(once_differentiable=True)
    def op(x: Any) -> Any:
        def rule(upstream: Any, variables: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x * x * w
            of_x, of_w = tape.gradient(y, [x, w])
            return upstream * 7 * of_x, [upstream * 11 * of_w]

        return x * w, rule

    def gradients(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = op(x) * 5
        return tape.gradient(y, [x, w])

    assert [g.numpy() for g in mode(gradients)(tf.constant(2.0))] == [5 * 7 * 12, 5 * 11 * 4]


@eager_and_function
def test_a_captured_tensor_is_refused(mode: Any) -> None:
    def gradient(x: Any) -> Any:
        op = cgshim.op_custom_gradient(
            lambda y: (y * x, lambda u: u), once_differentiable=True, name="op"
        )
        return grad(lambda x: op(tf.identity(x)))(x)

    with pytest.raises(cgshim.CustomGradientTypeError, match="grad_fn must take variables"):
        mode(gradient)(tf.constant(2.0))


def test_saved_model_has_the_first_order(tmp_path: Path) -> None:
    module = tf.Module()
    module.once = tf.function(lambda x: once(x) * 2, input_signature=[tf.TensorSpec([None])])
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    tf.saved_model.save(module, str(tmp_path), options=options)
    loaded = tf.saved_model.load(str(tmp_path)).once
    x = tf.constant([1.0, 2.0])
    np.testing.assert_allclose(grad(loaded)(x), 14 * np.sin([1.0, 2.0]), rtol=1e-5)
    with pytest.raises(
        (LookupError, cgshim.TransformationError), match=r"No gradient defined|once_differentiable"
    ):
        grad(grad(loaded))(x)


PEAK = Path(__file__).parent / "programs" / "peak.py"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_peak_memory_is_that_of_a_custom_gradient_by_hand() -> None:
    # without the second, glibc hands freed tensors back or not, as it happens
    own = {"TF_CPP_MIN_LOG_LEVEL": "2", "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment = {**os.environ, **own}
    result = subprocess.run(
        [sys.executable, str(PEAK)], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    found = {
        name: float(peak)
        for name, peak in (line.split(": ") for line in result.stdout.splitlines())
    }
    for tapes in ("gradient", "nested"):
        assert found[f"once, {tapes}"] <= 1.01 * found[f"unrecorded by hand, {tapes}"]
        assert found[f"twice, {tapes}"] <= 1.01 * found[f"by hand, {tapes}"]
    # the tapes keep what f computes
    seen = found["by hand, nested"] > 1.2 * found["unrecorded by hand, nested"]
    assert seen, "the measure sees nothing"


def test_once_differentiable_has_no_forward_mode() -> None:
    """An accumulator around a tf.function builds second derivatives with the first ones."""
    once = cgshim.op_custom_gradient(
        lambda x: (x * x * x, lambda u: u * 7 * x * x), once_differentiable=True
    )
    for transform in (jvp(tf.function(once), V), jvp(lambda x: jvp(tf.function(once), V)(x), V)):
        with pytest.raises(cgshim.TransformationError, match="once_differentiable"):
            transform(tf.constant(X))
