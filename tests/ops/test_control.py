"""Loops, branches, sums at indices and over what was broadcast, and trees: on every backend, eager
and compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cgshim
from cgshim import ops

Function = Callable[..., Any]


def _compiled(backend: str) -> Function:
    if backend == "jax":
        import jax

        return jax.jit
    if backend == "tensorflow":
        import tensorflow as tf

        return lambda fn: tf.function(fn, autograph=False)
    return lambda fn: fn  # Python's own loops, whoever traces them


@pytest.fixture(params=["eager", "compiled"])
def mode(request: pytest.FixtureRequest, backend: str) -> Function:
    return _compiled(backend) if request.param == "compiled" else lambda fn: fn


def tensor(backend: str, values: Any) -> Any:
    with cgshim.use_backend(backend):
        return ops.convert_to_tensor(np.asarray(values, "float32"))


def check(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(ops.convert_to_numpy(found), wanted, rtol=1e-5)


def test_scan(backend: str, mode: Function) -> None:
    x, two, weights = (
        tensor(backend, [1.0, 2.0, 3.0]),
        tensor(backend, 2.0),
        tensor(backend, [1.0, 2.0, 4.0]),
    )

    def run(x: Any) -> Any:
        carry, ys = ops.scan(lambda c, x: (c * x + 1.0, {"y": 10.0 * c, "none": None}), two, x)
        assert ys["none"] is None
        return carry + ops.sum(ys["y"] * weights)

    check(mode(run)(x), 382.0)
    check(mode(cgshim.op_grad(run))(x), [212.0, 129.0, 7.0])


@pytest.mark.parametrize("unroll", [1, 2, True, False])
def test_scan_in_reverse(backend: str, mode: Function, unroll: int | bool) -> None:
    """Each y stands at its x's place, and a rule runs in the loop: 7 for 1, 11 for 1."""

    @cgshim.op_custom_gradient
    def times(c: Any, x: Any) -> Any:
        return c * x, lambda u: (7.0 * u * x, 11.0 * u * c)

    x, two, weights = (
        tensor(backend, [1.0, 2.0, 3.0]),
        tensor(backend, 2.0),
        tensor(backend, [1.0, 2.0, 4.0]),
    )

    def run(x: Any) -> Any:
        step = lambda c, x: (times(c, x), {"y": 10.0 * c, "none": None})
        carry, ys = ops.scan(step, two, x, reverse=True, unroll=unroll)
        return carry, ys["y"]

    carry, ys = mode(run)(x)
    check(carry, 12.0)
    check(ys, [120.0, 60.0, 20.0])
    gradient = mode(cgshim.op_grad(lambda x: run(x)[0] + ops.sum(run(x)[1] * weights)))(x)
    of_first = 1.0 + 0.0  # the upstream of the carry after the last step, which takes x[0]
    of_second = 7.0 * of_first * 1.0 + 10.0 * 1.0
    of_third = 7.0 * of_second * 2.0 + 10.0 * 2.0
    check(gradient, [11 * of_first * 12.0, 11 * of_second * 6.0, 11 * of_third * 2.0])


def test_scan_in_reverse_has_a_second_derivative(backend: str, mode: Function) -> None:
    """The sum of the squares of x0, x0 x1 ... from the end: f = (c x2)^2 + (c x2 x1)^2."""
    x, two = tensor(backend, [5.0, 3.0, 2.0]), tensor(backend, 2.0)

    def run(x: Any) -> Any:
        ys = ops.scan(lambda c, x: (c * x, (c * x) ** 2), two, x, reverse=True)[1]
        return ops.sum(ys[1:])

    def slope(x: Any) -> Any:
        return ops.sum(cgshim.op_grad(run)(x) * tensor(backend, [7.0, 1.0, 10.0]))

    # f = 4 z^2 (1 + y^2); f_y = 8 z^2 y; f_z = 8 z (1 + y^2); the derivative of f_y + 10 f_z
    y, z = 3.0, 2.0
    check(
        mode(cgshim.op_grad(slope))(x),
        [0.0, 8 * z**2 + 10 * 16 * z * y, 16 * z * y + 80 * (1 + y**2)],
    )


