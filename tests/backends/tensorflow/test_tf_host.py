"""Functions on the host in TensorFlow: values, gradients and counts of calls, beside
tf.numpy_function by hand.
"""

from __future__ import annotations

import collections
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import eager_and_function, function, grad, jacobian, jvp, vectorized

import cgshim
from cgshim import Spec
from cgshim._pytree import ONE_TENSOR
from cgshim._registry import load
from cgshim.host._call import HostCall, HostFunction
from cgshim_tensorflow import host_function

X = np.array([0.1, 0.2, 0.3], "float32")
NO_DERIVATIVE = (
    "{}: what runs on the host has no derivative of its own, got a derivative of its result; "
    "call it within op_custom_gradient, and write the rule with ops that have one"
)
calls: collections.Counter[str] = collections.Counter()


@pytest.fixture(autouse=True)
def _count_from_zero() -> None:
    calls.clear()


@cgshim.op_host(outputs=lambda x: x)
def sin(x: Any) -> Any:
    calls["sin"] += 1
    return np.sin(x)


@cgshim.op_host(outputs=lambda x, upstream: x, vectorized=True)
def seven_cos(x: Any, upstream: Any) -> Any:
    calls["rule"] += 1
    return 7 * np.cos(x) * upstream


@cgshim.op_custom_gradient
def wrong_sin(x: Any) -> Any:
    """Both on the host: sin, with 7 * cos for its derivative."""
    return sin(x), lambda upstream: seven_cos(x, upstream)


def host(function: Callable[..., Any], outputs: Any = lambda x: x, **options: Any) -> Any:
    return cgshim.op_host(function, outputs=outputs, **options)


# --- Values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compiled",
    [
        lambda fn: fn,
        tf.function,
        lambda fn: tf.function(fn, reduce_retracing=True),
        lambda fn: tf.function(fn, input_signature=[tf.TensorSpec([None])]),
        lambda fn: tf.function(fn, input_signature=[tf.TensorSpec(None)]),
        function,
    ],
    ids=["eager", "function", "reduce_retracing", "unknown size", "unknown rank", "no autograph"],
)
def test_values_and_gradients(compiled: Any) -> None:
    run, derive = (
        compiled(lambda x: wrong_sin(x)),
        compiled(grad(wrong_sin, lambda y: y * [2.0, 3.0, 5.0])),
    )
    for x in (X, 2 * X):
        assert np.allclose(run(tf.constant(x)), np.sin(x))
        calls.clear()
        assert np.allclose(derive(tf.constant(x)), 7 * np.cos(x) * [2, 3, 5])
        assert calls["rule"] == 1
        assert calls["sin"] <= 1
    assert np.allclose(run(tf.constant(X[:3] * 0)), 0)


DTYPES = [
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "int8",
    "uint16",
    "int64",
    "bool",
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (0,), (2, 0)], ids=str)
def test_dtypes_and_shapes(dtype: str, shape: tuple[int, ...]) -> None:
    x = tf.cast(np.arange(np.prod(shape)).reshape(shape), dtype)
    seen: list[Any] = []
    same = host(lambda x: seen.append(x) or x, name="same")
    for y in (same(x), function(same)(x)):
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert np.array_equal(tf.cast(y, "complex128"), tf.cast(x, "complex128"))
    assert {type(array) for array in seen} == {np.ndarray}
    assert {(array.shape, array.dtype.name) for array in seen} == {(shape, dtype)}


def test_trees_options_and_several_results() -> None:
    f = host(
        lambda pair, x, *, k: {
            "sum": pair[0] + k * x,
            "rest": (pair[0] * x, x[:1].astype("int32")),
        },
        lambda pair, x: {"sum": x, "rest": (x, Spec((1,), "int32"))},
        name="several",
    )

    def run(x: Any) -> Any:
        return f((x, "static"), 2 * x, k=3), f((x, "static"), 2 * x, k=10)

    for first, second in (run(tf.constant(X)), function(run)(tf.constant(X))):
        assert np.allclose(first["sum"], 7 * X)
        assert np.allclose(second["sum"], 21 * X)
        assert np.allclose(first["rest"][0], 2 * X * X)
        assert first["rest"][1].dtype == tf.int32


def test_no_tensor_among_the_arguments() -> None:
    count = host(
        lambda *, n: np.arange(n, dtype="f"), lambda *, n: Spec((n,), "float32"), name="count"
    )
    with cgshim.use_backend("tensorflow"):
        assert np.array_equal(count(n=3), [0, 1, 2])
        assert np.array_equal(function(lambda: count(n=4))(), [0, 1, 2, 3])


