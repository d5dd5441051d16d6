"""What could leave an op, or enter its rule, unnoticed: static leaves, attributes, options, and rules that forbid."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np

import cgshim
from cgshim import CustomGradientError, CustomGradientTypeError, op_convert_to_numpy, op_custom_gradient
from cgshim._protocol import Tensor
from cgshim.testing.conformance._framework import Framework, raised
from cgshim.testing.conformance._registry import case

# --- Static leaves of the output ------------------------------------------------------------------------------------


class Holder:
    """An object of the user's own, which no framework takes apart."""

    def __init__(self, held: Any) -> None:
        self.held = held


class Slotted:
    """The same, without a __dict__."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


def _closure(held: Any) -> Callable[[], Any]:
    return lambda: held


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "an object": Holder,
    "an object with slots": Slotted,
    "a namespace": lambda held: types.SimpleNamespace(held=held),
    "a closure": _closure,
    "a list in an object": lambda held: Holder([{"held": held}]),
    "an object in an object": lambda held: Holder(Holder(held)),
}


@case(wrap=WRAPPERS)
def tensor_in_a_static_leaf(framework: Framework, wrap: Callable[[Any], Any]) -> None:
    """No rule speaks for it: its gradient would be autodiff's, or none."""
    op = op_custom_gradient(lambda x: ({"y": x * x, "rest": wrap(x * 3.0)}, lambda u: 7.0 * u["y"]), name="leaking")
    x = framework.tensor([1.0, 2.0])
    for call in (lambda: op(x), lambda: cgshim.op_vjp(op, x)):
        error = raised(CustomGradientTypeError, call)
        assert str(error).startswith("leaking: the output of f must hold its tensors in containers"), error


@case(wrap=WRAPPERS)
def static_leaf_without_tensors(framework: Framework, wrap: Callable[[Any], Any]) -> None:
    """It goes out as the object that it is, gradient or none."""
    leaf = wrap(3.0)
    op = op_custom_gradient(lambda x: ((x * x, leaf), lambda u: 7.0 * u[0] * x))
    x = framework.tensor([1.0, 2.0])
    assert op(x)[1] is leaf
    framework.check(
        lambda x: op(x)[0], x, upstream=framework.tensor([2.0, -3.0]),
        output=np.array([1.0, 4.0]), gradients=(np.array([14.0, -42.0]),),
    )  # fmt: skip


# --- What grad_fn alone reads ---------------------------------------------------------------------------------------


class Layer:
    """An object with a weight, which the rule of its op reads and f does not."""

    def __init__(self, w: Tensor) -> None:
        self.w = w

    @op_custom_gradient
    def twice(self, x: Tensor) -> Any:
        return 2.0 * x, lambda u: 7.0 * u * self.w


@op_custom_gradient
def twice_with_an_option(x: Tensor, *, w: Tensor) -> Any:
    return 2.0 * x, lambda u: 7.0 * u * w


def _twice_of_a_closure(x: Tensor, w: Tensor) -> Tensor:
    return op_custom_gradient(lambda x: (2.0 * x, lambda u: 7.0 * u * w))(x)


def _twice_of_a_default_value(x: Tensor, w: Tensor) -> Tensor:
    return op_custom_gradient(lambda x: (2.0 * x, lambda u, w=w: 7.0 * u * w))(x)


def _twice_of_an_object(x: Tensor, w: Tensor) -> Tensor:
    holder = types.SimpleNamespace(deep=Holder(w))
    return op_custom_gradient(lambda x: (2.0 * x, lambda u: 7.0 * u * holder.deep.held))(x)


READERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a closure": _twice_of_a_closure,
    "a default value": _twice_of_a_default_value,
    "an attribute of the op's object": lambda x, w: Layer(w).twice(x),
    "an attribute of an object": _twice_of_an_object,
    "an option": lambda x, w: twice_with_an_option(x, w=w),
}