def test_scan_in_reverse_with_an_unknown_number_of_steps(backend: str) -> None:
    if backend != "tensorflow":
        return  # every other framework knows its sizes
    import tensorflow as tf

    run = tf.function(
        lambda x: ops.scan(lambda c, x: (c + x, 10.0 * c), tf.constant(1.0), x, reverse=True),
        input_signature=[tf.TensorSpec([None])],
    )
    carry, ys = run(tf.constant([1.0, 2.0, 4.0]))
    check(carry, 8.0)
    check(ys, [70.0, 50.0, 10.0])


def test_scan_without_xs_counts_its_steps(backend: str, mode: Function) -> None:
    carry, ys = mode(lambda c: ops.scan(lambda c, _: (2.0 * c, c), c, length=4))(
        tensor(backend, 3.0)
    )
    check(carry, 48.0)
    check(ys, [3.0, 6.0, 12.0, 24.0])


def test_scan_over_an_op(backend: str, mode: Function) -> None:
    @cgshim.op_custom_gradient
    def times(c: Any, x: Any) -> Any:
        return c * x, lambda u: (7.0 * u * x, 11.0 * u * c)

    x, two = tensor(backend, [1.0, 2.0, 3.0]), tensor(backend, 2.0)
    gradient = mode(
        cgshim.op_grad(lambda x: ops.scan(lambda c, x: (times(c, x), None), two, x)[0])
    )(x)
    check(gradient, [11 * 2 * 49 * 6, 11 * 2 * 7 * 3, 11 * 4])


def test_while_loop(backend: str, mode: Function) -> None:
    def run(x: Any) -> Any:
        return ops.while_loop(lambda v: ops.sum(v["x"]) < 100.0, lambda v: {"x": 2.0 * v["x"], "n": v["n"] + 1},
                              {"x": x, "n": 0})  # fmt: skip

    found = mode(run)(tensor(backend, [1.0, 2.0, 3.0]))
    check(found["x"], [32.0, 64.0, 96.0])
    assert int(found["n"]) == 5


@pytest.mark.parametrize(("values", "value", "slope"), [([2.0, 4.0], [4.0, 16.0], [4.0, 8.0]),
                                                        ([2.0, 1.0], [-6.0, -3.0], [-3.0, -3.0])])  # fmt: skip
def test_cond(backend: str, mode: Function, values: Any, value: Any, slope: Any) -> None:
    def run(x: Any) -> Any:
        return ops.cond(ops.sum(x) > 5.0, lambda x: x * x, lambda x: -3.0 * x, x)

    x = tensor(backend, values)
    check(mode(run)(x), value)
    check(mode(cgshim.op_grad(lambda x: ops.sum(run(x))))(x), slope)


def test_index_add(backend: str, mode: Function) -> None:
    x, weights = tensor(backend, [[1.0, 2.0, 3.0]] * 2), tensor(backend, [1.0, 10.0, 100.0])
    with cgshim.use_backend(backend):
        index = ops.convert_to_tensor(np.array([2, 0, 2]))

    def run(x: Any) -> Any:
        return ops.index_add(x, index, x * x, axis=-1)

    check(mode(run)(x), [[5.0, 2.0, 13.0]] * 2)
    check(mode(cgshim.op_grad(lambda x: ops.sum(run(x) * weights)))(x), [[201.0, 14.0, 700.0]] * 2)


@pytest.mark.parametrize(("shape", "wanted"), [((3,), [6.0, 12.0, 18.0]), ((1, 3), [[6.0, 12.0, 18.0]]),
                                               ((2, 1, 1), [[[18.0]], [[18.0]]]), ((), 36.0)])  # fmt: skip
