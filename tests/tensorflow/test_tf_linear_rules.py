"""Which rules are seen to be linear in upstream, and so have a forward mode unasked; and which have
none at all.
"""

from __future__ import annotations

import functools
import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import calls_of, eager_and_function, every_mode, grad, jvp

import cgshim

X, V = [2.0, -3.0], [1.0, 10.0]

relu = tf.function(tf.nn.relu)
LINEAR: dict[str, tuple[Callable[[Any, Any], Any], list[float]]] = {
    "scaled": (lambda x, u: 7 * u * x, [14, -210]),
    "sum of two": (lambda x, u: u * x - 3 * u, [-1, -60]),
    "quotient": (lambda x, u: -u / 4.0, [-0.25, -2.5]),
    "mask": (lambda x, u: tf.where(x > 0, 5 * u, tf.zeros_like(u)), [5, 0]),
    "padded with zeros": (lambda x, u: tf.concat([3 * u[:1], tf.zeros_like(u[1:])], 0), [3, 0]),
    "gathered and reversed": (
        lambda x, u: tf.reverse(tf.gather(u, [0, 1]), [0]) * [3.0, 5.0],
        [50, 3],
    ),
    "matrix": (lambda x, u: tf.linalg.matvec([[1.0, 2.0], [3.0, 4.0]], u), [31, 42]),
    "summed and stacked": (lambda x, u: tf.stack([tf.reduce_sum(u), 0 * u[0]]), [1, 1]),
    "einsum": (lambda x, u: tf.einsum("i,i->i", u, x), [2, -30]),
    "fft": (lambda x, u: tf.math.real(tf.signal.fft(tf.cast(u, tf.complex64))), [11, -9]),
    "nothing": (lambda x, u: (None,), [0, 0]),
}
NOT_LINEAR: dict[str, Callable[[Any, Any], Any]] = {
    "affine": lambda x, u: u + 1,
    "affine in x": lambda x, u: 3 * u - x,
    "constant": lambda x, u: x * 3,
    "sign": lambda x, u: tf.sign(u),
    "round": lambda x, u: tf.round(u) * x,
    "floor": lambda x, u: tf.floor(u) + u,
    "square": lambda x, u: u * u,
    "stop_gradient": lambda x, u: tf.stop_gradient(u),
    "cast": lambda x, u: tf.cast(tf.cast(u, tf.int32), u.dtype) * x,
    "clipped": lambda x, u: tf.clip_by_value(u, -1.0, 1.0),
    "numpy_function": lambda x, u: tf.ensure_shape(
        tf.numpy_function(lambda u: 7 * u, [u], u.dtype), u.shape
    ),
    "padded with ones": lambda x, u: tf.concat([u[:1], tf.ones_like(u[1:])], 0),
    "mask of upstream": lambda x, u: tf.where(u > 0, u, 2 * u),
    "power": lambda x, u: tf.pow(u, 3.0),
    "cumulative product": lambda x, u: tf.math.cumprod(u),
    "relu within a function": lambda x, u: relu(u) * x,
    "a branch on upstream": lambda x, u: tf.cond(u[0] > 0, lambda: 7 * u, lambda: 6 * u),
}
IN_PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    "numpy": lambda x, u: u * u.numpy(),
    "float": lambda x, u: u * float(u[0]),
    "asarray": lambda x, u: u * np.asarray(u).max(),
    "if": lambda x, u: u * 7 if tf.reduce_all(u > 0) else u * 6,
}


def op_of(rule: Callable[[Any, Any], Any], promised: bool) -> Any:
    return cgshim.op_custom_gradient(
        lambda x: (x * x, lambda u: rule(x, u)), forward_mode=promised, name="op"
    )


@every_mode
@pytest.mark.parametrize("promised", [True, False], ids=["promised", "not promised"])
@pytest.mark.parametrize(("rule", "tangent"), LINEAR.values(), ids=LINEAR)
def test_linear(rule: Any, tangent: list[float], promised: bool, mode: Any) -> None:
    found = mode(jvp(op_of(rule, promised), V))(tf.constant(X))
    # IndexedSlices of a gather
    np.testing.assert_allclose(tf.convert_to_tensor(found), tangent, rtol=1e-5, atol=1e-5)


@eager_and_function
@pytest.mark.parametrize("promised", [True, False], ids=["promised", "not promised"])
@pytest.mark.parametrize("rule", NOT_LINEAR.values(), ids=NOT_LINEAR)
def test_not_linear(rule: Any, promised: bool, mode: Any) -> None:
    op = op_of(rule, promised)
    for transform in (jvp(op, V), jvp(grad(op), V), grad(jvp(op, V))):
        with pytest.raises(
            cgshim.TransformationError, match="op: forward mode needs a rule that is linear"
        ):
            mode(transform)(tf.constant(X))


