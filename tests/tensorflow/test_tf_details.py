"""Details that only TensorFlow has, each of which a small mistake would change unseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import jvp

import cgshim
from cgshim_tensorflow._fits import _equal

X, V = [2.0, -3.0], [1.0, 10.0]
raw = tf.raw_ops


def flat_sum(total: Any) -> Any:
    """One number, in the first of two places."""
    return tf.reshape(total, []) * tf.constant([1.0, 0.0])


def line(x: Any, axes: int) -> Any:
    """Two numbers along the last axis but one, as an image is."""
    return tf.reshape(x, [*[1] * (axes - 2), 2, 1])


def one(x: Any, axes: int) -> Any:
    """The first number, as a filter is."""
    return tf.reshape(x[:1], [1] * axes)


def to_input(function: Any, axes: int, filter: Any, upstream: Any) -> Any:
    sizes = {"input_sizes": [*[1] * (axes - 2), 2, 1], "strides": [1] * axes, "padding": "VALID"}
    return tf.reshape(function(filter=filter, out_backprop=upstream, **sizes), [2])


def to_filter(function: Any, axes: int, input: Any, upstream: Any) -> Any:
    sizes = {"filter_sizes": [1] * axes, "strides": [1] * axes, "padding": "VALID"}
    return flat_sum(function(input=input, out_backprop=upstream, **sizes))


TO_INPUT = {
    raw.Conv2DBackpropInput: 4, raw.DepthwiseConv2dNativeBackpropInput: 4, raw.Conv3DBackpropInputV2: 5,
}  # fmt: skip
TO_FILTER = {
    raw.Conv2DBackpropFilter: 4, raw.DepthwiseConv2dNativeBackpropFilter: 4, raw.Conv3DBackpropFilterV2: 5,
}  # fmt: skip
SPARSE = {"a_indices": [[0, 0], [1, 1]], "a_shape": [2, 2]}
POOLED = {"ksize": [1] * 4, "strides": [1] * 4, "padding": "VALID"}

LINEAR: dict[str, tuple[Callable[[Any, Any], Any], list[float]]] = {
    "pooled": (
        lambda x, u: 5 * tf.reshape(
            raw.MaxPoolGrad(orig_input=line(x, 4), orig_output=line(x, 4), grad=line(u, 4), **POOLED), [2]
        ),
        [5, 50],
    ),
    "padded": (lambda x, u: raw.PadV2(input=3 * u[:1], paddings=[[0, 1]], constant_values=0.0), [3, 0]),
    "the values of a sparse matrix": (
        lambda x, u: tf.reshape(raw.SparseTensorDenseMatMul(a_values=u, b=[[5.0], [7.0]], **SPARSE), [2]), [5, 70]
    ),
    "beside a sparse matrix": (
        lambda x, u: tf.reshape(raw.SparseTensorDenseMatMul(a_values=[5.0, 7.0], b=u[:, None], **SPARSE), [2]), [5, 70]
    ),
    "the gradient of a slice": (
        lambda x, u: raw.StridedSliceGrad(shape=[2], begin=[1], end=[2], strides=[1], dy=3 * u[:1]), [30, 0]
    ),
    "added in a place": (lambda x, u: tf.tensor_scatter_nd_add(u, [[0]], 3 * u[1:]), [1, 13]),
    "added to zeros": (lambda x, u: tf.tensor_scatter_nd_add(tf.zeros(2), [[0]], 3 * u[1:]), [0, 3]),
    "put in a place": (lambda x, u: tf.tensor_scatter_nd_update(u, [[0]], 3 * u[1:]), [0, 13]),
}  # fmt: skip
for _function, _axes in TO_INPUT.items():
    LINEAR[f"{_function.__name__} by upstream"] = (
        lambda x, u, f=_function, n=_axes: to_input(f, n, tf.fill([1] * n, 3.0), line(u, n)), [3, 30]
    )  # fmt: skip
    LINEAR[f"{_function.__name__} by filter"] = (
        lambda x, u, f=_function, n=_axes: to_input(f, n, one(u, n), line(x, n)), [-28, 0]
    )  # fmt: skip
for _function, _axes in TO_FILTER.items():
    LINEAR[f"{_function.__name__} by upstream"] = (
        lambda x, u, f=_function, n=_axes: to_filter(f, n, line(x, n), line(u, n)), [2, -3]
    )  # fmt: skip
    LINEAR[f"{_function.__name__} by input"] = (
        lambda x, u, f=_function, n=_axes: to_filter(f, n, line(u, n), line(x, n)), [2, -3]
    )  # fmt: skip

NOT_LINEAR: dict[str, Callable[[Any, Any], Any]] = {
    "ones where it is masked": lambda x, u: tf.where(x > 0, u, tf.ones_like(u)),
    "padded with a number": lambda x, u: raw.PadV2(input=u[:1], paddings=[[0, 1]], constant_values=1.0),
    "the number that is padded with": lambda x, u: raw.PadV2(input=u[:1], paddings=[[0, 1]], constant_values=u[0]),
    "added to ones": lambda x, u: tf.tensor_scatter_nd_add(tf.ones(2), [[0]], u[1:]),
    "ones added": lambda x, u: tf.tensor_scatter_nd_add(u, [[0]], tf.ones(1)),
    "put in ones": lambda x, u: tf.tensor_scatter_nd_update(tf.ones(2), [[0]], u[1:]),
    "ones put in": lambda x, u: tf.tensor_scatter_nd_update(u, [[0]], tf.ones(1)),
}


def op_of(rule: Callable[[Any, Any], Any], promised: bool) -> Any:
    return cgshim.op_custom_gradient(lambda x: (x * x, lambda u: rule(x, u)), forward_mode=promised, name="op")


@pytest.mark.parametrize(("rule", "tangent"), LINEAR.values(), ids=LINEAR)
def test_operations_that_are_linear(rule: Any, tangent: list[float]) -> None:
    found = jvp(op_of(rule, promised=False), V)(tf.constant(X))
    np.testing.assert_allclose(tf.convert_to_tensor(found), tangent, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("promised", [True, False], ids=["promised", "not promised"])
@pytest.mark.parametrize("rule", NOT_LINEAR.values(), ids=NOT_LINEAR)
def test_operations_that_are_not_linear(rule: Any, promised: bool) -> None:
    with pytest.raises(cgshim.TransformationError, match="op: forward mode needs a rule that is linear"):
        jvp(op_of(rule, promised), V)(tf.constant(X))


def test_what_an_integer_is_made_of_is_named() -> None:
    with pytest.raises(cgshim.TransformationError, match="got Cast in the rule"):
        jvp(op_of(lambda x, u: tf.cast(tf.cast(u, tf.int32) * 2, u.dtype), promised=True), V)(tf.constant(X))


def test_a_function_of_what_has_no_second_derivative_has_no_forward_mode() -> None:
    """An accumulator around a tf.function builds second derivatives with the first ones."""
    once = cgshim.op_custom_gradient(lambda x: (x * x * x, lambda u: u * 7 * x * x), once_differentiable=True)
    for transform in (jvp(tf.function(once), V), jvp(lambda x: jvp(tf.function(once), V)(x), V)):
        with pytest.raises(cgshim.TransformationError, match="once_differentiable"):
            transform(tf.constant(X))


@pytest.mark.parametrize("other", [[1], [1, 2], [[1, 1]], [1, 2, 1]])
def test_indices_are_equal_in_shape_too(other: list[Any]) -> None:
    """TensorFlow's own comparison broadcasts."""
    one = tf.constant([1, 1])
    assert bool(_equal(one, tf.constant([1, 1], tf.int64)))
    assert not bool(_equal(one, tf.constant(other)))


@pytest.mark.parametrize("multiply", [lambda x, w: x * w, lambda x, w: w * x], ids=["behind", "before"])
def test_a_captured_tensor_of_a_graph_is_found_on_both_sides_of_the_argument(multiply: Any) -> None:
    @tf.function
    def differentiated(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            read = w * 2.0
            op = cgshim.op_custom_gradient(lambda x: (multiply(x, read), lambda u: u * 7.0), name="op")
            y = op(x)
        return tape.gradient(y, [x, w])

    with pytest.raises(cgshim.CustomGradientTypeError, match=r"^op: "):
        differentiated(tf.constant(X), tf.constant(V))
