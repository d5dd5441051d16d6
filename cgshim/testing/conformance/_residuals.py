"""Residuals wherever f can put them: in a variable, an object, a class, a module, in what was there
before.

The first order is right. Higher orders are right or refused: never the number of a rule that keeps
a constant.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from cgshim import CustomGradientError, op_custom_gradient, op_stop_gradient, op_vjp, ops
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
"""what each further derivative multiplies by, of exp with 5 for 1 in its rule: an output's derivative is the rule's,
and that of all else is that of f's operations, even where these begin with an output"""


def check(
    framework: Framework, op: Callable[[Tensor], Tensor], order: int, kind: str = "an output"
) -> None:
    """The first derivative is 5 exp(x); the others are right, or refused, or an iterator of the
    rule has ended.
    """
    expected = np.array(5 * FACTORS[kind] ** (order - 1) * EXP)
    with contextlib.suppress(*([CustomGradientError, StopIteration] if order > 1 else [])):
        framework.check_derivative(op, order, expected, at=AT)


# --- Residuals in what f has made -----------------------------------------------------------------

Rule = Callable[[Tensor], Tensor]


class Slope(Holder):
    """An object with a rule."""

    def grad(self, u: Tensor) -> Tensor:
        return u * 5.0 * self.held


class ListOfTheirOwn(list[Any]):
    """A container of the user's own."""


def _packed_in(
    pack: Callable[[Tensor], Any], read: Callable[[Any], Tensor]
) -> Callable[[Tensor], Rule]:
    """A rule that keeps its residual packed into something, and reads it from there."""

    def hold(y: Tensor) -> Rule:
        packed = pack(y)
        return lambda u: u * 5.0 * read(packed)

    return hold


def _in_a_list(y: Tensor) -> Rule:
    """By the rule itself, with no function between: a backend may know all that such a rule reads."""
    holder = [y]
    return lambda u: u * 5.0 * holder[0]


def _module(y: Tensor) -> types.ModuleType:
    module = types.ModuleType("kept")
    vars(module)["held"] = y
    return module


def _context_variable(y: Tensor) -> contextvars.ContextVar[Tensor]:
    variable: contextvars.ContextVar[Tensor] = contextvars.ContextVar("kept")
    variable.set(y)
    return variable


def _array_of_objects(y: Tensor) -> Any:
    array = np.empty(1, object)
    array[0] = Holder(y)
    return array


def _in_an_attribute_of_a_function(y: Tensor) -> Rule:
    def grad(u: Tensor) -> Tensor:
        held: Tensor = vars(grad)["held"]
        return u * 5.0 * held

    vars(grad)["held"] = y
    return grad


def _in_the_globals_of_exec(y: Tensor) -> Rule:
    scope: dict[str, Any] = {"y": y}
    exec("def grad(u): return u * 5.0 * y", scope)
    grad: Rule = scope["grad"]
    return grad


def _on_a_stack(y: Tensor) -> Rule:
    """It is popped at every run of the rule, and pushed again, because some frameworks run a rule
    twice.
    """
    stack = [y]

    def grad(u: Tensor) -> Tensor:
        held = stack.pop()
        stack.append(held)
        return u * 5.0 * held

    return grad


def _in_an_attribute_that_is_freed(y: Tensor) -> Rule:
    holder = Holder(y)

    def grad(u: Tensor) -> Tensor:
        held, holder.held = holder.held, None
        holder.held = held
        return u * 5.0 * held

    return grad


def _in_a_local_class(y: Tensor) -> Rule:
    class Slope:
        def __call__(self, u: Tensor) -> Tensor:
            return u * 5.0 * y

    return Slope()


def _in_a_static_method(y: Tensor) -> Rule:
    class Slope:
        @staticmethod
        def grad(u: Tensor) -> Tensor:
            return u * 5.0 * y

    return lambda u: Slope.grad(u)


def _in_a_cached_function(y: Tensor) -> Rule:
    @functools.lru_cache
    def slope() -> Tensor:
        return 5.0 * y

    return lambda u: u * slope()


def _in_a_method_caller(y: Tensor) -> Rule:
    times = operator.methodcaller("__mul__", y)
    return lambda u: times(5.0 * u)


def _in_a_helper_of_two_functions(y: Tensor) -> Rule:
    def output() -> Tensor:
        return y

    def twofold(u: Tensor) -> Tensor:
        return 2.0 * u * output()

    def threefold(u: Tensor) -> Tensor:
        return 3.0 * u * output()

    return lambda u: twofold(u) + threefold(u)


