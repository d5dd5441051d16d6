"""Declared variables: `op_custom_gradient(variables=...)`.

Each rule is wrong on purpose, with other factors for each variable, so that swapped gradients show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cgshim
from cgshim import CustomGradientValueError, op_custom_gradient
from cgshim._protocol import Tensor
from cgshim.testing.conformance._common import U, X, Y
from cgshim.testing.conformance._framework import Framework, refused
from cgshim.testing.conformance._registry import case


class Module:
    """An object with two trainable tensors of one shape and a frozen tensor."""

    def __init__(self, a: Tensor, b: Tensor, frozen: Tensor) -> None:
        self.a, self.b, self.frozen = a, b, frozen

    @op_custom_gradient(variables=lambda self: [self.a, self.frozen, self.b])
    def __call__(self, x: Tensor) -> Any:
        def grad(upstream: Tensor, variables: Any) -> Any:
            a, frozen, b = variables
            total = cgshim.ops.sum(upstream)
            return 5.0 * upstream * a, [3.0 * total * b, 99.0 * total * frozen, 7.0 * total * a]

        return x * self.b * self.frozen * self.a, grad  # in another order than declared


def _op(variables: Any, declare: Callable[[Any], Any] = lambda v: v) -> Callable[[Tensor], Tensor]:
    """An op of x that reads two variables in a tree, the second one first."""

    @op_custom_gradient(variables=declare(variables))
    def op(x: Tensor) -> Any:
        def grad(upstream: Tensor, variables: Any) -> Any:
            a, b = variables["z"], variables["a"][0]
            total = cgshim.ops.sum(upstream)
            return 5.0 * upstream, {"z": 3.0 * total * b, "a": (7.0 * total * a,)}

        return x * variables["a"][0] * variables["z"], grad

    return op


TOTAL = float(np.sum(U))
DECLARED: dict[str, Callable[[Any], Any]] = {
    "a tree": lambda variables: variables,
    "a callable": lambda variables: lambda: variables,
}


@case(declare=DECLARED)
def declared_variables(framework: Framework, declare: Callable[[Any], Any]) -> None:
    """Each variable gets its own gradient, in the order and structure of the declaration."""
    x = framework.tensor(X)
    fn = lambda a, b: _op({"z": a, "a": (b,)}, declare)(x)
    framework.check_state(
        fn, 2.0, 3.0, upstream=U, output=X * 6.0, gradients=(9.0 * TOTAL, 14.0 * TOTAL)
    )


@case()
def declared_variables_of_a_method(framework: Framework) -> None:
    """The frozen tensor keeps its place among the variables."""
    x, frozen = framework.tensor(X), framework.tensor(0.5)
    fn = lambda a, b: Module(a, b, frozen)(x)
    framework.check_state(
        fn, 2.0, 3.0, upstream=U, output=X * 3.0, gradients=(9.0 * TOTAL, 14.0 * TOTAL)
    )


@case()
def declared_variables_beside_an_argument(framework: Framework) -> None:
    fn = lambda a, b, x: _op({"z": a, "a": (b,)})(x)
    framework.check_state(
        fn, 2.0, 3.0, X, upstream=U, gradients=(9.0 * TOTAL, 14.0 * TOTAL, 5.0 * U)
    )


@case()
def declared_variables_that_are_frozen(framework: Framework) -> None:
    """The rule gets frozen variables as declared, and the argument's gradient is the rule's."""
    a, b = framework.tensors((2.0, 3.0))
    op = _op({"z": a, "a": (b,)})
    framework.check_at(op, X, upstream=U, output=X * 6.0, gradients=(5.0 * U,))
    framework.check_equal(op(framework.tensor(X)), X * 6.0)


@case()
def declared_variables_in_a_second_derivative(framework: Framework) -> None:
    """x w, with gradients 5 w^3 and 3 x w^2: the derivative by w is 6 x w."""

    def op_of(w: Tensor) -> Callable[[Tensor], Tensor]:
        def f(x: Tensor) -> Any:
            def grad(u: Tensor, variables: Any) -> Any:
                (w,) = variables
                return 5.0 * u * w * w * w, [3.0 * u * x * w * w]

            return x * w, grad

        return op_custom_gradient(f, variables=[w])

    x, u = framework.tensors((2.0, 1.0))

    def gradient(w: Tensor) -> Tensor:
        _, pullback = framework.differentiate_state(lambda w: op_of(w)(x), w)
        return pullback(u)[0]

    framework.check_equal(gradient(framework.tensor(3.0)), 54.0)
    weight = framework.tensor(3.0)
    framework.check_equal(cgshim.op_grad(op_of(weight))(x), 135.0)
    by_w = lambda w: cgshim.op_grad(lambda x: op_of(w)(x))(x)
    framework.check_state(by_w, 3.0, upstream=0.5, output=135.0, gradients=(67.5,))


@case()
def two_undeclared_variables(framework: Framework) -> None:
    """Their order would depend on the framework, so two variables must be declared."""
    x = framework.tensor(X)

    def fn(a: Tensor, b: Tensor) -> Tensor:
        rule = lambda upstream, variables: (upstream, [upstream, upstream])
        return op_custom_gradient(lambda x: (x * a + b, rule))(x)

    a, b = framework.tensors((Y, 1.0))
    refused(fn, a, b, by=framework.differentiate_state, says="variables=")


@case()
def undeclared_variable_beside_declared_ones(framework: Framework) -> None:
    x = framework.tensor(X)

    def fn(a: Tensor, b: Tensor) -> Tensor:
        rule = lambda upstream, variables: (upstream, [upstream])
        return op_custom_gradient(lambda x: (x * a + b, rule), variables=[a])(x)

    a, b = framework.tensors((Y, 1.0))
    refused(fn, a, b, by=framework.differentiate_state, says="variables=")


@case()
def variable_that_is_an_argument(framework: Framework) -> None:
    """Otherwise half of its gradient would be lost."""

    def fn(w: Tensor) -> Tensor:
        rule = lambda upstream, variables: (3.0 * upstream, [5.0 * upstream])
        return op_custom_gradient(lambda x: (x * w, rule), variables=[w])(w)

    refused(fn, framework.tensor(2.0), by=framework.differentiate_state)


@case()
def declared_variables_and_a_rule_without(framework: Framework) -> None:
    x = framework.tensor(X)

    def fn(w: Tensor) -> Tensor:
        return op_custom_gradient(lambda x: (x * w, lambda upstream: upstream), variables=[w])(x)

    refused(fn, framework.tensor(2.0), by=framework.differentiate_state)


@case()
def gradients_of_declared_variables_in_another_structure(framework: Framework) -> None:
    x = framework.tensor(X)

    def fn(w: Tensor) -> Tensor:
        rule = lambda upstream, variables: (upstream, [upstream[0]])
        return op_custom_gradient(lambda x: (x * w, rule), variables={"w": w})(x)

    refused(
        fn,
        framework.tensor(2.0),
        by=framework.differentiate_state,
        error=CustomGradientValueError,
        says="structured as declared",
    )
