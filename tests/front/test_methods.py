"""Ops as attributes of classes: inherited, overridden, abstract, in partials and among the
functions of a dispatch.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import inspect
import pickle
import pydoc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cgshim
from cgshim.testing.conformance import Framework


class Layer:
    """x times a scale; the rule's 7 is wrong on purpose."""

    scale = 3.0

    @cgshim.op_custom_gradient(forward_mode=True, name="scaled")
    def method(self, x: Any) -> Any:
        """x times the scale of the layer."""
        return x * self.scale, lambda upstream: 7.0 * upstream

    @cgshim.op_custom_gradient
    @classmethod
    def of_class(cls, x: Any) -> Any:
        """x times the scale of the class."""
        return x * cls.scale, lambda upstream: 7.0 * upstream

    @cgshim.op_custom_gradient
    @staticmethod
    def static(x: Any) -> Any:
        """x times 3."""
        return x * 3.0, lambda upstream: 7.0 * upstream

    @functools.cached_property
    def cached(self) -> Any:
        """An op of its own."""
        return cgshim.op_custom_gradient(
            lambda x: (x * self.scale, lambda upstream: 7.0 * upstream)
        )

    @property
    def computed(self) -> Any:
        """An op of each look."""
        return cgshim.op_custom_gradient(
            lambda x: (x * self.scale, lambda upstream: 7.0 * upstream)
        )

    def _of_two(self, y: float, x: Any) -> Any:
        return x * self.scale * y, lambda upstream: 7.0 * upstream

    @cgshim.op_custom_gradient
    def of_two(self, y: float, x: Any) -> Any:
        """x times a number."""
        return x * self.scale * y, lambda upstream: (None, 7.0 * upstream)

    partial_within = cgshim.op_custom_gradient(functools.partialmethod(_of_two, 1.0))
    partial_around = functools.partialmethod(of_two, 1.0)

    @functools.singledispatchmethod
    @cgshim.op_custom_gradient
    def dispatched(self, x: Any) -> Any:
        """What a dispatch falls back on."""
        return x * self.scale, lambda upstream: 7.0 * upstream


class Inherited(Layer):
    """The same."""


class Overridden(Layer):
    """The same by way of its base, with 7 for 5."""

    @cgshim.op_custom_gradient
    def method(self, x: Any) -> Any:
        return super().method(x), lambda upstream: 7.0 * upstream

    @cgshim.op_custom_gradient
    @classmethod
    def of_class(cls, x: Any) -> Any:
        return super().of_class(x), lambda upstream: 7.0 * upstream


class Abstract(abc.ABC):
    """What must be written."""

    @cgshim.op_custom_gradient
    @abc.abstractmethod
    def within(self, x: Any) -> Any: ...

    @abc.abstractmethod
    @cgshim.op_custom_gradient
    def around(self, x: Any) -> Any: ...


class Concrete(Abstract):
    """And is written here."""

    @cgshim.op_custom_gradient
    def within(self, x: Any) -> Any:
        return x * 3.0, lambda upstream: 7.0 * upstream

    @cgshim.op_custom_gradient
    def around(self, x: Any) -> Any:
        return x * 3.0, lambda upstream: 7.0 * upstream


