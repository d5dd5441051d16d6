"""Forward mode by promise: J v is the transpose of a rule that is linear in upstream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cgshim import (
    TransformationError,
    op_cast,
    op_custom_gradient,
    op_embed_gradient,
    op_stop_gradient,
    ops,
)
from cgshim._protocol import Tensor
from cgshim._transforms import jvp_of
from cgshim.testing.conformance._framework import Framework, raised, tangent
from cgshim.testing.conformance._registry import case

VECTOR, UPSTREAM = np.array([1.0, 2.0, -3.0]), np.array([2.0, -3.0, 0.5])
MATRIX = np.array([[1.0, 2.0], [-3.0, 0.5], [4.0, -1.0]])
"""the rule has 7 times its transpose"""


class Linear(NamedTuple):
    """A function, its linear rule (with wrong factors on purpose), and the resulting J v."""

    f: Callable[[Tensor, Tensor], Tensor]
    """f of MATRIX and x"""
    rule: Callable[[Tensor, Tensor, Tensor], Any]
    """the rule of MATRIX, x and upstream"""
    tangent: Callable[[Any, Any], Any]
    at: Any = VECTOR


LINEAR: dict[str, Linear] = {
    "scale": Linear(lambda m, x: x * x, lambda m, x, u: 7.0 * u * x, lambda x, v: 7 * x * v),
    "negative and quotient": Linear(
        lambda m, x: x * x, lambda m, x, u: -u * x / 2.0 + u, lambda x, v: v - x * v / 2
    ),
    "difference": Linear(lambda m, x: x * x, lambda m, x, u: 7.0 * u * x - u, lambda x, v: 7 * x * v - v),
    "of the sum": Linear(
        lambda m, x: ops.sum(x * x), lambda m, x, u: 7.0 * u * x, lambda x, v: 7 * (x * v).sum()
    ),
    "of broadcasting": Linear(
        lambda m, x: x * m, lambda m, x, u: 7.0 * ops.sum(u * m),
        lambda x, v: 7 * v * MATRIX, np.array(3.0),
    ),
    "of a sum over an axis": Linear(
        lambda m, x: ops.sum(x * x, axis=0), lambda m, x, u: 7.0 * u * x, lambda x, v: 7 * (x * v).sum(0), MATRIX,
    ),
    "of a product of matrices": Linear(
        lambda m, x: ops.matmul(x, m), lambda m, x, u: 7.0 * ops.matmul(m, u), lambda x, v: 7 * v @ MATRIX,
    ),
    "of a reshape and a transposition": Linear(
        lambda m, x: ops.reshape(ops.transpose(x), (3, 2)),
        lambda m, x, u: 7.0 * ops.transpose(ops.reshape(u, (2, 3))),
        lambda x, v: 7 * v.T.reshape(3, 2), MATRIX,
    ),
    "of an index": Linear(lambda m, x: x[None], lambda m, x, u: 7.0 * u[0], lambda x, v: 7 * v[None]),
    "of a slice": Linear(
        lambda m, x: ops.concatenate([x, x]), lambda m, x, u: 7.0 * u[:3] + 11.0 * u[3:],
        lambda x, v: np.concatenate([7 * v, 11 * v]),
    ),
    "of a concatenation": Linear(
        lambda m, x: x[:2], lambda m, x, u: ops.concatenate([7.0 * u, 0.0 * u[:1]]), lambda x, v: 7 * v[:2]
    ),
    "of a stack": Linear(
        lambda m, x: x[0] + x[1], lambda m, x, u: ops.stack([7.0 * u, 11.0 * u, 0.0 * u]),
        lambda x, v: np.array(7 * v[0] + 11 * v[1]),
    ),
    "of a mask": Linear(
        lambda m, x: ops.where(x > 0.0, x, 0.0 * x), lambda m, x, u: ops.where(x > 0.0, 7.0 * u, 0.0 * u),
        lambda x, v: np.where(x > 0, 7 * v, 0),
    ),
    "of a float mask": Linear(
        lambda m, x: x * op_cast(x > 0.0, "float32"), lambda m, x, u: 7.0 * u * op_cast(x > 0.0, "float32"),
        lambda x, v: np.where(x > 0, 7 * v, 0),
    ),
    "of nothing": Linear(lambda m, x: x * 3.0, lambda m, x, u: (None,), lambda x, v: 0 * v),
    "by a nonlinear factor": Linear(
        lambda m, x: ops.exp(x), lambda m, x, u: 7.0 * u * ops.sin(x) * abs(x),
        lambda x, v: 7 * v * np.sin(x) * abs(x),
    ),
}  # fmt: skip


@case(linear=LINEAR)
def linear_rule(framework: Framework, linear: Linear) -> None:
    m = framework.tensor(MATRIX)
    op = op_custom_gradient(
        lambda x: (linear.f(m, x), lambda u: linear.rule(m, x, u)), forward_mode=True
    )
    v = np.linspace(0.5, 2.0, linear.at.size).reshape(linear.at.shape)
    output_tangent = tangent(framework, op, *framework.tensors((linear.at, v)))
    framework.check_equal(output_tangent, linear.tangent(linear.at, v))


@case()
def linear_rule_of_two_arguments_and_outputs(framework: Framework) -> None:
    """The transposed rule: a tangent of each output from the tangents of both arguments."""

    @op_custom_gradient(forward_mode=True)
    def op(x: Tensor, y: Tensor) -> Any:
        return (x * y, x + y), lambda d1, d2: (7.0 * d1 * y + 2.0 * d2, 11.0 * d1 * x + 3.0 * d2)

    x, y, s, t = framework.tensors((2.0, 3.0, 0.5, 0.25))
    _, output_tangents = jvp_of(framework.backend)(lambda *xs: op(*xs), [x, y], [s, t])
    framework.check_equal(list(output_tangents), [21 * 0.5 + 22 * 0.25, 2 * 0.5 + 3 * 0.25])


@case()
def linear_rule_that_keeps_its_output(framework: Framework) -> None:
    @op_custom_gradient(forward_mode=True)
    def op(x: Tensor) -> Any:
        y = op_stop_gradient(ops.exp(x))
        return y, lambda u: 5.0 * u * y

    output_tangent = tangent(framework, op, *framework.tensors((0.5, 3.0)))
    framework.check_equal(output_tangent, 15.0 * np.exp(0.5))


NONLINEAR: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "affine": lambda x, u: u + 1.0,
    "affine in x": lambda x, u: 7.0 * u + x,
    "affine by subtraction": lambda x, u: x - u,
    "constant": lambda x, u: 0.0 * op_stop_gradient(x) + 3.0,
    "square": lambda x, u: u * u,
    "quotient": lambda x, u: x / (u + 0.0 * x),
    "sign": lambda x, u: ops.sign(u) * x,
    "floor": lambda x, u: ops.floor(u),
    "absolute value": lambda x, u: ops.abs(u),
    "stop_gradient": lambda x, u: op_stop_gradient(u) * x,
    "a cast to integers": lambda x, u: op_cast(op_cast(u, "int32"), "float32"),
    "a mask of upstream": lambda x, u: ops.where(u > 0.0, 7.0 * u, 0.0 * u),
    "exponential": lambda x, u: ops.exp(u),
}


@case(rule=NONLINEAR)
def nonlinear_rule(framework: Framework, rule: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A rule that breaks the promise raises an error."""
    op = op_custom_gradient(
        lambda x: (x * x, lambda u: rule(x, u)), forward_mode=True, name="promising"
    )
    raised(
        TransformationError,
        tangent,
        framework,
        op,
        *framework.tensors((VECTOR, UPSTREAM)),
        starts="promising: ",
    )