@pytest.mark.parametrize(
    ("promised", "message"), [(True, "not proportional to upstream"), (False, "say so")]
)
@pytest.mark.parametrize("rule", IN_PYTHON.values(), ids=IN_PYTHON)
def test_a_rule_that_reads_values_in_python_is_not_proportional_to_upstream(
    rule: Any, promised: bool, message: str
) -> None:
    assert jvp(tf.custom_gradient(lambda x: (x * x, lambda u: rule(x, u))), V)(tf.constant(X)).numpy().tolist() == [
        4, -60
    ], "by hand it is autodiff's tangent"  # fmt: skip
    for _ in range(2):  # what was found at the first call is not forgotten
        with pytest.raises(cgshim.TransformationError, match=message):
            jvp(op_of(rule, promised), V)(tf.constant(X))


def test_what_was_seen_of_one_rule_is_not_believed_of_another() -> None:
    def with_factor(factor: Any) -> Any:
        rule = lambda u: u * factor(u) if callable(factor) else u * factor
        return cgshim.op_custom_gradient(lambda x: (x * x, rule))

    x = tf.constant(X)
    assert jvp(with_factor(7.0), V)(x).numpy().tolist() == [7, 70]
    assert jvp(with_factor(11.0), V)(x).numpy().tolist() == [11, 110]
    with pytest.raises(cgshim.TransformationError):
        jvp(with_factor(lambda u: u.numpy()), V)(x)


class Config:
    """What a rule may keep that is neither a tensor nor a number."""

    scale = 7.0

    def __init__(self, of_upstream: Any = None) -> None:
        self.of_upstream = of_upstream

    def rule(self, u: Any) -> Any:
        return u * float(u[0]) if self.of_upstream else u * self.scale


def in_an_attribute(flag: bool) -> Any:
    config = Config(flag)
    return lambda u: config.rule(u)


def in_the_object_of_a_method(flag: bool) -> Any:
    return Config(flag).rule


def in_a_tensor_of_an_object(flag: bool) -> Any:
    config = Config(tf.constant(flag))
    return lambda u: config.rule(u)


def in_an_array(flag: bool) -> Any:
    flags = np.asarray([flag])
    return lambda u: Config(flags[0]).rule(u)


def in_a_class(flag: bool) -> Any:
    config = Config()
    Config.of_all = flag
    return lambda u: Config(config.of_all).rule(u)


def in_a_default_value(flag: bool) -> Any:
    def rule(u: Any, *, flag: bool = flag) -> Any:
        return Config(flag).rule(u)

    return rule


def in_a_partial(flag: bool) -> Any:
    return functools.partial(lambda flag, u: Config(flag).rule(u), flag)


@pytest.mark.parametrize(
    "rule_with",
    [in_an_attribute, in_the_object_of_a_method, in_a_tensor_of_an_object, in_an_array, in_a_class, in_a_default_value,
     in_a_partial],
)  # fmt: skip
def test_what_was_seen_of_a_rule_is_not_believed_of_the_same_rule_of_other_things(
    rule_with: Any,
) -> None:
    def op(flag: bool) -> Any:
        return cgshim.op_custom_gradient(lambda x: (x * x, rule_with(flag)))

    for _ in range(2):
        assert jvp(op(False), V)(tf.constant(X)).numpy().tolist() == [7, 70]
        with pytest.raises(cgshim.TransformationError, match="if it is, say so"):
            jvp(op(True), V)(tf.constant(X))


def test_two_functions_that_a_rule_holds_are_told_apart() -> None:
    def op(first: Any, second: Any) -> Any:
        return cgshim.op_custom_gradient(lambda x: (x * x, lambda u: u * first(u) * second(u)))

    def of(value: Any) -> Any:
        return lambda u: float(u[0]) if value else 7.0

    for _ in range(2):
        assert jvp(op(of(False), of(False)), V)(tf.constant(X)).numpy().tolist() == [49, 490]
        for functions in ((of(False), of(True)), (of(True), of(False))):
            with pytest.raises(cgshim.TransformationError, match="if it is, say so"):
                jvp(op(*functions), V)(tf.constant(X))


def test_a_rule_of_two_outputs_one_of_them_of_integers() -> None:
    @cgshim.op_custom_gradient
    def op(x: Any) -> Any:
        return (x * x, tf.cast(x, tf.int32)), lambda first, second: first * 7

    assert jvp(lambda x: op(x)[0], V)(tf.constant(X)).numpy().tolist() == [7, 70]


@every_mode
def test_an_op_of_upstream_is_transposed_by_its_own_rule(mode: Any) -> None:
    triple = cgshim.op_custom_gradient(lambda u: (u * 3, lambda v: v * 5))
    op = cgshim.op_custom_gradient(lambda x: (x * x, lambda u: triple(u) * x))
    assert mode(jvp(op, V))(tf.constant(X)).numpy().tolist() == [10, -150]


def _memory(run: Callable[[], Any]) -> float:
    """The bytes that each of 50 calls leaves behind as long as nobody collects garbage."""
    run()  # what the first one leaves behind for good is not counted
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(50):
            run()
        return tracemalloc.get_traced_memory()[0] / 50
    finally:
        tracemalloc.stop()
        gc.enable()


