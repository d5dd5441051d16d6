"""What a new backend easily gets wrong between two derivatives, and in conversions."""

from __future__ import annotations

from typing import Any

import numpy as np

import cgshim
from cgshim import op_cast, op_convert_to_tensor, op_custom_gradient, op_stop_gradient
from cgshim._protocol import Tensor
from cgshim.testing.conformance._framework import Framework, raised
from cgshim.testing.conformance._registry import case


def _product(x: Tensor, w: Tensor) -> Tensor:
    return x * x * x * w


@op_custom_gradient
def product_with_its_vjp(x: Tensor, w: Tensor) -> Any:
    """Its rule takes the gradients of the product by op_vjp, and multiplies them by 7 and 11, wrong on purpose."""

    def grad(upstream: Tensor) -> Any:
        of_x, of_w = cgshim.op_vjp(_product, x, w)[1](upstream)
        return 7.0 * of_x, 11.0 * of_w

    return op_stop_gradient(_product(x, w)), grad


@case()
def second_order_through_op_vjp_in_a_rule(framework: Framework) -> None:
    """By both arguments and by upstream: the gradients are 21 u x^2 w, and the sum of 11 u x^3."""
    x, w, u = np.array([1.0, -2.0]), 5.0, np.array([2.0, -3.0])
    a, b = np.array([1.0, 10.0]), 0.5

    def gradients(x: Tensor, w: Tensor, u: Tensor) -> Any:
        return cgshim.op_vjp(product_with_its_vjp, x, w)[1](u)

    framework.check(
        gradients, framework.tensor(x), framework.tensor(w), framework.tensor(u),
        upstream=(framework.tensor(a), framework.tensor(b)),
        output=(21.0 * u * x**2 * w, np.array((11.0 * u * x**3).sum())),
        gradients=(
            42.0 * a * u * x * w + 33.0 * b * u * x**2,
            np.array((21.0 * a * u * x**2).sum()),
            21.0 * a * x**2 * w + 11.0 * b * x**3,
        ),
    )  # fmt: skip


@case(dtype={"without a dtype": None, "to its own dtype": "float32", "to another dtype": "float16"})
def convert_to_tensor_keeps_the_gradient(framework: Framework, dtype: str | None) -> None:
    """Of what is differentiated: by op_vjp, and further out than a rule that converts."""
    x, u = np.array([1.0, -2.0]), np.array([2.0, -3.0])

    def converted(x: Tensor) -> Tensor:
        return op_cast(op_convert_to_tensor(x, dtype), "float32")

    op = op_custom_gradient(lambda x: (x * x, lambda upstream: 7.0 * upstream * converted(x)))
    framework.check(
        lambda x: converted(x) * x, framework.tensor(x), upstream=framework.tensor(u),
        output=x * x, gradients=(2.0 * u * x,),
    )  # fmt: skip
    framework.check(
        lambda x: cgshim.op_vjp(op, x)[1](framework.tensor(u))[0], framework.tensor(x),
        upstream=framework.tensor([1.0, 10.0]), output=7.0 * u * x, gradients=(7.0 * u * [1.0, 10.0],),
    )  # fmt: skip


SOURCES: dict[str, Any] = {"a number": 2.0, "a list": [1.0, 2.0], "an array": np.array([1.0, 2.0], "float32")}


@case(source=SOURCES | {"a tensor": None})
def dtype_that_does_not_exist(framework: Framework, source: Any) -> None:
    """A TypeError, and not the default dtype."""
    source = framework.tensor([1.0, 2.0]) if source is None else source
    raised(TypeError, framework.backend.convert_to_tensor, source, "float7")
