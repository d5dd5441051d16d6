"""Residuals wherever f can put them: in a variable, an object, a class, a module, in what was there before.

The first order is right. Higher orders are right or refused: never the number of a rule that keeps a constant.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from cgshim import CustomGradientError, op_custom_gradient, op_stop_gradient, op_vjp, ops
from cgshim._protocol import Tensor
from cgshim.testing.conformance._framework import Framework
from cgshim.testing.conformance._orders import nth_derivative
from cgshim.testing.conformance._registry import case

AT = 0.5
EXP = float(np.exp(AT))
FACTORS = {"an output": 5.0, "an opaque output": 5.0, "an intermediate": 1.0, "made of an output": 1.0}
"""what each further derivative multiplies by, of exp with 5 for 1 in its rule: an output's derivative is the rule's,
and that of all else is that of f's operations, even where these begin with an output"""
ORDERS = {"1": 1, "2": 2, "3": 3}


def check(framework: Framework, op: Callable[[Tensor], Tensor], order: int, kept: str = "an output") -> None:
    """The first derivative is 5 exp(x); the others are right, or refused, or an iterator of the rule has ended."""
    expected = np.array(5 * FACTORS[kept] ** (order - 1) * EXP)
    with contextlib.suppress(*([CustomGradientError, StopIteration] if order > 1 else [])):
        framework.check_equal(nth_derivative(op, order)(framework.tensor(AT)), expected)


# --- Kept in what f has made ------------------------------------------------------------------------------------------

Rule = Callable[[Tensor], Tensor]


class Holder:
    """An object with an attribute."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def grad(self, u: Tensor) -> Tensor:
        return u * 5.0 * self.held


class ListOfTheirOwn(list[Any]):
    """A container of the user's own."""


@dataclasses.dataclass
class Record:
    """A dataclass that no registry knows."""

    held: Any


class Kept(NamedTuple):
    """A container with fields."""

    output: Any
    factor: float


def _in_a_variable(y: Tensor) -> Rule:
    return lambda u: u * 5.0 * y


def _in_a_list(y: Tensor) -> Rule:
    kept = [y]
    return lambda u: u * 5.0 * kept[0]


def _in_a_dict(y: Tensor) -> Rule:
    kept = {"y": {"again": y}}
    return lambda u: u * 5.0 * kept["y"]["again"]


def _in_a_nested_function(y: Tensor) -> Rule:
    def slope() -> Tensor:
        return 5.0 * y

    return lambda u: u * slope()


def _in_a_partial(y: Tensor) -> Rule:
    return functools.partial(lambda y, u: u * 5.0 * y, y)


def _in_a_dataclass(y: Tensor) -> Rule:
    record = Record(y)
    return lambda u: u * 5.0 * record.held


def _in_an_attribute_of_a_function(y: Tensor) -> Rule:
    def grad(u: Tensor) -> Tensor:
        held: Tensor = vars(grad)["held"]
        return u * 5.0 * held

    vars(grad)["held"] = y
    return grad


def _in_a_module(y: Tensor) -> Rule:
    module = types.ModuleType("kept")
    vars(module)["held"] = y
    return lambda u: u * 5.0 * vars(module)["held"]


def _in_the_globals_of_exec(y: Tensor) -> Rule:
    scope: dict[str, Any] = {"y": y}
    exec("def grad(u): return u * 5.0 * y", scope)
    grad: Rule = scope["grad"]
    return grad


def _in_a_context_variable(y: Tensor) -> Rule:
    variable: contextvars.ContextVar[Tensor] = contextvars.ContextVar("kept")
    variable.set(y)
    return lambda u: u * 5.0 * variable.get()


def _on_a_stack(y: Tensor) -> Rule:
    """It is popped at every run of the rule, and pushed again, because some frameworks run a rule twice."""
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


def _in_an_object(y: Tensor) -> Rule:
    holder = Holder(y)
    return lambda u: u * 5.0 * holder.held


def _in_a_local_class(y: Tensor) -> Rule:
    class Slope:
        def __call__(self, u: Tensor) -> Tensor:
            return u * 5.0 * y

    return Slope()


def _in_an_attribute_of_a_class(y: Tensor) -> Rule:
    class Kept:
        held = y

    return lambda u: u * 5.0 * Kept.held


def _in_a_static_method(y: Tensor) -> Rule:
    class Slope:
        @staticmethod
        def grad(u: Tensor) -> Tensor:
            return u * 5.0 * y

    return lambda u: Slope.grad(u)


def _in_an_iterator(y: Tensor) -> Rule:
    kept: Iterator[Tensor] = iter([y])
    return lambda u: u * 5.0 * next(kept)


def _in_a_generator(y: Tensor) -> Rule:
    kept = (each for each in [y])
    return lambda u: u * 5.0 * next(kept)


def _in_a_cached_function(y: Tensor) -> Rule:
    @functools.lru_cache
    def slope() -> Tensor:
        return 5.0 * y

    return lambda u: u * slope()


def _in_a_method_caller(y: Tensor) -> Rule:
    times = operator.methodcaller("__mul__", y)
    return lambda u: times(5.0 * u)


def _in_an_ordered_dict(y: Tensor) -> Rule:
    kept = collections.OrderedDict(y=y)
    return lambda u: u * 5.0 * kept["y"]


def _in_a_default_dict(y: Tensor) -> Rule:
    kept = collections.defaultdict(int, {"y": y})
    return lambda u: u * 5.0 * kept["y"]


def _in_a_deque(y: Tensor) -> Rule:
    kept = collections.deque([y])
    return lambda u: u * 5.0 * kept[0]


def _in_a_container_of_their_own(y: Tensor) -> Rule:
    kept = ListOfTheirOwn([y])
    return lambda u: u * 5.0 * kept[0]