@eager_and_function
def test_variables(mode: Any) -> None:
    variable = tf.Variable(X)
    assert np.allclose(mode(lambda: sin(variable))(), np.sin(X))

    def derive() -> Any:
        with tf.GradientTape() as tape:
            y = wrong_sin(variable) * [2.0, 3.0, 5.0]
        return tape.gradient(y, variable)

    assert np.allclose(mode(derive)(), 7 * np.cos(X) * [2, 3, 5])


def test_shapes_of_graphs() -> None:
    rows = host(lambda x: x[0] * 2, lambda x: Spec(x.shape[1:], x.dtype), name="rows")
    three = host(lambda x: np.ones(3, "f"), lambda x: Spec((3,), "float32"), name="three")

    def shape(fn: Any, given: Any) -> Any:
        return function(fn).get_concrete_function(tf.TensorSpec(given)).structured_outputs.shape

    assert shape(rows, [None, 2]).as_list() == [2]
    assert shape(rows, [2, None]).as_list() == [None]
    assert shape(three, None).as_list() == [3]
    assert shape(sin, None).rank is None


def test_a_shape_that_was_wrong_when_it_was_traced() -> None:
    rows = host(lambda x: x[0] * 2, lambda x: Spec(x.shape[1:], x.dtype), name="rows")
    compiled = function(rows, input_signature=[tf.TensorSpec(None)])
    assert compiled(tf.constant(X)) == 2 * X[0]  # of an unknown rank, x.shape[1:] is ()
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        compiled(tf.constant([X, X]))
    assert (
        "CustomGradientValueError: rows: the declared outputs must have the shape f32[] as when traced, got f32[3]; "
        "return None for what depends on an unknown size\n"
    ) in str(error.value)


# --- Memory ---------------------------------------------------------------------------------------


def test_eagerly_f_sees_the_memory_of_the_tensor() -> None:
    x = tf.constant(X)
    where: list[int] = []
    address = host(lambda x: where.append(x.ctypes.data) or x, name="address")
    address(x)
    assert where == [np.asarray(x).ctypes.data]


def _assign(x: Any) -> Any:
    x[...] = 0.0
    return x


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("vectorized", [True, False])
def test_f_cannot_write_into_a_tensor(dtype: str, vectorized: bool) -> None:
    x = tf.cast([X, X], dtype)
    before = tf.identity(x + 0)
    f = host(_assign, name="write", vectorized=vectorized)
    constant = function(lambda: f(tf.constant(X)))
    ways: Any = (
        lambda: f(x),
        lambda: function(f)(x),
        lambda: tf.vectorized_map(f, x),
        lambda: tf.map_fn(f, x),
        constant,
    )
    for way in ways:
        with pytest.raises((ValueError, TypeError)), cgshim.host_errors():
            way()
        assert np.array_equal(tf.cast(x, "float32"), tf.cast(before, "float32"))


def test_what_f_keeps_does_not_change() -> None:
    kept: list[Any] = []
    keep = host(lambda x: kept.append(x) or x, name="keep")
    variable = tf.Variable(np.ones(100, "f"))
    keep(variable)
    variable.assign_add(np.ones(100))

    @tf.function
    def run() -> Any:
        y = keep(variable)
        variable.assign_add(tf.ones([100]))
        return y

    assert [float(run()[0]), float(run()[0])] == [2, 3]
    assert [set(array) for array in kept] == [{1}, {2}, {3}]


@eager_and_function
def test_f_may_return_its_own_memory_again(mode: Any) -> None:
    buffer = np.zeros(3, "f")

    def fill(x: Any) -> Any:
        buffer[...] = x
        return buffer

    run = mode(host(fill))
    first, second = run(tf.constant(X)), run(tf.constant(2 * X))
    assert np.array_equal(first, X)
    assert np.array_equal(second, 2 * X)


def test_eager_calls_keep_nothing() -> None:
    """A trace leaves an entry in TensorFlow's registry, as tf.numpy_function by hand does."""
    grad(wrong_sin)(tf.constant(X))
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(1000):
        sin(tf.constant(X))
        grad(wrong_sin)(tf.constant(X))
    gc.collect()
    assert len(gc.get_objects()) - before < 200


