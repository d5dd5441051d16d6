"""Residuals in each place where grad_fn may keep them.

Every derivative is right. For a float tensor in an attribute of an object, a higher derivative may
raise an error.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from cgshim import CustomGradientError, op_cast, op_custom_gradient, op_stop_gradient, op_vjp, ops
from cgshim._protocol import Tensor
from cgshim.testing.conformance._common import Holder, Pair, Record
from cgshim.testing.conformance._framework import Framework
from cgshim.testing.conformance._registry import ORDERS, case, orders

AT = 0.5
EXP = float(np.exp(AT))
FACTORS = {
    "an output": 5.0,
    "an opaque output": 5.0,
    "an intermediate": 1.0,
    "made of an output": 1.0,
}
"""the factor of each further derivative of exp, with 5 for 1 in the rule: an output has the rule's
derivative, and any other residual f's own, even if it depends on an output
"""


def check(
    framework: Framework, op: Callable[[Tensor], Tensor], order: int, kind: str = "an output"
) -> None:
    """The first derivative is 5 exp(x)."""
    expected = np.array(5 * FACTORS[kind] ** (order - 1) * EXP)
    framework.check_derivative(op, order, expected, at=AT)


# --- Residuals in objects that f makes ------------------------------------------------------------

Rule = Callable[[Tensor], Tensor]


class Slope(Holder):
    """An object with a rule."""

    def grad(self, u: Tensor) -> Tensor:
        return u * 5.0 * self.held


class ListOfTheirOwn(list[Any]):
    """A user's own container."""


def _packed_in(
    pack: Callable[[Tensor], Any], read: Callable[[Any], Tensor]
) -> Callable[[Tensor], Rule]:
    """A rule that keeps its residual in a container and reads it from there."""

    def hold(y: Tensor) -> Rule:
        packed = pack(y)
        return lambda u: u * 5.0 * read(packed)

    return hold


def _in_a_list(y: Tensor) -> Rule:
    """The rule reads it without a helper function: a backend may know all tensors of such a rule."""
    holder = [y]
    return lambda u: u * 5.0 * holder[0]


def _in_an_attribute_of_a_function(y: Tensor) -> Rule:
    def grad(u: Tensor) -> Tensor:
        held: Tensor = vars(grad)["held"]
        return u * 5.0 * held

    vars(grad)["held"] = y
    return grad


def _in_a_helper_of_two_functions(y: Tensor) -> Rule:
    def output() -> Tensor:
        return y

    def twofold(u: Tensor) -> Tensor:
        return 2.0 * u * output()

    def threefold(u: Tensor) -> Tensor:
        return 3.0 * u * output()

    return lambda u: twofold(u) + threefold(u)


HOLDERS: dict[str, Callable[[Tensor], Rule]] = {
    "a variable": lambda y: lambda u: u * 5.0 * y,
    "a list": _in_a_list,
    "a dict": _packed_in(lambda y: {"y": {"again": y}}, lambda packed: packed["y"]["again"]),
    "a tuple": _packed_in(lambda y: (0.5, (y,)), lambda packed: 2.0 * packed[0] * packed[1][0]),
    "a namedtuple": _packed_in(
        lambda y: Pair(y, 0.5), lambda packed: 2.0 * packed.first * packed.second
    ),
    "a namespace": _packed_in(lambda y: types.SimpleNamespace(y=y), lambda packed: packed.y),
    "two places": _packed_in(
        lambda y: [y, {"again": y}], lambda packed: 0.4 * packed[0] + 0.6 * packed[1]["again"]
    ),
    "a nested function": _packed_in(lambda y: lambda: y, lambda function: function()),
    "a partial": lambda y: functools.partial(lambda y, u: u * 5.0 * y, y),
    "a partial by name": lambda y: functools.partial(lambda u, *, y: u * 5.0 * y, y=y),
    "a default value": lambda y: lambda u, y=y: u * 5.0 * y,  # type: ignore[misc]
    "a default value by name": lambda y: lambda u, *, y=y: u * 5.0 * y,  # type: ignore[misc]
    "a helper of two functions": _in_a_helper_of_two_functions,
    "a dataclass": _packed_in(Record, lambda record: record.held),
    "an attribute of a function": _in_an_attribute_of_a_function,
    "an ordered dict": _packed_in(
        lambda y: collections.OrderedDict(y=y), lambda packed: packed["y"]
    ),
    "a default dict": _packed_in(
        lambda y: collections.defaultdict(int, {"y": y}), lambda packed: packed["y"]
    ),
}


OBJECTS: dict[str, Callable[[Tensor], Rule]] = {
    "an object": _packed_in(Holder, lambda holder: holder.held),
    "a method of an object": lambda y: Slope(y).grad,
    "a container of their own": _packed_in(lambda y: ListOfTheirOwn([y]), lambda packed: packed[0]),
}
"""places for which a higher derivative may raise an error"""


@case(holder=HOLDERS, kind={name: name for name in FACTORS}, order=ORDERS)
def residual(framework: Framework, holder: Callable[[Tensor], Rule], kind: str, order: int) -> None:
    check(framework, _exp(holder, kind), order, kind)


@case(holder=OBJECTS, kind={name: name for name in FACTORS}, order=ORDERS)
def residual_in_an_object(
    framework: Framework, holder: Callable[[Tensor], Rule], kind: str, order: int
) -> None:
    with contextlib.suppress(*([CustomGradientError] if order > 1 else [])):
        check(framework, _exp(holder, kind), order, kind)


def _exp(holder: Callable[[Tensor], Rule], kind: str) -> Callable[[Tensor], Tensor]:
    """An op whose residual is its output exp(x), another tensor, or a combination that equals the
    output.
    """

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        y = ops.exp(x)
        if kind == "an opaque output":
            y = op_stop_gradient(y)
        if kind in ("an output", "an opaque output"):
            return y, holder(y)
        if kind == "an intermediate":
            return y + y - y, holder(y)
        return y, holder(3.0 * y - 2.0 * y)

    return op


@case(order=orders(5 * AT, 5.0, 0.0))
def residual_that_is_a_mask(framework: Framework, order: tuple[int, float]) -> None:
    """f makes numbers with derivative 0: 5 where x is greater than 0, instead of 2."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        mask = op_cast(x > 0.0, x.dtype)
        return x * x * mask, lambda u: u * 5.0 * mask * x

    framework.check_derivative(op, *order, at=AT)


@case(order=orders(5 * AT**2, 10 * AT, 10.0))
def residual_in_a_derivative_of_its_own(framework: Framework, order: tuple[int, float]) -> None:
    """The rule uses f's own derivative of x^3, with 5 for 3, and every order follows."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        y, pullback = op_vjp(lambda x: x * x * x, x)
        return y, lambda u: pullback(u)[0] * (5.0 / 3.0)

    with contextlib.suppress(*([CustomGradientError] if order[0] > 1 else [])):
        framework.check_derivative(op, *order, at=AT)


class Scaled:
    """An object with a constant that its rule reads."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale

    @op_custom_gradient
    def square(self, x: Tensor) -> Any:
        return x * x, lambda u: u * self.scale * x


@case()
def constant_of_an_object(framework: Framework) -> None:
    """A tensor that is older than the run of f is a constant."""
    op = Scaled(framework.tensor(5.0)).square
    framework.check_derivative(op, 2, 5.0, at=AT)
