"""Details that nothing else asks for, each of which a small mistake would change unseen."""

from __future__ import annotations

from typing import Any

import numpy as np

import cgshim
from cgshim import op_custom_gradient, op_embed_gradient, ops
from cgshim._protocol import Tensor
from cgshim.testing.conformance._framework import Framework, tangent
from cgshim.testing.conformance._registry import case


@case()
def mask_beside_a_residual(framework: Framework) -> None:
    """Of a rule that keeps booleans, and a tensor that is made again for the second order."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        square, is_positive = x * x, x > 0.0
        return square * x, lambda u: ops.where(is_positive, 5.0 * u * square, 7.0 * u * square)

    first = cgshim.op_grad(lambda x: 2.0 * op(x)[0] + op(x)[1])
    second = cgshim.op_grad(lambda x: first(x)[0] + 11.0 * first(x)[1])
    x = framework.tensor([3.0, -3.0])
    framework.check_equal(first(x), np.array([2.0 * 5.0 * 9.0, 7.0 * 9.0]))
    framework.check_equal(second(x), np.array([2.0 * 5.0 * 6.0, 11.0 * 7.0 * -6.0]))


@case(name={"by its own name": None, "by another": "loss"})
def embedded_gradient_in_forward_mode(framework: Framework, name: str | None) -> None:
    fn = lambda x: op_embed_gradient(ops.sum(x * x), 7.0 * x, x, name=name)
    found = tangent(framework, fn, framework.tensor([2.0, 3.0]), framework.tensor([1.0, 10.0]))
    framework.check_equal(found, np.array(7.0 * (2.0 + 30.0)))