def _in_a_read_only_dict(y: Tensor) -> Rule:
    kept = types.MappingProxyType({"y": y})
    return lambda u: u * 5.0 * kept["y"]


def _in_an_array_of_objects(y: Tensor) -> Rule:
    kept = np.empty(1, object)
    kept[0] = Holder(y)
    return lambda u: u * 5.0 * kept[0].held


def _in_a_tuple(y: Tensor) -> Rule:
    kept = (5.0, (y,))
    return lambda u: u * kept[0] * kept[1][0]


def _in_a_namedtuple(y: Tensor) -> Rule:
    kept = Kept(y, 5.0)
    return lambda u: u * kept.factor * kept.output


def _in_a_partial_by_name(y: Tensor) -> Rule:
    return functools.partial(lambda u, *, y: u * 5.0 * y, y=y)


def _in_a_default_value(y: Tensor) -> Rule:
    def grad(u: Tensor, y: Tensor = y) -> Tensor:
        return u * 5.0 * y

    return grad


def _in_a_default_value_by_name(y: Tensor) -> Rule:
    def grad(u: Tensor, *, y: Tensor = y) -> Tensor:
        return u * 5.0 * y

    return grad


def _in_a_helper_of_two_functions(y: Tensor) -> Rule:
    def output() -> Tensor:
        return y

    def twofold(u: Tensor) -> Tensor:
        return 2.0 * u * output()

    def threefold(u: Tensor) -> Tensor:
        return 3.0 * u * output()

    return lambda u: twofold(u) + threefold(u)


def _held_twice(y: Tensor) -> Rule:
    kept = [y, {"again": y}]
    return lambda u: u * (2.0 * kept[0] + 3.0 * kept[1]["again"])


# A method of NumPy's scalars, which takes those of its own dtype: before NumPy 2, 5.0 times a float32 is a float64.
HOLDERS: dict[str, Callable[[Tensor], Rule]] = {
    "a variable": _in_a_variable,
    "a list": _in_a_list,
    "a dict": _in_a_dict,
    "a tuple": _in_a_tuple,
    "a namedtuple": _in_a_namedtuple,
    "two places": _held_twice,
    "a nested function": _in_a_nested_function,
    "a partial": _in_a_partial,
    "a partial by name": _in_a_partial_by_name,
    "a default value": _in_a_default_value,
    "a default value by name": _in_a_default_value_by_name,
    "a helper of two functions": _in_a_helper_of_two_functions,
    "a dataclass": _in_a_dataclass,
    "an attribute of a function": _in_an_attribute_of_a_function,
    "a module": _in_a_module,
    "the globals of exec": _in_the_globals_of_exec,
    "a context variable": _in_a_context_variable,
    "a stack": _on_a_stack,
    "an attribute that is freed": _in_an_attribute_that_is_freed,
    "an object": _in_an_object,
    "a method of an object": lambda y: Holder(y).grad,
    "a method of the tensor": lambda y: (lambda times: lambda u: times(u + u + u + u + u))(y.__mul__),
    "a local class": _in_a_local_class,
    "an attribute of a class": _in_an_attribute_of_a_class,
    "a static method": _in_a_static_method,
    "an iterator": _in_an_iterator,
    "a generator": _in_a_generator,
    "a cached function": _in_a_cached_function,
    "a method caller": _in_a_method_caller,
    "an ordered dict": _in_an_ordered_dict,
    "a default dict": _in_a_default_dict,
    "a deque": _in_a_deque,
    "a container of their own": _in_a_container_of_their_own,
    "a read-only dict": _in_a_read_only_dict,
    "an array of objects": _in_an_array_of_objects,
}


@case(holder=HOLDERS, kept={name: name for name in FACTORS}, order=ORDERS)
def residual(framework: Framework, holder: Callable[[Tensor], Rule], kept: str, order: int) -> None:
    """The residual is f's output exp(x), or is none, or is three times the output less twice the same."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        y = ops.exp(x)
        if kept == "an opaque output":
            y = op_stop_gradient(y)
        if kept in ("an output", "an opaque output"):
            return y, holder(y)
        if kept == "an intermediate":
            return y + y - y, holder(y)
        return y, holder(3.0 * y - 2.0 * y)

    check(framework, op, order, kept)


@case(order=ORDERS)
def residual_in_a_derivative_of_its_own(framework: Framework, order: int) -> None:
    """The rule asks for the derivative that f has taken of x^3: 5 for 3, and all orders follow."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        y, pullback = op_vjp(lambda x: x * x * x, x)
        return y, lambda u: pullback(u)[0] * (5.0 / 3.0)

    expected = [5 * AT**2, 10 * AT, 10.0]
    with contextlib.suppress(*([CustomGradientError] if order > 1 else [])):
        framework.check_equal(nth_derivative(op, order)(framework.tensor(AT)), np.array(expected[order - 1]))


@case(order=ORDERS)
def residual_in_a_static_argument(framework: Framework, order: int) -> None:
    @op_custom_gradient
    def op(x: Tensor, holder: Holder) -> Any:
        holder.held = ops.exp(x)
        return holder.held, lambda u: (u * 5.0 * holder.held, None)

    check(framework, lambda x: op(x, Holder(None)), order)


# --- Written to what was there before ---------------------------------------------------------------------------------


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
def residual_written_to(framework: Framework, make: Callable[[], Callable[[Tensor], Tensor]], order: int) -> None:
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
    """What was there before, and f does not write to, is a constant: the second order is there, and right."""
    op = Scaled(framework.tensor(5.0)).square
    framework.check_equal(nth_derivative(op, 2)(framework.tensor(AT)), np.array(5.0))