@case(read=READERS)
def tensor_that_the_rule_alone_reads(framework: Framework, read: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Refused; or the gradients are the rule's, and plain tensors: 0 for what the output does not depend on."""
    x, w, upstream = framework.tensor([1.0, 2.0]), framework.tensor(5.0), framework.tensor([2.0, -3.0])
    try:
        output, pullback = cgshim.op_vjp(read, x, w)
        gradients = pullback(upstream)
    except CustomGradientTypeError:  # a captured tensor is refused
        return
    _check_plain(output, [2.0, 4.0])
    _check_plain(gradients[0], [70.0, -105.0])
    _check_plain(gradients[1], 0.0)


@case(read=READERS)
def tensor_that_the_rule_alone_reads_inside(
    framework: Framework, read: Callable[[Tensor, Tensor], Tensor]
) -> None:  # fmt: skip
    """A derivative that is taken while w is differentiated: of the gradient, 7 u w, there is one by w."""
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


def _check_plain(found: Any, expected: Any) -> None:
    """A tensor of the framework, with these numbers, and nothing that belongs to a derivative."""
    assert type(found).__name__ != "ArrayBox"
    np.testing.assert_allclose(op_convert_to_numpy(found), expected, rtol=1e-5)


# --- Rules that say more, or less, than a gradient ------------------------------------------------------------------

PAIRS: dict[str, Callable[[Tensor], Any]] = {
    "a list": lambda g: (g, []),
    "a tuple": lambda g: (g, ()),
    "in a list": lambda g: ([g], []),
}


@case(write=PAIRS)
def pair_without_variables(framework: Framework, write: Callable[[Tensor], Any]) -> None:
    """A rule with `variables=None` that always returns (gradients, [one for each variable]), where f read none."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        return x * x, lambda upstream, variables=None: write(7.0 * upstream * x)

    framework.check(
        op, framework.tensor([1.0, 2.0]), upstream=framework.tensor([2.0, -3.0]), gradients=(np.array([14.0, -42.0]),)
    )


@case()
def pair_without_variables_of_two_arguments(framework: Framework) -> None:
    op = op_custom_gradient(lambda x, y: (x * y, lambda u, variables=None: ((7.0 * u * y, 11.0 * u * x), [])))
    framework.check(
        op, framework.tensor([1.0, 2.0]), framework.tensor([3.0, 5.0]), upstream=framework.tensor([2.0, -3.0]),
        gradients=(np.array([42.0, -105.0]), np.array([22.0, -66.0])),
    )  # fmt: skip


class ForbiddenError(NotImplementedError):
    """What an author raises where there is no gradient: None would say zero."""


@case()
def rule_that_forbids(framework: Framework) -> None:
    """The output is there; who asks for a gradient gets the author's own exception."""
    fault = ForbiddenError("not differentiable")

    def forbid(upstream: Tensor) -> Any:
        raise fault

    op = op_custom_gradient(lambda x: (x * x, forbid))
    x, upstream = framework.tensor([1.0, 2.0]), framework.tensor([2.0, -3.0])
    framework.check_equal(op(x), np.array([1.0, 4.0]))
    output, pullback = cgshim.op_vjp(op, x)
    framework.check_equal(output, np.array([1.0, 4.0]))
    assert raised(ForbiddenError, pullback, upstream) is fault


@case()
def rule_that_forbids_the_second_order(framework: Framework) -> None:
    """By an op in the rule that forbids: the first order stays."""
    fault = ForbiddenError("not twice differentiable")

    def forbid(upstream: Tensor) -> Any:
        raise fault

    slope = op_custom_gradient(lambda x: (5.0 * x * x, forbid))
    op = op_custom_gradient(lambda x: (x * x * x, lambda u: u * slope(x)))
    framework.check_equal(cgshim.op_grad(op)(framework.tensor(2.0)), np.array(20.0))
    first, pullback = cgshim.op_vjp(cgshim.op_grad(op), framework.tensor(2.0))
    framework.check_equal(first, np.array(20.0))
    assert raised(ForbiddenError, pullback, framework.tensor(1.0)) is fault
