"""Within f and grad_fn the call's backend is current: tensors made from no tensor belong to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

import cgshim
from cgshim import op_convert_to_tensor, op_custom_gradient, op_grad, op_sum, ops
from cgshim.testing.conformance._framework import Framework
from cgshim.testing.conformance._registry import case

X, UPSTREAM = np.array([1.0, -2.0, 4.0]), np.array([1.0, 10.0, 100.0])
ROW = np.array([0.5, 2.0, -1.0])

MAKERS: dict[str, tuple[Callable[[], Any], Any]] = {
    "zeros": (lambda: ops.zeros(3), np.zeros(3)),
    "ones": (lambda: ops.ones(3, dtype="float64"), np.ones(3)),
    "full": (lambda: ops.full(3, 2.5), np.full(3, 2.5)),
    "eye": (lambda: ops.eye(3)[1], np.eye(3)[1]),
    "arange": (lambda: ops.arange(3), np.arange(3.0)),
    "linspace": (lambda: ops.linspace(0.0, 1.0, 3), np.linspace(0.0, 1.0, 3)),
    "an array": (lambda: op_convert_to_tensor(ROW, "float32"), ROW),
    "numbers": (lambda: op_convert_to_tensor([0.5, 2.0, -1.0]), ROW),
}


@case(maker=MAKERS)
def tensors_made_within_f_and_grad_fn(
    framework: Framework, maker: tuple[Callable[[], Any], Any]
) -> None:
    make, expected = maker
    are_tensors: list[bool] = []

    def making() -> Any:
        x = make()
        are_tensors.append(framework.backend.is_tensor(x))
        return framework.backend.stop_gradient(op_convert_to_tensor(x, "float32"))

    @op_custom_gradient
    def op(x: Any) -> Any:
        return x * making(), lambda upstream: 7.0 * upstream * (1.0 + making())

    framework.check_at(
        op, X, upstream=UPSTREAM, output=X * expected, gradients=(7 * UPSTREAM * (1 + expected),)
    )
    assert len(are_tensors) >= 2
    assert all(are_tensors)


@case()
def dtypes_of_tensors_made_within_f(framework: Framework) -> None:
    made: list[Any] = []

    @op_custom_gradient
    def op(x: Any) -> Any:
        for dtype in ("float32", "int32"):
            made.append(ops.zeros((2, 3), dtype=dtype))
            made.append(op_convert_to_tensor(ROW, dtype))
        return 2.0 * x, lambda upstream: 7.0 * upstream

    op(framework.tensor(X))
    assert [cgshim.op_dtype(x) for x in made] == ["float32", "float32", "int32", "int32"]


@case()
def name_of_the_backend_within_f_and_grad_fn(framework: Framework) -> None:
    names: list[str | None] = []

    @op_custom_gradient
    def op(x: Any) -> Any:
        names.append(cgshim.config_backend())

        def grad_fn(upstream: Any) -> Any:
            names.append(cgshim.config_backend())
            return 7.0 * upstream

        return 2.0 * x, grad_fn

    before = cgshim.config_backend()
    framework.check_at(op, X, upstream=UPSTREAM, gradients=(7 * UPSTREAM,))
    assert set(names) == {framework.name}
    assert len(names) >= 2
    assert cgshim.config_backend() == before


@case()
def backend_after_an_error_in_f(framework: Framework) -> None:
    @op_custom_gradient
    def op(x: Any) -> Any:
        raise ZeroDivisionError("from f")

    before = cgshim.config_backend()
    with contextlib.suppress(ZeroDivisionError):
        op(framework.tensor(X))
    assert cgshim.config_backend() == before


@case()
def arrays_within_f_stay_arrays_in_functions(framework: Framework) -> None:
    """An op of only NumPy arrays returns arrays, so that NumPy code works within f."""
    is_chosen = cgshim.config_backend() is not None

    @op_custom_gradient
    def op(x: Any) -> Any:
        kernel = ops.exp(ROW)
        assert is_chosen or isinstance(kernel, np.ndarray)
        return x * op_convert_to_tensor(kernel, "float32"), lambda upstream: 7.0 * upstream

    framework.check_at(op, X, upstream=UPSTREAM, output=X * np.exp(ROW), gradients=(7 * UPSTREAM,))


@case()
def an_op_on_the_host_within_f_runs_with_numpy(framework: Framework) -> None:
    @cgshim.op_host(outputs=lambda x: x)
    def cubes(x: Any) -> Any:
        assert cgshim.config_backend() == "numpy"
        return x**3 + ops.zeros(3)

    @op_custom_gradient
    def op(x: Any) -> Any:
        y = cubes(x)
        return y + ops.cast(ops.ones(3), "float32"), lambda upstream: 7.0 * upstream * x * x

    gradient = op_grad(lambda x: op_sum(op(x) * framework.tensor(UPSTREAM)))(framework.tensor(X))
    framework.check_equal(gradient, 7 * UPSTREAM * X**2)