def test_eager_calls_keep_neither_options_nor_functions() -> None:
    class Big:
        pass

    def call() -> Any:
        option, closed = Big(), Big()
        host(lambda x, *, option: x, name="option")(tf.constant(X), option=option)
        host(lambda x: (closed, x)[1], name="closed")(tf.constant(X))
        return weakref.ref(option), weakref.ref(closed)

    alive = call()
    gc.collect()
    assert [each() for each in alive] == [None, None]


def test_calls_of_equal_lists_are_not_one() -> None:
    f = host(lambda x, factors: x * factors[0], lambda x, factors: x)

    @function
    def both(x: Any) -> Any:
        factors = [2.0]
        first = f(x, factors)
        factors[0] = 3.0  # before it runs
        return first, f(x, [2.0])

    assert [*map(float, both(tf.constant(1.0)))] == [3.0, 2.0]


def test_a_function_of_a_deleted_graph_still_runs_in_others() -> None:
    def outer() -> Any:
        inner = function(lambda x: 2.0 * host(lambda x: np.cos(x), name="cos")(x))
        inner(tf.constant(X))
        traced = function(lambda x: inner(x) + 1.0, input_signature=[tf.TensorSpec([3])])
        traced.get_concrete_function()
        return traced

    run = outer()
    gc.collect()
    assert np.allclose(run(tf.constant(X)), 2 * np.cos(X) + 1)


def test_an_iterator_whose_dataset_is_gone() -> None:
    numbers = iter(tf.data.Dataset.from_tensor_slices(X).map(host(lambda x: np.exp(x), name="exp")))
    gc.collect()
    assert np.allclose(list(numbers), np.exp(X))


# --- Control flow and batches ---------------------------------------------------------------------


def _loop(fn: Any) -> Any:
    return lambda x: tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, fn(y)), (0, x))[1]


def _branch(fn: Any) -> Any:
    return lambda x: tf.cond(x[0] > 0, lambda: fn(x), lambda: x)


def _autograph(fn: Any) -> Any:
    def run(x: Any) -> Any:
        if x[0] > 0:
            for _ in tf.range(2):
                x = fn(x)
        return x

    return run


def _scan(fn: Any) -> Any:
    return lambda x: tf.scan(lambda total, row: total + fn(row), x, initializer=0.0)


TWICE = 49 * np.cos(X) * np.cos(np.sin(X))
CONTROL: dict[str, tuple[Any, Any, Any]] = {
    "while_loop": (_loop, np.sin(np.sin(X)), TWICE),
    "autograph": (_autograph, np.sin(np.sin(X)), TWICE),
    "cond": (_branch, np.sin(X), 7 * np.cos(X)),
    "map_fn": (lambda fn: lambda x: tf.map_fn(fn, x), np.sin(X), 7 * np.cos(X)),
    "scan": (_scan, np.cumsum(np.sin(X)), 7 * np.cos(X) * [3, 2, 1]),
    "recompute_grad": (tf.recompute_grad, np.sin(X), 7 * np.cos(X)),
    "vectorized_map": (vectorized, np.sin(X), 7 * np.cos(X)),
}


@pytest.mark.parametrize("control", CONTROL)
def test_control_flow(control: str) -> None:
    around, value, derivative = CONTROL[control]
    x = tf.constant(X)
    assert np.allclose(tf.function(around(wrong_sin))(x), value)
    assert np.allclose(
        tf.function(grad(around(wrong_sin), lambda y: 2 * y))(x), 2 * derivative, rtol=1e-5
    )
    if control != "recompute_grad":  # in which no tape records
        inside = 14 * np.cos(14 * np.cos(X[0])) if derivative is TWICE else 14 * np.cos(X[0])
        assert np.allclose(
            tf.function(around(grad(wrong_sin, lambda y: 2 * y)))(x)[0], inside, rtol=1e-4
        )


@pytest.mark.parametrize("parallel", [None, 1, 4, tf.data.AUTOTUNE])
def test_datasets(parallel: Any) -> None:
    rows = np.arange(40, dtype="f").reshape(20, 2)
    dataset = tf.data.Dataset.from_tensor_slices(rows).map(
        grad(wrong_sin), num_parallel_calls=parallel
    )
    assert np.allclose(list(dataset), 7 * np.cos(rows), rtol=1e-4, atol=1e-5)
    batched = (
        tf.data.Dataset.from_tensor_slices(rows).batch(3).map(sin, num_parallel_calls=parallel)
    )
    assert np.allclose(np.concatenate(list(batched)), np.sin(rows), atol=1e-6)