def test_sum_to_shape(backend: str, mode: Function, shape: Any, wanted: Any) -> None:
    gradient, like = (
        tensor(backend, np.ones((2, 3, 3)) * [1.0, 2.0, 3.0]),
        tensor(backend, np.zeros(shape)),
    )
    check(mode(ops.sum_to_shape)(gradient, like), wanted)
    check(ops.sum_to_shape(gradient, shape), wanted)


def test_sum_to_a_shape_that_the_graph_does_not_know(backend: str) -> None:
    if backend != "tensorflow":
        return  # every other framework knows its sizes
    import tensorflow as tf

    for shapes in ([None, None], [None, 1]), (None, None), ([2, 2], None), (None, [None, 1]):
        run = tf.function(ops.sum_to_shape, input_signature=[*map(tf.TensorSpec, shapes)])
        check(run(tf.constant([[1.0, 2.0], [3.0, 5.0]]), tf.zeros([2, 1])), [[3.0], [8.0]])
        check(run(tf.constant([[1.0, 2.0], [3.0, 5.0]]), tf.zeros([1, 1])), [[11.0]])


def test_tree_map(backend: str) -> None:
    x = tensor(backend, [1.0, 2.0])
    found = ops.tree_map(
        lambda a, b: a + 10.0 * b, {"w": [x, "name"], "n": None}, {"w": [x * x, "other"], "n": 3}
    )
    check(found["w"][0], [11.0, 42.0])
    assert (found["w"][1], found["n"]) == ("name", None)


MESSAGES: list[tuple[Function, str]] = [
    (lambda x: ops.scan(lambda c, x: (ops.stack([x, x]), None), x[0], x),
     r"op_scan: the carry of f must keep its structure, shapes and dtypes \(f32\[\]\), got f32\[2\]; cast or reshape "
     r"it, or begin with another one"),
    (lambda x: ops.while_loop(lambda v: True, lambda v: (v, v), x),
     r"op_while_loop: the value of body_fun must keep its structure, shapes and dtypes \(f32\[3\]\), got \(f32\[3\], "
     r"f32\[3\]\); cast or reshape it, or begin with another one"),
    (lambda x: ops.scan(lambda c, x: c, x[0], x),
     r"op_scan: f must return a pair \(carry, y\), got f32\[\]; return y = None for none"),
    (lambda x: ops.scan(lambda c, x: (c, c), x[0], [x, x[:2]]),
     r"op_scan: xs and length must tell one number of steps, at least 1, got \[2, 3\]; give tensors with first axes of "
     r"one size, or a length"),
    (lambda x: ops.scan(lambda c, x: (c, c), x, length=0),
     r"op_scan: xs and length must tell one number of steps, at least 1, got \[0\]; give tensors with first axes of "
     r"one size, or a length"),
    *[(lambda x, unroll=unroll: ops.scan(lambda c, x: (c, c), x[0], x, unroll=unroll),
       rf"op_scan: unroll must be a bool or a number of steps, at least 1, got {said}; leave it out, it changes no "
       r"number")
      for unroll, said in ((0, "0"), (-2, "-2"), ("all", "'all'"), (2.0, r"2\.0"))],
    (lambda x: ops.tree_map(lambda a, b: a, {"a": x}, {"b": x}),
     r"op_tree_map: the trees must be structured alike \({'a': f32\[3\]}\), got {'b': f32\[3\]}; "
     r"give trees with tensors at the same places"),
    (lambda x: ops.sum_to_shape(x, (2,)),
     r"op_sum_to_shape: like must broadcast to the gradient's shape \[3\], got f32\[2\]; give what the rule broadcast"),
    (lambda x: ops.index_add(x, ops.cast(x[:2], "int32"), x),
     r"op_index_add: values must have the shape \[2\], for one axis of indices, got f32\[3\] and i32\[2\]; reshape or "
     r"broadcast them"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "message"), MESSAGES)
def test_messages(backend: str, wrong: Function, message: str) -> None:
    with pytest.raises(cgshim.CustomGradientError) as raised:
        wrong(tensor(backend, [1.0, 2.0, 3.0]))
    assert re.fullmatch(message, str(raised.value))