def test_the_look_at_a_rule_costs_one_run_more_and_no_memory() -> None:
    rule, x = LINEAR["scaled"][0], tf.constant(X)
    of_hand = jvp(tf.custom_gradient(lambda x: (x * x, lambda u: rule(x, u))), V)
    promised, not_promised = (jvp(op_of(rule, promise), V) for promise in (True, False))
    assert calls_of(lambda: not_promised(x)) < 1.05 * calls_of(lambda: promised(x))
    left_behind = _memory(lambda: of_hand(x))  # TensorFlow's own accumulators leave 1 kB
    assert _memory(lambda: not_promised(x)) < left_behind + 1000
    assert _memory(lambda: graphs.append(tf.Graph())) > left_behind + 1000, (
        "the measure sees nothing"
    )


graphs: list[tf.Graph] = []


def with_an_object(x: Any) -> Any:
    config = Config()
    return x * x, lambda u: config.rule(u) * x


def with_an_array(x: Any) -> Any:
    matrix = np.ones((2, 2), np.float32)
    return x * x, lambda u: tf.linalg.matvec(matrix, u) * x


def with_a_method(x: Any) -> Any:
    return x * x, Config().rule


def with_an_op(x: Any) -> Any:
    triple = cgshim.op_custom_gradient(lambda u: (3 * u, lambda v: 3 * v))
    return x * x, lambda u: triple(u) * x


@pytest.mark.parametrize("f", [with_an_object, with_an_array, with_a_method, with_an_op])
def test_a_rule_that_holds_more_than_tensors(f: Any) -> None:
    found = jvp(cgshim.op_custom_gradient(f), V)(tf.constant(X))
    upstreams = tf.constant(V)
    assert np.all(np.isfinite(found))
    assert found.shape == upstreams.shape


# --- Single operations of rules -------------------------------------------------------------------

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

LINEAR_OPERATIONS: dict[str, tuple[Callable[[Any, Any], Any], list[float]]] = {
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
    LINEAR_OPERATIONS[f"{_function.__name__} by upstream"] = (
        lambda x, u, f=_function, n=_axes: to_input(f, n, tf.fill([1] * n, 3.0), line(u, n)), [3, 30]
    )  # fmt: skip
    LINEAR_OPERATIONS[f"{_function.__name__} by filter"] = (
        lambda x, u, f=_function, n=_axes: to_input(f, n, one(u, n), line(x, n)), [-28, 0]
    )  # fmt: skip
for _function, _axes in TO_FILTER.items():
    LINEAR_OPERATIONS[f"{_function.__name__} by upstream"] = (
        lambda x, u, f=_function, n=_axes: to_filter(f, n, line(x, n), line(u, n)), [2, -3]
    )  # fmt: skip
    LINEAR_OPERATIONS[f"{_function.__name__} by input"] = (
        lambda x, u, f=_function, n=_axes: to_filter(f, n, line(u, n), line(x, n)), [2, -3]
    )  # fmt: skip

NOT_LINEAR_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "ones where it is masked": lambda x, u: tf.where(x > 0, u, tf.ones_like(u)),
    "padded with a number": lambda x, u: raw.PadV2(
        input=u[:1], paddings=[[0, 1]], constant_values=1.0
    ),
    "the number that is padded with": lambda x, u: raw.PadV2(
        input=u[:1], paddings=[[0, 1]], constant_values=u[0]
    ),
    "added to ones": lambda x, u: tf.tensor_scatter_nd_add(tf.ones(2), [[0]], u[1:]),
    "ones added": lambda x, u: tf.tensor_scatter_nd_add(u, [[0]], tf.ones(1)),
    "put in ones": lambda x, u: tf.tensor_scatter_nd_update(tf.ones(2), [[0]], u[1:]),
    "ones put in": lambda x, u: tf.tensor_scatter_nd_update(u, [[0]], tf.ones(1)),
}


@pytest.mark.parametrize(("rule", "tangent"), LINEAR_OPERATIONS.values(), ids=LINEAR_OPERATIONS)
def test_operations_that_are_linear(rule: Any, tangent: list[float]) -> None:
    found = jvp(op_of(rule, promised=False), V)(tf.constant(X))
    np.testing.assert_allclose(tf.convert_to_tensor(found), tangent, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("promised", [True, False], ids=["promised", "not promised"])
@pytest.mark.parametrize("rule", NOT_LINEAR_OPERATIONS.values(), ids=NOT_LINEAR_OPERATIONS)
def test_operations_that_are_not_linear(rule: Any, promised: bool) -> None:
    with pytest.raises(
        cgshim.TransformationError, match="op: forward mode needs a rule that is linear"
    ):
        jvp(op_of(rule, promised), V)(tf.constant(X))


def test_what_an_integer_is_made_of_is_named() -> None:
    with pytest.raises(cgshim.TransformationError, match="got Cast in the rule"):
        jvp(op_of(lambda x, u: tf.cast(tf.cast(u, tf.int32) * 2, u.dtype), promised=True), V)(
            tf.constant(X)
        )