def _counted(fn: Any, *args: Any) -> tuple[Any, dict[str, int]]:
    calls.clear()
    return fn(*args), dict(calls)


@eager_and_function
def test_one_call_for_all_iterations(mode: Any) -> None:
    x = tf.constant(X)
    batches: list[Any] = []
    f = host(lambda x: batches.append(x.shape) or np.sin(x), vectorized=True)
    assert np.allclose(mode(vectorized(f))(x), np.sin(X))
    assert batches == [(3,)]
    found, counts = _counted(mode(vectorized(grad(wrong_sin, lambda y: 2 * y))), x)
    assert np.allclose(found, 14 * np.cos(X))
    assert counts["rule"] == 1
    found, counts = _counted(mode(grad(vectorized(wrong_sin), lambda y: 2 * y)), x)
    assert np.allclose(found, 14 * np.cos(X))
    assert counts["rule"] == 1
    found, counts = _counted(mode(jacobian(wrong_sin)), x)
    assert np.allclose(found, 7 * np.cos(X))
    assert counts["rule"] == 1
    found, counts = _counted(mode(vectorized(vectorized(grad(wrong_sin)))), tf.stack([x, 2 * x]))
    assert np.allclose(found, 7 * np.cos([X, 2 * X]))
    assert counts["rule"] == 1
    found, counts = _counted(mode(vectorized(jacobian(wrong_sin))), tf.stack([x, 2 * x, x, x]))
    assert np.allclose(found, 7 * np.cos([X, 2 * X, X, X]))
    assert counts["rule"] == 1


@pytest.mark.parametrize("is_vectorized", [True, False])
def test_stacked_and_unstacked_arguments(is_vectorized: bool) -> None:
    x, k = tf.constant([X, 3 * X]), tf.constant([2.0, 3.0, 5.0])
    f = host(lambda x, k: x * k, lambda x, k: x, vectorized=is_vectorized)
    run = {
        "x": lambda a, b: f(a, k),
        "k": lambda a, b: f(k, a),
        "both": lambda a, b: f(a, b),
        "none": lambda a, b: f(k, k),
    }
    expected = {"x": x * k, "k": x * k, "both": x * x * 2, "none": [k * k, k * k]}
    for name, fn in run.items():
        found = tf.vectorized_map(lambda pair, fn=fn: fn(*pair), (x, 2 * x))
        assert np.allclose(found, expected[name]), name
    nested = tf.vectorized_map(
        lambda row: tf.vectorized_map(lambda other: f(row, other), tf.stack([k, -k])), x
    )
    assert np.allclose(nested, x[:, None] * np.array([[2, 3, 5], [-2, -3, -5]]))


def test_in_what_vectorized_map_goes_through() -> None:
    x = tf.constant(X)
    inner = function(grad(wrong_sin))
    assert np.allclose(tf.vectorized_map(inner, x), 7 * np.cos(X))
    assert np.allclose(tf.vectorized_map(_loop(wrong_sin), x), np.sin(np.sin(X)))
    branched = tf.vectorized_map(lambda r: tf.cond(r > 0.15, lambda: wrong_sin(r), lambda: -r), x)
    assert np.allclose(branched, np.where(X > 0.15, np.sin(X), -X))
    assert np.allclose(
        tf.vectorized_map(grad(wrong_sin), x, fallback_to_while_loop=False), 7 * np.cos(X)
    )


@pytest.mark.parametrize("shape", [(0,), (1,), (0, 2), (2, 0)], ids=str)
def test_empty_batches(shape: tuple[int, ...]) -> None:
    x = tf.fill(shape, 3.0)
    assert np.allclose(vectorized(wrong_sin)(x), np.full(shape, np.sin(3.0)))
    assert np.allclose(vectorized(grad(wrong_sin))(x), np.full(shape, 7 * np.cos(3.0)))


def test_1000_iterations_are_one_call() -> None:
    x = tf.linspace(0.0, 1.0, 1000)
    batches: list[Any] = []
    f = host(lambda x: batches.append(x.shape) or np.sin(x), vectorized=True)
    assert np.allclose(tf.vectorized_map(f, x), np.sin(x), atol=1e-6)
    assert batches == [(1000,)]


# --- Derivatives ----------------------------------------------------------------------------------


