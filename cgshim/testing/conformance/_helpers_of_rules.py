"""Helpers of rules: op_sum_to_shape, op_tree_map and conversions."""

from __future__ import annotations

from typing import Any

import numpy as np

from cgshim import (
    op_cast,
    op_convert_to_tensor,
    op_custom_gradient,
    op_grad,
    op_sum,
    op_sum_to_shape,
    op_tree_map,
    op_vjp,
)
from cgshim._protocol import Tensor
from cgshim.testing.conformance._framework import Framework, raised
from cgshim.testing.conformance._registry import case

BROADCAST: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "a row": ((2, 3), (3,)),
    "a column": ((2, 3), (2, 1)),
    "a number": ((2, 3), ()),
    "both": ((1, 3), (2, 1)),
    "more axes": ((3,), (2, 1, 3)),
    "nothing": ((2, 3), (2, 3)),
}


def _numbers(shape: tuple[int, ...], first: float) -> Any:
    return first + 0.25 * np.arange(np.prod(shape, dtype=int)).reshape(shape) ** 2


@op_custom_gradient
def _product(x: Any, w: Any) -> Any:
    """x * w, with a wrong factor for each gradient."""
    return x * w, lambda u: (
        3.0 * op_sum_to_shape(u * w, x),
        7.0 * op_sum_to_shape(u * x, tuple(w.shape)),
    )


def _summed(gradient: Any, shape: tuple[int, ...]) -> Any:
    """Sum over NumPy's broadcast axes, one element at a time."""
    total = np.zeros(shape)
    places = np.broadcast_to(np.arange(total.size).reshape(shape), gradient.shape)
    np.add.at(total.reshape(-1), places.ravel(), gradient.ravel())
    return total


@case(shapes=BROADCAST)
def sum_to_shape_in_a_rule(
    framework: Framework, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    x, w = _numbers(shapes[0], 0.5), _numbers(shapes[1], -2.0)
    upstream = _numbers((x * w).shape, 1.5)
    framework.check_at(
        _product, x, w, upstream=upstream, output=x * w,
        gradients=(3.0 * _summed(upstream * w, x.shape), 7.0 * _summed(upstream * x, w.shape)),
    )  # fmt: skip


@case(shapes=BROADCAST)
def second_order_of_sum_to_shape(
    framework: Framework, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    """The derivative of the gradient by x (3 u w, summed) with respect to w."""
    x, w = _numbers(shapes[0], 0.5), _numbers(shapes[1], -2.0)
    upstream, weights = _numbers((x * w).shape, 1.5), _numbers(x.shape, 5.0)

    def weighted(w: Any) -> Any:
        _, pullback = op_vjp(_product, framework.tensor(x), w)
        return op_sum(pullback(framework.tensor(upstream))[0] * framework.tensor(weights))

    framework.check_equal(
        op_grad(weighted)(framework.tensor(w)), 3.0 * _summed(upstream * weights, w.shape)
    )


@case()
def tree_map_in_a_rule(framework: Framework) -> None:
    """It maps only tensors: static leaves stay as they are, and None in a gradient stays None."""

    def tree_of(w: Any, number: Any, last: Any, name: Any = "a name", count: Any = 4) -> Any:
        return {"w": w, "deep": [number, name, (last, count)]}

    tree = framework.tensors(tree_of(np.array([1.0, 2.0]), 3.0, np.array([5.0])))

    @op_custom_gradient
    def op(tree: Any, factors: Any) -> Any:
        both = op_tree_map(lambda x, factor: x * factor, tree, factors)

        def grad_fn(upstream: Any) -> Any:
            return (
                op_tree_map(lambda u, factor: 7.0 * u * factor, upstream, factors),
                op_tree_map(lambda u, x: 11.0 * u * x, upstream, tree),
            )

        return both, grad_fn

    framework.check_at(
        op, tree, op_tree_map(lambda x: 10.0 * x, tree),
        upstream=tree_of(np.array([1.0, -1.0]), 2.0, np.array([3.0]), None, None),
        output=tree_of(np.array([10.0, 40.0]), 90.0, np.array([250.0])),
        gradients=(
            tree_of(np.array([70.0, -140.0]), 420.0, np.array([1050.0]), None, None),
            tree_of(np.array([11.0, -22.0]), 66.0, np.array([165.0]), None, None),
        ),
    )  # fmt: skip


@case(dtype={"without a dtype": None, "to its own dtype": "float32", "to another dtype": "float16"})
def convert_to_tensor_keeps_the_gradient(framework: Framework, dtype: str | None) -> None:
    """The gradient stays in op_vjp, and around a rule that converts."""
    x, u = np.array([1.0, -2.0]), np.array([2.0, -3.0])

    def converted(x: Tensor) -> Tensor:
        return op_cast(op_convert_to_tensor(x, dtype), "float32")

    op = op_custom_gradient(lambda x: (x * x, lambda upstream: 7.0 * upstream * converted(x)))
    framework.check_at(
        lambda x: converted(x) * x, x, upstream=u, output=x * x, gradients=(2.0 * u * x,)
    )
    gradient = lambda x: op_vjp(op, x)[1](framework.tensor(u))[0]
    v = np.array([1.0, 10.0])
    framework.check_at(gradient, x, upstream=v, output=7.0 * u * x, gradients=(7.0 * u * v,))


@case()
def cast_to_integers_has_no_derivative(framework: Framework) -> None:
    """A tensor that is cut off has no derivative, in a function or in a rule."""

    def cut(x: Tensor) -> Tensor:
        return op_cast(op_cast(x, "int32"), "float32")

    op = op_custom_gradient(lambda x: (x * x, lambda upstream: 7.0 * upstream * cut(x) * x))
    x, u, v = np.array([1.5, -2.5]), np.array([2.0, -3.0]), np.array([1.0, 10.0])
    whole = np.trunc(x)
    framework.check_at(
        lambda x: cut(x) * x, x, upstream=u, output=whole * x, gradients=(u * whole,)
    )
    gradient = lambda x: op_vjp(op, x)[1](framework.tensor(u))[0]
    expected = 7.0 * u * whole
    framework.check_at(gradient, x, upstream=v, output=expected * x, gradients=(expected * v,))


SOURCES: dict[str, Any] = {
    "a number": 2.0,
    "a list": [1.0, 2.0],
    "an array": np.array([1.0, 2.0], "float32"),
}


@case(source=SOURCES | {"a tensor": None})
def dtype_that_does_not_exist(framework: Framework, source: Any) -> None:
    """It raises a TypeError, and does not use the default dtype."""
    source = framework.tensor([1.0, 2.0]) if source is None else source
    raised(TypeError, framework.backend.convert_to_tensor, source, "float7")
