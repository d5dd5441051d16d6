"""The outputs that f may return, and the upstream gradients of unused ones."""

from __future__ import annotations

import types
from typing import Any

import numpy as np

import cgshim
from cgshim import op_custom_gradient
from cgshim._dtypes import dtype_name
from cgshim._protocol import Tensor
from cgshim.testing.conformance._common import U, X
from cgshim.testing.conformance._framework import Framework
from cgshim.testing.conformance._registry import case


@case()
def output_is_the_input(framework: Framework) -> None:
    op = op_custom_gradient(lambda x: (x, lambda u: 7.0 * u))
    framework.check_at(op, X, upstream=U, output=X, gradients=(7.0 * U,))


@case()
def output_holds_the_input(framework: Framework) -> None:
    """The output holds the input twice, beside a computed tensor."""
    op = op_custom_gradient(
        lambda x: ((x, x * x, x), lambda u: 7.0 * u[0] + 11.0 * u[1] + 13.0 * u[2])
    )
    u = np.array([1.0, 2.0]), np.array([-1.0, 3.0]), np.array([2.0, 0.5])
    of_x = 7.0 * u[0] + 11.0 * u[1] + 13.0 * u[2]
    framework.check_at(op, X, upstream=u, output=(X, X * X, X), gradients=(of_x,))


@case()
def output_twice_the_same(framework: Framework) -> None:
    @op_custom_gradient
    def op(x: Tensor) -> Any:
        y = x * x
        return [y, y], lambda u: 7.0 * u[0] + 11.0 * u[1]

    second = np.array([1.0, 0.5])
    framework.check_at(
        op, X, upstream=[U, second], output=[X * X] * 2, gradients=(7.0 * U + 11.0 * second,)
    )


@case()
def output_of_another_shape_and_dtype(framework: Framework) -> None:
    """The upstream gradient has the output's shape and dtype, not the argument's."""
    wide = framework.tensor([[1.0], [3.0], [5.0]], "float16")

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        def grad(u: Tensor) -> Tensor:
            assert (tuple(u.shape), dtype_name(u.dtype)) == ((3, 1), "float16")
            return 7.0 * u[0] + 11.0 * u[1] + 13.0 * u[2]

        return wide, grad

    framework.check(
        op, framework.tensor([2.0]), upstream=framework.tensor([[1.0], [-2.0], [0.5]], "float16"),
        output=np.array([[1.0], [3.0], [5.0]]), gradients=(np.array([-8.5]),),
    )  # fmt: skip


@case()
def output_does_not_depend_on_the_input(framework: Framework) -> None:
    """Autodiff would find no gradient: the rule's is used."""
    constant = framework.tensor([3.0, 4.0])
    op = op_custom_gradient(lambda x: (constant, lambda u: 7.0 * u * x))
    framework.check_at(op, X, upstream=U, output=np.array([3.0, 4.0]), gradients=(7.0 * U * X,))


@case()
def output_numpy_array(framework: Framework) -> None:
    """A NumPy array that f returns becomes the framework's tensor."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        return np.sqrt(framework.backend.convert_to_numpy(x)), lambda u: 7.0 * u * x

    assert framework.backend.is_tensor(op(framework.tensor([4.0, 9.0])))


@case()
def output_with_static_leaves(framework: Framework) -> None:
    marker = object()
    op = op_custom_gradient(
        lambda x: ({"y": x * x, "about": (marker, None, 3)}, lambda u: 7.0 * u["y"] * x)
    )
    output = op(framework.tensor(X))
    assert output["about"][0] is marker
    assert output["about"][1:] == (None, 3)
    framework.check_at(op, X, upstream={"y": U, "about": None}, gradients=(7.0 * U * X,))


@case()
def output_with_a_static_argument(framework: Framework) -> None:
    """A configuration that holds tensors may pass through f unchanged: f did not make them."""
    config = types.SimpleNamespace(held=framework.tensor([3.0, 4.0]))
    op = op_custom_gradient(
        lambda x, config: ({"y": x * config.held, "config": config}, lambda u: (7.0 * u["y"], None))
    )
    assert op(framework.tensor(X), config)["config"] is config
    framework.check_at(lambda x: op(x, config)["y"], X, upstream=U, gradients=(7.0 * U,))


USED: dict[str, tuple[int, Any, Any]] = {
    "the first": (0, U, 7.0 * U),
    "the second": (1, 2.0, np.array([22.0, 22.0])),
    "the third": (2, np.array([[2.0, -3.0], [1.0, 0.5]]), 13.0 * U),
}


@case(used=USED)
def unused_outputs(framework: Framework, used: tuple[int, Any, Any]) -> None:
    """The upstream gradients of unused outputs are zeros, with the outputs' shapes and dtype."""
    at, upstream, expected = used
    seen: list[Any] = []

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        def grad(d1: Tensor, d2: Tensor, d3: Tensor) -> Tensor:
            seen.extend([d1, d2, d3])
            return 7.0 * d1 + 11.0 * d2 + 13.0 * d3[0]

        return (x * x, x[0] * x[1], x[None] * x[:, None]), grad

    framework.check_at(lambda x: op(x)[at], X, upstream=upstream, gradients=(expected,))
    upstreams = [np.zeros(shape) for shape in ((2,), (), (2, 2))]
    upstreams[at] = upstream
    framework.check_equal(seen, upstreams)
    assert [dtype_name(d.dtype) for d in seen] == ["float32"] * 3


@case()
def integer_output(framework: Framework) -> None:
    """An integer output is unchanged; its upstream gradient is zeros of its own shape and dtype."""
    seen: list[Any] = []

    @op_custom_gradient
    def op(x: Tensor, n: Tensor) -> Any:
        def grad(d1: Tensor, d2: Tensor) -> Any:
            seen.append(d2)
            return 7.0 * d1 * x, None

        return (x * x, n + n), grad

    output, pullback = cgshim.op_vjp(op, framework.tensor(X), framework.tensor([3, 4, 5], "int32"))
    framework.check_equal(output, (X * X, np.array([6, 8, 10])))
    assert dtype_name(output[1].dtype) == "int32"
    gradients = pullback((framework.tensor(U), None))
    framework.check_equal(gradients, (7.0 * U * X, None))
    framework.check_equal(seen, [np.zeros(3)])
    assert dtype_name(seen[0].dtype) == "int32"


@case()
def integers_alone(framework: Framework) -> None:
    """With only integers on one side, the other side has no gradient, and no error is raised."""
    whole = framework.tensor([3, 4], "int32")
    to_integers = op_custom_gradient(lambda x: (whole, lambda u: 0.0 * x))
    of_integers = op_custom_gradient(lambda n: (n + n, lambda u: None))
    output, pullback = cgshim.op_vjp(to_integers, framework.tensor(X))
    framework.check_equal((output, pullback(None)), (np.array([3, 4]), (np.zeros(2),)))
    output, pullback = cgshim.op_vjp(of_integers, whole)
    framework.check_equal((output, pullback(None)), (np.array([6, 8]), (None,)))


@case()
def outputs_reach_their_own_argument(framework: Framework) -> None:
    """Two outputs, two arguments: neither upstream nor gradients change places."""
    op = op_custom_gradient(lambda x, y: ((y * 2.0, x * 3.0), lambda u: (7.0 * u[1], 11.0 * u[0])))
    y, d1, d2 = np.array([[5.0]]), np.array([[2.0]]), np.array([0.5, -3.0])
    framework.check_at(
        op, X, y, upstream=(d1, d2), output=(2.0 * y, 3.0 * X), gradients=(7.0 * d2, 11.0 * d1)
    )