@cgshim.op_custom_gradient
def other_cos(x: Any) -> Any:
    """cos on the host, with -5 * sin for its derivative."""
    return host(lambda x: np.cos(x), name="cos")(x), lambda upstream: upstream * -5.0 * tf.sin(x)


@cgshim.op_custom_gradient
def of_ops(x: Any) -> Any:
    return sin(x), lambda upstream: upstream * other_cos(x) * 7.0


@cgshim.op_custom_gradient
def of_kept(x: Any) -> Any:
    c = host(lambda x: np.cos(x), name="kept")(x)
    return sin(x), lambda upstream: upstream * c * 7.0


@eager_and_function
def test_second_order_through_ops_with_rules(mode: Any) -> None:
    x = tf.constant(X)
    assert np.allclose(mode(grad(of_ops, lambda y: 2 * y))(x), 14 * np.cos(X))
    assert np.allclose(
        mode(grad(grad(of_ops, lambda y: 2 * y), lambda y: 3 * y))(x), -210 * np.sin(X)
    )


@eager_and_function
@pytest.mark.parametrize(("op", "name"), [(of_kept, "kept"), (wrong_sin, "seven_cos")])
def test_second_order_raises_only_when_it_is_taken(op: Any, name: str, mode: Any) -> None:
    assert np.allclose(mode(grad(op))(tf.constant(X)), 7 * np.cos(X))
    with pytest.raises(cgshim.TransformationError) as error:
        mode(grad(grad(op)))(tf.constant(X))
    assert str(error.value) == NO_DERIVATIVE.format(name)


@eager_and_function
def test_the_derivative_of_the_op_itself(mode: Any) -> None:
    with pytest.raises(cgshim.TransformationError) as error:
        mode(grad(sin))(tf.constant(X))
    assert str(error.value) == NO_DERIVATIVE.format("sin")


@eager_and_function
def test_the_derivative_within_the_op(mode: Any) -> None:
    """What a backend's own function returns is never differentiated; if it is, there is an error
    and no zero.
    """
    call = HostCall(
        HostFunction(np.sin, lambda x: x, vectorized=False, name="bare"), [ONE_TENSOR], {}
    )

    def bare(x: Any) -> Any:
        return host_function(call.declared(load("tensorflow"), [x]), [x])[0]

    with pytest.raises(cgshim.TransformationError) as error:
        mode(grad(bare))(tf.constant(X))
    assert str(error.value) == NO_DERIVATIVE.format("bare")


@eager_and_function
def test_complex_numbers(mode: Any) -> None:
    multiply = host(lambda z, u: 3 * u * np.conj(2 * z), lambda z, u: z)
    op = cgshim.op_custom_gradient(
        lambda z: (host(lambda z: z * z)(z), lambda upstream: multiply(z, upstream))
    )
    z = np.array([1 + 2j, 3 - 1j], "complex64")
    found = mode(grad(op, lambda y: tf.abs(y) ** 2))(tf.constant(z))
    assert np.allclose(found, 6 * z * z * np.conj(2 * z))


