"""Hidden ways into or out of an op: static leaves, attributes, options, raising rules."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np

import cgshim
from cgshim import (
    CustomGradientError,
    CustomGradientTypeError,
    op_convert_to_numpy,
    op_custom_gradient,
)
from cgshim._protocol import Tensor
from cgshim.testing.conformance._common import Holder, U, X, Y
from cgshim.testing.conformance._framework import Framework, raised
from cgshim.testing.conformance._registry import case

# --- Static leaves of the output ------------------------------------------------------------------


class Slotted:
    """A Holder without a __dict__."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "an object": Holder,
    "an object with slots": Slotted,
    "a namespace": lambda held: types.SimpleNamespace(held=held),
    "a closure": lambda held: lambda: held,
    "a list in an object": lambda held: Holder([{"held": held}]),
    "an object in an object": lambda held: Holder(Holder(held)),
}


@case(wrap=WRAPPERS)
def tensor_in_a_static_leaf(framework: Framework, wrap: Callable[[Any], Any]) -> None:
    """No rule covers the tensor: its gradient would be autodiff's, or missing."""
    op = op_custom_gradient(
        lambda x: ({"y": x * x, "rest": wrap(x * 3.0)}, lambda u: 7.0 * u["y"]), name="leaking"
    )
    x, sentence = (
        framework.tensor(X),
        "leaking: the output of f must hold its tensors in containers",
    )
    raised(CustomGradientTypeError, op, x, starts=sentence)
    raised(CustomGradientTypeError, cgshim.op_vjp, op, x, starts=sentence)


@case(wrap=WRAPPERS)
def static_leaf_without_tensors(framework: Framework, wrap: Callable[[Any], Any]) -> None:
    """It leaves the op as the same object, differentiated or not."""
    leaf = wrap(3.0)
    op = op_custom_gradient(lambda x: ((x * x, leaf), lambda u: 7.0 * u[0] * x))
    assert op(framework.tensor(X))[1] is leaf
    framework.check_at(lambda x: op(x)[0], X, upstream=U, output=X * X, gradients=(7.0 * U * X,))


# --- Tensors that only grad_fn reads --------------------------------------------------------------


class Layer:
    """An object with a weight, which the op's rule reads and f does not."""

    def __init__(self, w: Tensor) -> None:
        self.w = w

    @op_custom_gradient
    def twice(self, x: Tensor) -> Any:
        return 2.0 * x, lambda u: 7.0 * u * self.w


@op_custom_gradient
def twice_with_an_option(x: Tensor, *, w: Tensor) -> Any:
    return 2.0 * x, lambda u: 7.0 * u * w


def _twice_of_an_object(x: Tensor, w: Tensor) -> Tensor:
    holder = types.SimpleNamespace(deep=Holder(w))
    return op_custom_gradient(lambda x: (2.0 * x, lambda u: 7.0 * u * holder.deep.held))(x)


READERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a closure": lambda x, w: op_custom_gradient(lambda x: (2.0 * x, lambda u: 7.0 * u * w))(x),
    "a default value": lambda x, w: op_custom_gradient(
        lambda x: (2.0 * x, lambda u, w=w: 7.0 * u * w)
    )(x),
    "an attribute of the op's object": lambda x, w: Layer(w).twice(x),
    "an attribute of an object": _twice_of_an_object,
    "an option": lambda x, w: twice_with_an_option(x, w=w),
}


@case(read=READERS)
def tensor_that_the_rule_alone_reads(
    framework: Framework, read: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Raises an error, or has the rule's gradients as plain tensors: 0 for independent ones."""
    x, w, upstream = framework.tensors((X, Y, U))
    try:
        output, pullback = cgshim.op_vjp(read, x, w)
        gradients = pullback(upstream)
    except CustomGradientTypeError:  # a captured tensor raises an error
        return
    _check_plain(output, 2.0 * X)
    _check_plain(gradients[0], 7.0 * U * Y)
    _check_plain(gradients[1], 0.0)


@case(read=READERS)
def tensor_that_the_rule_alone_reads_inside(
    framework: Framework, read: Callable[..., Tensor]
) -> None:
    """The gradient, 7 u w, has a derivative by w, taken while w is differentiated."""
    x, upstream = framework.tensor(1.0), framework.tensor(2.0)

    def gradient(w: Tensor) -> Tensor:
        return cgshim.op_vjp(lambda x: read(x, w), x)[1](upstream)[0]

    try:
        output, pullback = cgshim.op_vjp(gradient, framework.tensor(5.0))
        gradients = pullback(framework.tensor(3.0))
    except CustomGradientError:
        return
    _check_plain(output, 70.0)
    _check_plain(gradients[0], 42.0)


def _check_plain(actual: Any, expected: Any) -> None:
    """Check a tensor's numbers, and that no derivative is attached."""
    assert type(actual).__name__ != "ArrayBox"
    np.testing.assert_allclose(op_convert_to_numpy(actual), expected, rtol=1e-5)


# --- Rules with extra gradients or none ------------------------------------------------------------

PAIRS: dict[str, Callable[[Tensor], Any]] = {
    "a list": lambda g: (g, []),
    "a tuple": lambda g: (g, ()),
    "in a list": lambda g: ([g], []),
}


@case(write=PAIRS)
def pair_without_variables(framework: Framework, write: Callable[[Tensor], Any]) -> None:
    """A rule with `variables=None` may return (gradients, [one per variable]) if f reads none."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        return x * x, lambda upstream, variables=None: write(7.0 * upstream * x)

    framework.check_at(op, X, upstream=U, gradients=(7.0 * U * X,))


@case()
def pair_without_variables_of_two_arguments(framework: Framework) -> None:
    op = op_custom_gradient(
        lambda x, y: (x * y, lambda u, variables=None: ((7.0 * u * y, 11.0 * u * x), []))
    )
    y = np.array([3.0, 5.0])
    framework.check_at(op, X, y, upstream=U, gradients=(7.0 * U * y, 11.0 * U * X))


class ForbiddenError(NotImplementedError):
    """An author's error where there is no gradient: None would mean zero."""


@case()
def rule_that_forbids(framework: Framework) -> None:
    """The output exists; taking its gradient raises the author's error."""
    fault = ForbiddenError("not differentiable")

    def forbid(upstream: Tensor) -> Any:
        raise fault

    op = op_custom_gradient(lambda x: (x * x, forbid))
    x = framework.tensor(X)
    output, pullback = cgshim.op_vjp(op, x)
    framework.check_equal([op(x), output], [X * X, X * X])
    assert raised(ForbiddenError, pullback, framework.tensor(U)) is fault


@case()
def rule_that_forbids_the_second_order(framework: Framework) -> None:
    """An op in the rule forbids the second order: the first one works."""
    fault = ForbiddenError("not twice differentiable")

    def forbid(upstream: Tensor) -> Any:
        raise fault

    slope = op_custom_gradient(lambda x: (5.0 * x * x, forbid))
    op = op_custom_gradient(lambda x: (x * x * x, lambda u: u * slope(x)))
    framework.check_derivative(op, 1, 20.0, at=2.0)
    first, pullback = cgshim.op_vjp(cgshim.op_grad(op), framework.tensor(2.0))
    framework.check_equal(first, 20.0)
    assert raised(ForbiddenError, pullback, framework.tensor(1.0)) is fault