@dataclasses.dataclass(slots=True)
class Slots:
    """A dataclass without a dict."""

    scale: float

    @cgshim.op_custom_gradient
    def method(self, x: Any) -> Any:
        return x * self.scale, lambda upstream: 7.0 * upstream


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A dataclass that is hashed by its values."""

    scale: float

    @cgshim.op_custom_gradient
    def method(self, x: Any) -> Any:
        return x * self.scale, lambda upstream: 7.0 * upstream


def _late() -> Callable[..., Any]:
    class Empty:
        scale = 3.0

    Empty.method = cgshim.op_custom_gradient(Layer._of_two)  # type: ignore[attr-defined]
    return functools.partial(Empty().method, 1.0)  # type: ignore[attr-defined]


@functools.singledispatch
def dispatching(x: Any) -> Any:
    """x times 3."""
    return x * 3.0, lambda upstream: 7.0 * upstream


METHODS: dict[str, Callable[[], Callable[..., Any]]] = {
    "inherited": lambda: Inherited().method,
    "inherited by a class": lambda: Inherited.of_class,
    "overridden": lambda: Overridden().method,
    "overridden in a class": lambda: Overridden.of_class,
    "of super": lambda: super(Overridden, Overridden()).method,
    "abstract within": lambda: Concrete().within,
    "abstract around": lambda: Concrete().around,
    "of a dataclass with slots": lambda: Slots(3.0).method,
    "of a frozen dataclass": lambda: Frozen(3.0).method,
    "a cached property": lambda: Layer().cached,
    "static": lambda: Layer().static,
    "a property": lambda: Layer().computed,
    "a partialmethod within": lambda: Layer().partial_within,
    "a partialmethod around": lambda: Layer().partial_around,
    "of a dispatch by type": lambda: Layer().dispatched,
    "around a dispatch by type": lambda: cgshim.op_custom_gradient(dispatching),
    "copied": lambda: copy.copy(Layer().method),
    "copied deeply": lambda: copy.deepcopy(Layer().method),
    "pickled": lambda: pickle.loads(pickle.dumps(Overridden().method)),
    "pickled of a class": lambda: pickle.loads(pickle.dumps(Overridden.of_class)),
    "pickled static": lambda: pickle.loads(pickle.dumps(Layer.static)),
    "a staticmethod alone": lambda: cgshim.op_custom_gradient(staticmethod(dispatching)),
}


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
def test_methods(backend: str, make: Callable[[], Callable[..., Any]]) -> None:
    framework, method = Framework(backend), make()
    framework.check(
        lambda x: method(x), framework.tensor([1.0, 2.0]), upstream=framework.tensor([2.0, -3.0]),
        output=np.array([3.0, 6.0]), gradients=(np.array([14.0, -21.0]),),
    )  # fmt: skip


def test_a_method_that_is_set_later(backend: str) -> None:
    framework, method = Framework(backend), _late()
    framework.check_equal(method(framework.tensor([1.0, 2.0])), np.array([3.0, 6.0]))


def test_what_is_abstract_is_written_before_it_is_used() -> None:
    with pytest.raises(TypeError, match=r"abstract method"):
        Abstract()  # type: ignore[abstract]
    assert Abstract.__abstractmethods__ == {"within", "around"}
    assert Concrete.__abstractmethods__ == frozenset()


def test_a_class_with_an_op_that_is_written_may_be_used() -> None:
    class Squares(metaclass=abc.ABCMeta):  # noqa: B024
        @cgshim.op_custom_gradient
        def f(self, x: Any) -> Any:
            return x * x, lambda upstream: 7 * upstream * x

    assert Squares().f(np.array(3.0)) == 9


def test_options_are_those_of_the_method() -> None:
    for method in (Layer.method, Layer().method, Inherited().method, copy.copy(Layer().method)):
        assert (method.forward_mode, method.once_differentiable, method.name) == (
            True,
            False,
            "scaled",
        )
    for method in (Overridden().method, Layer().of_two, Layer.of_class):
        assert not method.forward_mode
    assert Layer().of_two.name == "of_two"


def test_what_python_says_of_methods() -> None:
    layer = Layer()
    assert (layer.method.__name__, layer.method.__qualname__, layer.method.__doc__) == (
        "method", "Layer.method", "x times the scale of the layer.",
    )  # fmt: skip
    assert list(inspect.signature(Layer.method).parameters) == ["self", "x"]
    assert list(inspect.signature(layer.of_two).parameters) == ["y", "x"]
    assert list(inspect.signature(Layer.of_class).parameters) == ["x"]
    assert (Layer.of_class.__name__, Layer.of_class.__doc__) == (
        "of_class",
        "x times the scale of the class.",
    )
    text = pydoc.plain(pydoc.render_doc(Layer))
    for line in ("method(self, x", "x times the scale of the layer.", "of_two(self, y"):
        assert line in text


def test_an_op_among_the_functions_of_a_dispatch() -> None:
    """By the types of tensors, and by those that stand for them while a framework differentiates."""
    numbers = functools.singledispatch(lambda x: "something else")
    numbers.register(np.ndarray, cgshim.op_custom_gradient(dispatching))
    np.testing.assert_array_equal(numbers(np.array([1.0, 2.0])), [3.0, 6.0])
    assert numbers("text") == "something else"
