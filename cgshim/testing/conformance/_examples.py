"""The leading examples in the documentation of other systems, written with cgshim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cgshim
from cgshim import op_custom_gradient
from cgshim._protocol import Tensor
from cgshim.testing.conformance._common import U
from cgshim.testing.conformance._framework import Framework
from cgshim.testing.conformance._registry import case


@op_custom_gradient
def log1pexp(x: Tensor) -> Any:
    """log(1 + exp(x)), with a gradient that is exact for large x; autodiff may have inf / inf."""
    e = cgshim.op_exp(x)
    return cgshim.op_log(1.0 + e), lambda upstream: upstream * (1.0 - 1.0 / (1.0 + e))


@op_custom_gradient
def log1pexp_of_core_ops(x: Tensor) -> Any:
    """The same, only with functions of cgshim."""
    e = cgshim.op_exp(x)
    one = cgshim.op_convert_to_tensor(1.0, cgshim.op_dtype(x))

    def grad(upstream: Tensor) -> Tensor:
        return cgshim.op_multiply(
            upstream, cgshim.op_subtract(1.0, cgshim.op_divide(1.0, cgshim.op_add(one, e)))
        )

    return cgshim.op_log(cgshim.op_add(one, e)), grad


@op_custom_gradient
def log1pexp_of_keras(x: Tensor) -> Any:
    """The same, with the rule as Keras documents it."""
    e = cgshim.op_exp(x)

    def grad(*args: Tensor, upstream: Tensor | None = None) -> Tensor:
        if upstream is None:
            (upstream,) = args
        return cgshim.op_multiply(upstream, 1.0 - 1.0 / cgshim.op_add(1.0, e))

    return cgshim.op_log(1.0 + e), grad


SPELLINGS = {"operators": log1pexp, "core ops": log1pexp_of_core_ops, "keras": log1pexp_of_keras}


@case(op=SPELLINGS)
def stable_log1pexp(framework: Framework, op: Callable[[Tensor], Tensor]) -> None:
    """At 100 in float32, where exp(x) is inf, the gradient is exactly 1."""
    with np.errstate(over="ignore", invalid="ignore"), cgshim.use_backend(framework.name):
        assert cgshim.config_backend() == framework.name
        x = cgshim.op_convert_to_tensor(100.0, "float32")
        assert framework.numpy(cgshim.op_grad(op)(x)) == 1.0
        small = np.array([0.0, 1.0])
        sigmoid = 1.0 / (1.0 + np.exp(-small))
        framework.check_at(
            op, small, upstream=U, output=np.log1p(np.exp(small)), gradients=(sigmoid * U,)
        )


@case()
def product_asked_twice(framework: Framework) -> None:
    op = op_custom_gradient(lambda x, y: (x * y, lambda upstream: (upstream * y, upstream * x)))
    output, pullback = cgshim.op_vjp(op, *framework.tensors((2.0, 3.0)))
    framework.check_equal(output, 6.0)
    for _ in range(2):
        framework.check_equal(pullback(framework.tensor(1.0)), (3.0, 2.0))


@case()
def line_with_captured_weights(framework: Framework) -> None:
    def line(w: Tensor, x: Tensor) -> Tensor:
        @op_custom_gradient
        def op(x: Tensor) -> Any:
            def grad(dpoly: Tensor, variables: Any) -> Any:
                assert len(variables) == 1
                assert framework.is_state(variables[0], w)
                of_w = cgshim.op_stack([cgshim.op_sum(dpoly * x**1), cgshim.op_sum(dpoly * x**0)])
                return dpoly * w[1], [of_w]

            return w[1] * x + w[0], grad

        return op(x)

    w, x = np.ones(2), np.array([1.0, 2.0, 3.0])
    framework.check_state(
        line,
        w,
        x,
        upstream=np.ones(3),
        output=x + 1.0,
        gradients=(np.array([6.0, 3.0]), np.ones(3)),
    )


@case()
def shuffle_with_a_rule(framework: Framework) -> None:
    """A function without a derivative, with a rule that returns the upstream gradient."""

    def shuffled(x: Tensor) -> Tensor:
        return cgshim.op_stop_gradient(cgshim.op_concatenate([x[2:], x[:1], x[1:2]]))

    x, upstream = np.array([1.0, 2.0, 3.0]), np.array([2.0, -3.0, 0.5])
    op = op_custom_gradient(lambda x: (shuffled(x), lambda upstream: upstream))
    framework.check_at(op, x, upstream=upstream, output=x[[2, 0, 1]], gradients=(upstream,))
    framework.check_at(
        lambda x: shuffled(x) + 0.0 * x, x, upstream=upstream, gradients=(np.zeros(3),)
    )
