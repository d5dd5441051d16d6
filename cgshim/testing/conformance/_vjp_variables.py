"""op_vjp by what a function reads without being given it: beside any function, and in a rule.

A backend without `vjp_with_variables` differentiates by arguments alone, and must say so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cgshim
from cgshim import CustomGradientTypeError, op_custom_gradient, op_stop_gradient
from cgshim._protocol import Tensor
from cgshim.testing.conformance._captured import refused
from cgshim.testing.conformance._framework import Framework, Gradients
from cgshim.testing.conformance._registry import case


def _offered(framework: Framework, fn: Callable[..., Any], *state: Tensor) -> Gradients | None:
    """How the framework differentiates by state; None where op_vjp has refused its variables, as it then must."""
    if hasattr(framework.backend, "vjp_with_variables"):
        return framework.differentiate_state
    error = refused(framework.differentiate_state, fn, *state)
    assert "differentiates by arguments alone" in str(error), str(error)
    return None


@case()
def vjp_by_variables(framework: Framework) -> None:
    """A pair: the gradients of arguments, and those of variables in their order, zeros for one that is not read."""
    x, upstream = framework.tensor([1.0, 2.0]), framework.tensor([2.0, -3.0])
    state = framework.tensor(5.0), framework.tensor(7.0)
    found: list[Any] = []

    def fn(w: Tensor, unread: Tensor) -> Tensor:
        scaled = lambda x, mode: {"y": x * x * w, "mode": mode}
        output, pullback = cgshim.op_vjp(scaled, x, "static", variables=[unread, w])
        found[:] = [pullback({"y": upstream, "mode": None}) for _ in range(2)]
        return output["y"] + 0.0 * unread

    differentiate = _offered(framework, fn, *state)
    if differentiate is None:
        return
    output, _ = differentiate(fn, *state)
    framework.check_equal(output, np.array([5.0, 20.0]))
    for gradients in found:
        framework.check_equal(gradients, ((np.array([20.0, -60.0]), None), [np.array(0.0), np.array(-10.0)]))


@case()
def vjp_by_no_variables(framework: Framework) -> None:
    """An empty list is a list: the pullback returns a pair on every backend."""
    x = framework.tensor([1.0, 2.0])
    _, pullback = cgshim.op_vjp(lambda x: x * x, x, variables=[])
    framework.check_equal(pullback(framework.tensor([2.0, -3.0])), ((np.array([4.0, -12.0]),), []))


def _recomputed(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """fn with 7 times its gradients, which its rule takes by running it again."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        def rule(upstream: Tensor, variables: Any) -> Any:
            return cgshim.op_vjp(fn, x, variables=variables)[1](7.0 * upstream)

        return fn(op_stop_gradient(x)), rule

    return op


@case()
def vjp_by_the_variables_of_a_rule(framework: Framework) -> None:
    """What the pullback returns is what the rule returns."""
    x, upstream = framework.tensor([1.0, 2.0]), framework.tensor([2.0, -3.0])

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return _recomputed(lambda x: x * x * w)(x)

    differentiate = _offered(framework, fn, framework.tensor(5.0), x)
    if differentiate is None:
        return
    output, pullback = differentiate(fn, framework.tensor(5.0), x)
    framework.check_equal(output, np.array([5.0, 20.0]))
    framework.check_equal(pullback(upstream), (np.array(-70.0), np.array([140.0, -420.0])))


@case()
def second_order_by_the_variables_of_a_rule(framework: Framework) -> None:
    """The gradient 7 u 2 x w^3 of the argument, differentiated by the variable and by the argument."""
    x, upstream = framework.tensor([1.0, 2.0]), framework.tensor([2.0, -3.0])

    def gradient(w: Tensor, x: Tensor) -> Tensor:
        op = _recomputed(lambda x: x * x * w * w * w)
        return cgshim.op_vjp(op, x)[1](upstream)[0]

    differentiate = _offered(framework, gradient, framework.tensor(5.0), x)
    if differentiate is None:
        return
    output, pullback = differentiate(gradient, framework.tensor(5.0), x)
    framework.check_equal(output, np.array([3500.0, -10500.0]))
    gradients = pullback(framework.tensor([1.0, 10.0]))
    framework.check_equal(gradients, (np.array(2100.0 - 63000.0), np.array([3500.0, -52500.0])))


NO_VARIABLES: dict[str, tuple[Callable[[Framework], Any], str]] = {
    "a tensor": (lambda framework: framework.tensor([1.0, 2.0]),
                 "variables must be a list of tensors, got f32[2]; write variables=[...]"),
    "a word": (lambda framework: ["w"],
               "variables must be float or complex tensors of {}, got str; leave out what has no gradient"),
    "integers": (lambda framework: [framework.tensor([1, 2], "int32")],
                 "variables must be float or complex tensors of {}, got i32[2]; leave out what has no gradient"),
    "the same one twice": (lambda framework: [framework.tensor(2.0)] * 2,
                           "variables must be different tensors, got f32[] twice; name it once"),
}  # fmt: skip


@case(form=NO_VARIABLES)
def what_are_no_variables(framework: Framework, form: tuple[Callable[[Framework], Any], str]) -> None:
    make, sentence = form
    x = framework.tensor([1.0, 2.0])

    def square(x: Tensor) -> Tensor:
        return x * x

    error = refused(lambda fn, x: cgshim.op_vjp(fn, x, variables=make(framework)), square, x)
    assert isinstance(error, CustomGradientTypeError)
    assert str(error) == f"op_vjp(square): {sentence.format(framework.name)}", str(error)