@eager_and_function
def test_batch_jacobian(mode: Any) -> None:
    x = np.stack([X, 2 * X])

    def derive(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = wrong_sin(x)
        return tape.batch_jacobian(y, x)

    found, counts = _counted(mode(derive), tf.constant(x))
    assert np.allclose(found, [np.diag(7 * np.cos(row)) for row in x])
    assert counts["rule"] == 1


@eager_and_function
def test_persistent_tapes(mode: Any) -> None:
    def derive(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = wrong_sin(x)
            z = y * y
        return tape.gradient(y, x), tape.gradient(
            z, x, output_gradients=tf.constant([2.0, 3.0, 5.0])
        )

    first, second = mode(derive)(tf.constant(X))
    assert np.allclose(first, 7 * np.cos(X))
    assert np.allclose(second, 14 * np.sin(X) * np.cos(X) * [2, 3, 5])


@pytest.mark.parametrize("of", ["eager", "function", "stopped"])
def test_forward_mode(of: str) -> None:
    """An accumulator asks at once for the derivative of all that f does, and of a tf.function when
    it is traced.
    """

    @cgshim.op_custom_gradient(forward_mode=True)
    def linear(x: Any) -> Any:
        given = tf.stop_gradient(x) if of == "stopped" else x
        return sin(given), lambda upstream: upstream * tf.cos(x) * 7.0

    run = function(linear) if of == "function" else linear
    assert np.allclose(jvp(run, [2.0, 3.0, 5.0])(tf.constant(X)), 7 * np.cos(X) * [2, 3, 5])


@eager_and_function
@pytest.mark.parametrize(
    ("op", "name"),
    [
        (sin, "sin"),
        (
            cgshim.op_custom_gradient(wrong_sin.__wrapped__, forward_mode=True),
            "seven_cos",
        ),
    ],
)
def test_forward_mode_of_a_function_on_the_host(op: Any, name: str, mode: Any) -> None:
    """Within an op the tangent of sin is not needed; the tangent of its rule is."""
    with pytest.raises(cgshim.TransformationError) as error:
        mode(jvp(op, [1.0, 1.0, 1.0]))(tf.constant(X))
    assert str(error.value) == NO_DERIVATIVE.format(name)


# --- How often f runs -----------------------------------------------------------------------------


def test_how_often_f_runs() -> None:
    x = tf.constant(X)
    run = {
        "unused": lambda x: (wrong_sin(x), x)[1],
        "equal": lambda x: sin(x) + sin(x),
        "gradient": grad(wrong_sin),
    }
    assert {name: _counted(function(fn), x)[1] for name, fn in run.items()} == {
        "unused": {},
        "equal": {"sin": 2},
        "gradient": {"rule": 1},  # the output of f is not used
    }

    def count_sin(x: Any) -> Any:
        calls["sin"] += 1
        return np.sin(x)

    def by_hand(x: Any) -> Any:
        return tf.numpy_function(count_sin, [x], tf.float32, stateful=False)

    by_hand_twice = function(lambda x: by_hand(x) + by_hand(x))
    assert _counted(by_hand_twice, x)[1] == {"sin": 2}
    assert _counted(function(lambda x: (by_hand(x), x)[1]), x)[1] == {}
    assert _counted(sin, x)[1] == _counted(function(sin), x)[1] == {"sin": 1}


def test_calls_that_differ_in_their_options_are_two() -> None:
    scale = host(lambda x, *, k: x * k, name="scale")
    sign = host(lambda x, *, k: np.copysign(x, k), name="sign")
    seven = host(lambda x, *, k: x * (7 if isinstance(k[0], float) else 1), name="seven")
    x = tf.constant(X)
    assert np.allclose(function(lambda x: sign(x, k=0.0) + 10.0 * sign(x, k=-0.0))(x), -9 * X)
    assert np.allclose(function(lambda x: seven(x, k=(1,)) + 10.0 * seven(x, k=(1.0,)))(x), 71 * X)
    found = function(lambda x: scale(x, k=2) + 10.0 * scale(x, k=3))(tf.constant(X))
    assert np.allclose(found, 32 * X)
    arrays = function(
        lambda x: scale(x, k=np.float32([1, 2, 3])) + scale(x, k=np.float32([1, 1, 1]))
    )
    assert np.allclose(arrays(tf.constant(X)), X * [2, 3, 4])


# --- Errors ---------------------------------------------------------------------------------------


class MineError(Exception):
    pass


def test_errors_of_f() -> None:
    def raise_it(x: Any) -> Any:
        raise MineError("what f says")

    f = host(raise_it)
    with pytest.raises(MineError, match="what f says"):
        f(tf.constant(X))
    compiled = (tf.function(f), vectorized(f), tf.function(lambda x: tf.map_fn(f, x)), lambda x: list(
        tf.data.Dataset.from_tensor_slices(x).map(f)))  # fmt: skip
    for run in compiled:
        with pytest.raises(MineError, match="what f says"), cgshim.host_errors():
            run(tf.constant(X))
    with pytest.raises(tf.errors.UnknownError, match="what f says"):
        tf.function(f)(tf.constant(X))


NUMBERS = (
    "f: what runs on the host takes and returns dense arrays of numbers, got {}; convert it before"
)


@eager_and_function
def test_no_numbers(mode: Any) -> None:
    f = host(lambda x: x, name="f")
    given = {
        "string[1]": tf.constant(["a"]),
        "RaggedTensor": tf.ragged.constant([[1.0], [2.0, 3.0]]),
        "SparseTensor": tf.sparse.from_dense([[1.0]]),
    }
    for got, x in given.items():
        with pytest.raises(cgshim.CustomGradientTypeError) as error:
            mode(f)(x)
        assert str(error.value) == NUMBERS.format(got)
    for dtype in ("string",):
        declared = host(lambda x: x, lambda x, dtype=dtype: Spec((3,), dtype), name="f")
        with pytest.raises(cgshim.CustomGradientTypeError) as error:
            mode(declared)(tf.constant(X))
        assert str(error.value) == NUMBERS.format(f"{dtype}[3]")


def test_parts_of_a_sparse_tensor_in_a_vectorized_map() -> None:
    floats = [
        tf.train.Feature(float_list=tf.train.FloatList(value=row)) for row in ([1.0, 2.0], [3.0])
    ]
    rows = [
        tf.train.Example(features=tf.train.Features(feature={"x": x})).SerializeToString()
        for x in floats
    ]
    parse = lambda row: (
        tf.io.parse_single_example(row, {"x": tf.io.VarLenFeature(tf.float32)})["x"].values
    )
    with pytest.raises(cgshim.TransformationError) as error:
        tf.vectorized_map(lambda row: sin(parse(row)), tf.constant(rows))
    assert str(error.value) == (
        "sin: vectorized_map needs one shape for all iterations, got the parts of sparse tensors; "
        "convert them to dense ones before"
    )


WITHOUT_XLA = "host_function_{}_without_jit_compile"


def test_xla() -> None:
    """XLA has no such operation, and names the one that it found."""
    traced = function(sin)
    traced(tf.constant(X))
    of_sin = (
        function(grad(lambda x: tf.exp(x) * wrong_sin(x)), jit_compile=True),
        function(lambda x: traced(x), jit_compile=True),
    )
    for run in of_sin:
        with pytest.raises(tf.errors.InvalidArgumentError, match=WITHOUT_XLA.format("sin")):
            run(tf.constant(X))
    with pytest.raises(tf.errors.InvalidArgumentError, match=WITHOUT_XLA.format("seven_cos")):
        grad(function(rule_on_host, jit_compile=True))(tf.constant(X))


@eager_and_function
def test_no_results(mode: Any) -> None:
    none = host(lambda x: (), lambda x: (), name="none")
    with pytest.raises(
        cgshim.CustomGradientTypeError, match="none: the output of f must hold a tensor when an"
    ):
        mode(none)(tf.constant(X))


def test_it_is_one_operation_of_a_graph() -> None:
    graph = function(lambda x: sin(x)).get_concrete_function(tf.TensorSpec([3])).graph
    types = collections.Counter(op.type for op in graph.get_operations())
    assert types["PyFuncStateless"] == 1
    assert not set(types) - {
        "Placeholder", "Const", "PyFuncStateless", "IdentityN", "Identity", "StopGradient",
    }  # fmt: skip


def test_any_name_is_a_name_of_an_operation() -> None:
    for name in ("<lambda>", "Größe 1/2", "_", "é"):
        assert np.allclose(function(host(lambda x: 2 * x, name=name))(tf.constant(X)), 2 * X)


def _module(op: Any) -> tf.Module:
    module = tf.Module()
    module.f = function(lambda x: op(x), input_signature=[tf.TensorSpec([None])])
    module.f(tf.constant(X))
    return module


def test_saved_model_is_refused_at_export(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="Error when tracing gradients for SavedModel") as error:
        tf.saved_model.save(_module(sin), str(tmp_path))
    assert str(error.value.__cause__) == NO_DERIVATIVE.format("sin")


@cgshim.op_custom_gradient
def rule_on_host(x: Any) -> Any:
    return tf.sin(x), lambda upstream: seven_cos(x, upstream)


IN_ANOTHER_PROCESS = """
import sys, numpy as np, tensorflow as tf, cgshim
double = cgshim.op_host(lambda x, *more: 2 * x, outputs=lambda x, *more: x, name="double")
numbers, *models = sys.argv[1:]
tf.function(lambda x: [double(x) for _ in range(int(numbers))]).get_concrete_function(tf.constant([1.0]))
x, f, other = tf.constant([0.1, 0.2]), *[tf.saved_model.load(at).f for at in models]
def gradient():
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = other(x)
    return tape.gradient(y, x)
assert np.allclose(other(x), np.sin(x))
for run in (lambda: f(x), gradient):
    try:
        print(run())
    except tf.errors.OpError as error:
        print(error)
"""


def test_saved_model_in_another_process(tmp_path: Any) -> None:
    """By hand it calls the Python function that has the same number there."""
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    both, rule = str(tmp_path / "both"), str(tmp_path / "rule")
    tf.saved_model.save(_module(sin), both, options=options)
    assert np.allclose(tf.saved_model.load(both).f(tf.constant(X)), np.sin(X))
    tf.saved_model.save(_module(rule_on_host), rule)
    program = [sys.executable, "-c", IN_ANOTHER_PROCESS, _next_number(), both, rule]
    found = subprocess.run(program, capture_output=True, text=True)
    expected = ": a function on the host stays in its process, got a graph of another process; save"
    assert found.stdout.count(f"double{expected}") >= 2, found.stderr[-1000:]


def _next_number() -> str:
    """Return a number that no graph of this process has given a Python function yet."""
    graph = function(lambda x: sin(x)).get_concrete_function(tf.TensorSpec([3])).graph
    (operation,) = (op for op in graph.get_operations() if op.type == "PyFuncStateless")
    return str(operation.get_attr("token").decode().rpartition("_")[2])


# --- Elsewhere ------------------------------------------------------------------------------------


def test_threads() -> None:
    compiled = function(grad(wrong_sin))
    compiled(tf.constant(X))
    wrong: list[Any] = []

    def work(k: int) -> None:
        for n in range(20):
            x = X * (k + n / 20)
            for run in (compiled, grad(wrong_sin)):
                if not np.allclose(run(tf.constant(x)), 7 * np.cos(x), atol=1e-5):
                    wrong.append(x)

    threads = [threading.Thread(target=work, args=[k]) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_traced_in_several_threads() -> None:
    found: list[Any] = []
    f = host(lambda x: 2 * x, name="traced")
    threads = [
        threading.Thread(target=lambda k=k: found.append(function(f)(tf.constant([float(k)])) / 2))
        for k in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(float(x[0]) for x in found) == list(range(8))


@pytest.mark.parametrize("given", ["eager", "function", "dataset"])
def test_f_may_use_tensorflow(given: str) -> None:
    double = function(lambda x: 2.0 * x)
    f = host(lambda x: double(tf.constant(x)).numpy() + sin(x), name="f")
    if given == "dataset":
        found: Any = list(tf.data.Dataset.from_tensor_slices(X).map(f, num_parallel_calls=4))
    else:
        found = (function(f) if given == "function" else f)(tf.constant(X))
    assert np.allclose(found, 2 * X + np.sin(X))


def test_a_session() -> None:
    with tf.Graph().as_default():
        derivative = grad(wrong_sin)(tf.constant(X))
        with tf.compat.v1.Session() as session:
            assert np.allclose(session.run(derivative), 7 * np.cos(X))


def test_keras() -> None:
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "tensorflow":
        pytest.skip(f"keras runs on {keras.backend.backend()}")

    class Sine(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return wrong_sin(x)

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    inputs = keras.Input((3,))
    dense = keras.layers.Dense(3, use_bias=False, kernel_initializer="identity")
    model = keras.Model(inputs, Sine()(dense(inputs)))
    model.compile(
        keras.optimizers.SGD(0.5),
        lambda y, found: tf.reduce_sum(found),
        run_eagerly=False,
        jit_compile=False,
    )
    x = np.array([X, 2 * X])
    model.fit(x, x, epochs=1, batch_size=2, verbose=0)
    gradient = sum(np.outer(row, 7 * np.cos(row)) for row in x)
    assert np.allclose(model.get_weights()[0], np.eye(3) - 0.5 * gradient, atol=1e-4)
    assert model.predict(x, verbose=0).shape == (2, 3)
    model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match=WITHOUT_XLA.format("sin")):
        model.fit(x, x, verbose=0)


@pytest.mark.parametrize("compiled", [False, True])
def test_dicts_with_another_order_of_keys_are_other_arguments(compiled: bool) -> None:
    @cgshim.op_custom_gradient(host_outputs=lambda tree: tree["a"])
    def minus(tree: Any) -> Any:
        first, second = tree.values()
        return first - second, lambda u: {key: (7 * u, -5 * u)[at] for at, key in enumerate(tree)}

    for keys, value, gradients in (("za", -2, (7, -5)), ("az", 2, (-5, 7)), ("za", -2, (7, -5))):

        def difference(x: Any, y: Any, keys: str = keys) -> Any:
            return minus({key: {"z": x, "a": y}[key] for key in keys})

        x, y = tf.constant(3.0), tf.constant(5.0)
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            output = (tf.function(difference) if compiled else difference)(x, y)
        found = tape.gradient(output, [x, y])
        assert (float(output), tuple(map(float, found))) == (value, gradients)
