"""What rules are written with: op_sum_to_shape, the transpose of broadcasting, and op_tree_map."""

from __future__ import annotations

from typing import Any

import numpy as np

from cgshim import op_custom_gradient, op_grad, op_sum, op_sum_to_shape, op_tree_map, op_vjp
from cgshim.testing.conformance._framework import Framework
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
    return x * w, lambda u: (3.0 * op_sum_to_shape(u * w, x), 7.0 * op_sum_to_shape(u * x, tuple(w.shape)))


def _summed(gradient: Any, shape: tuple[int, ...]) -> Any:
    """Sum over what NumPy broadcasts to the gradient's shape, one element at a time."""
    total = np.zeros(shape)
    places = np.broadcast_to(np.arange(total.size).reshape(shape), gradient.shape)
    np.add.at(total.reshape(-1), places.ravel(), gradient.ravel())
    return total


@case(shapes=BROADCAST)
def sum_to_shape_in_a_rule(framework: Framework, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    x, w = _numbers(shapes[0], 0.5), _numbers(shapes[1], -2.0)
    upstream = _numbers((x * w).shape, 1.5)
    framework.check(
        _product, framework.tensor(x), framework.tensor(w), upstream=framework.tensor(upstream), output=x * w,
        gradients=(3.0 * _summed(upstream * w, x.shape), 7.0 * _summed(upstream * x, w.shape)),
    )  # fmt: skip


@case(shapes=BROADCAST)
def second_order_of_sum_to_shape(framework: Framework, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """The derivative of the gradient by x, which is 3 u w summed, with respect to w."""
    x, w = _numbers(shapes[0], 0.5), _numbers(shapes[1], -2.0)
    upstream, weights = _numbers((x * w).shape, 1.5), _numbers(x.shape, 5.0)

    def weighted(w: Any) -> Any:
        _, pullback = op_vjp(_product, framework.tensor(x), w)
        return op_sum(pullback(framework.tensor(upstream))[0] * framework.tensor(weights))

    framework.check_equal(op_grad(weighted)(framework.tensor(w)), 3.0 * _summed(upstream * weights, w.shape))


@case()
def tree_map_in_a_rule(framework: Framework) -> None:
    """It reads tensors alone: what is static in a tree stays as it is, and None where a gradient has nothing."""
    tree = {"w": framework.tensor([1.0, 2.0]), "deep": [framework.tensor(3.0), "a name", (framework.tensor([5.0]), 4)]}

    @op_custom_gradient
    def op(tree: Any, factors: Any) -> Any:
        both = op_tree_map(lambda x, factor: x * factor, tree, factors)

        def grad_fn(upstream: Any) -> Any:
            return (
                op_tree_map(lambda u, factor: 7.0 * u * factor, upstream, factors),
                op_tree_map(lambda u, x: 11.0 * u * x, upstream, tree),
            )

        return both, grad_fn

    factors = op_tree_map(lambda x: 10.0 * x, tree)
    found, pullback = op_vjp(op, tree, factors)
    framework.check_equal(
        found, {"w": np.array([10.0, 40.0]), "deep": [np.array(90.0), "a name", (np.array([250.0]), 4)]}
    )
    w, number, last = framework.tensor([1.0, -1.0]), framework.tensor(2.0), framework.tensor([3.0])
    upstream = {"w": w, "deep": [number, None, (last, None)]}
    of_tree, of_factors = pullback(upstream)
    framework.check_equal(
        of_tree, {"w": np.array([70.0, -140.0]), "deep": [np.array(420.0), None, (np.array([1050.0]), None)]}
    )
    framework.check_equal(
        of_factors, {"w": np.array([11.0, -22.0]), "deep": [np.array(66.0), None, (np.array([165.0]), None)]}
    )