NONLINEAR_IN_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the larger": lambda a, b: ops.maximum(a, b),
    "a choice": lambda a, b: ops.where(a > b, a, b),
    "a distance": lambda a, b: ops.abs(a - b),
    "a quotient": lambda a, b: a * a / b,
    "a geometric mean": lambda a, b: ops.sqrt(a * b),
    "a length": lambda a, b: ops.sign(a) * ops.sqrt(a * a + b * b),
}


@case(rule=NONLINEAR_IN_TWO)
def nonlinear_rule_of_two_outputs(
    framework: Framework, rule: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """It is homogeneous, but not additive."""
    op = op_custom_gradient(
        lambda x: ((x * x, 2.0 * x), lambda a, b: rule(a, b)), forward_mode=True, name="promising"
    )
    point, tangents = framework.tensors((VECTOR, UPSTREAM))
    fn = lambda x: ops.sum(ops.stack(list(op(x))))
    raised(TransformationError, tangent, framework, fn, point, tangents, starts="promising: ")


@case(rule=NONLINEAR)
def nonlinear_rule_in_reverse(
    framework: Framework, rule: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """In reverse mode a nonlinear rule is allowed: clipping, signs and noise are common."""
    op = op_custom_gradient(lambda x: (x * x, lambda u: rule(x, u)), forward_mode=True)
    expected = framework.numpy(rule(*framework.tensors((VECTOR, UPSTREAM))))
    framework.check_at(op, VECTOR, upstream=UPSTREAM, output=VECTOR**2, gradients=(expected,))


@case(name={"by its own name": None, "by another": "loss"})
def embedded_gradient_in_forward_mode(framework: Framework, name: str | None) -> None:
    fn = lambda x: op_embed_gradient(ops.sum(x * x), 7.0 * x, x, name=name)
    output_tangent = tangent(
        framework, fn, framework.tensor([2.0, 3.0]), framework.tensor([1.0, 10.0])
    )
    framework.check_equal(output_tangent, 7.0 * (2.0 + 30.0))