# A method of NumPy's scalars, which takes those of its own dtype: before NumPy 2, 5.0 times a
# float32 is a float64.
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
    "a module": _packed_in(_module, lambda module: module.held),
    "the globals of exec": _in_the_globals_of_exec,
    "a context variable": _packed_in(_context_variable, lambda variable: variable.get()),
    "a stack": _on_a_stack,
    "an attribute that is freed": _in_an_attribute_that_is_freed,
    "an object": _packed_in(Holder, lambda holder: holder.held),
    "a method of an object": lambda y: Slope(y).grad,
    "a method of the tensor": lambda y: (lambda times: lambda u: times(u + u + u + u + u))(
        y.__mul__
    ),
    "a local class": _in_a_local_class,
    "an attribute of a class": _packed_in(
        lambda y: type("Kept", (), {"held": y}), lambda packed: packed.held
    ),
    "a static method": _in_a_static_method,
    "an iterator": _packed_in(lambda y: iter([y]), next),
    "a generator": _packed_in(lambda y: (each for each in [y]), next),
    "a cached function": _in_a_cached_function,
    "a method caller": _in_a_method_caller,
    "an ordered dict": _packed_in(
        lambda y: collections.OrderedDict(y=y), lambda packed: packed["y"]
    ),
    "a default dict": _packed_in(
        lambda y: collections.defaultdict(int, {"y": y}), lambda packed: packed["y"]
    ),
    "a deque": _packed_in(lambda y: collections.deque([y]), lambda packed: packed[0]),
    "a container of their own": _packed_in(lambda y: ListOfTheirOwn([y]), lambda packed: packed[0]),
    "a read-only dict": _packed_in(
        lambda y: types.MappingProxyType({"y": y}), lambda packed: packed["y"]
    ),
    "an array of objects": _packed_in(_array_of_objects, lambda packed: packed[0].held),
}


@case(holder=HOLDERS, kind={name: name for name in FACTORS}, order=ORDERS)
def residual(framework: Framework, holder: Callable[[Tensor], Rule], kind: str, order: int) -> None:
    """The residual is f's output exp(x), or is none, or is three times the output less twice the
    same.
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

    check(framework, op, order, kind)


@case(order=orders(5 * AT**2, 10 * AT, 10.0))
def residual_in_a_derivative_of_its_own(framework: Framework, order: tuple[int, float]) -> None:
    """The rule asks for the derivative that f has taken of x^3: 5 for 3, and all orders follow."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        y, pullback = op_vjp(lambda x: x * x * x, x)
        return y, lambda u: pullback(u)[0] * (5.0 / 3.0)

    with contextlib.suppress(*([CustomGradientError] if order[0] > 1 else [])):
        framework.check_derivative(op, *order, at=AT)


@case(order=ORDERS)
def residual_in_a_static_argument(framework: Framework, order: int) -> None:
    @op_custom_gradient
    def op(x: Tensor, holder: Holder) -> Any:
        holder.held = ops.exp(x)
        return holder.held, lambda u: (u * 5.0 * holder.held, None)

    check(framework, lambda x: op(x, Holder(None)), order)


# --- Written to what was there before -------------------------------------------------------------


class Layer:
    """An object that remembers what it computed."""

    def remember(self, y: Tensor) -> None:
        self.remembered = y

    @op_custom_gradient
    def directly(self, x: Tensor) -> Any:
        self.y = y = ops.exp(x)
        return y, lambda u: u * 5.0 * self.y

    @op_custom_gradient
    def by_a_helper(self, x: Tensor) -> Any:
        self.remember(ops.exp(x))
        return self.remembered, self.grad

    def grad(self, u: Tensor) -> Tensor:
        return u * 5.0 * self.remembered


def _to_an_outer_dict() -> Callable[[Tensor], Tensor]:
    cache: dict[str, Tensor] = {}

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        cache["y"] = ops.exp(x)
        return cache["y"], lambda u: u * 5.0 * cache["y"]

    return op


def _to_an_outer_list() -> Callable[[Tensor], Tensor]:
    cache: list[Tensor] = []

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        cache.append(ops.exp(x))
        return cache[-1], lambda u: u * 5.0 * cache[-1]

    return op


def _to_an_outer_object() -> Callable[[Tensor], Tensor]:
    holder = Holder(None)

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        holder.held = ops.exp(x)
        return holder.held, lambda u: u * 5.0 * holder.held

    return op


def _to_an_outer_variable() -> Callable[[Tensor], Tensor]:
    remembered: Any = None

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        nonlocal remembered
        remembered = ops.exp(x)
        return remembered, lambda u: u * 5.0 * remembered

    return op


_cache: dict[str, Tensor] = {}
_remembered: Any = None


@op_custom_gradient
def _to_a_global_dict(x: Tensor) -> Any:
    _cache["y"] = ops.exp(x)
    return _cache["y"], lambda u: u * 5.0 * _cache["y"]


@op_custom_gradient
def _to_a_global(x: Tensor) -> Any:
    global _remembered
    _remembered = ops.exp(x)
    return _remembered, lambda u: u * 5.0 * _remembered


WRITERS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "an attribute": lambda: Layer().directly,
    "an attribute, by a helper": lambda: Layer().by_a_helper,
    "an outer dict": _to_an_outer_dict,
    "an outer list": _to_an_outer_list,
    "an outer object": _to_an_outer_object,
    "an outer variable": _to_an_outer_variable,
    "a global dict": lambda: _to_a_global_dict,
    "a global": lambda: _to_a_global,
}


@case(make=WRITERS, order=ORDERS)
def residual_written_to(
    framework: Framework, make: Callable[[], Callable[[Tensor], Tensor]], order: int
) -> None:
    check(framework, make(), order)


class Scaled:
    """An object with a constant, which its rule reads."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale

    @op_custom_gradient
    def square(self, x: Tensor) -> Any:
        return x * x, lambda u: u * self.scale * x


@case()
def constant_of_an_object(framework: Framework) -> None:
    """What was there before, and f does not write to, is a constant: the second order is there, and
    right.
    """
    op = Scaled(framework.tensor(5.0)).square
    framework.check_derivative(op, 2, 5.0, at=AT)
