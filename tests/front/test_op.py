"""The op as a Python object: its name and signature, methods, pickling, copying."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from typing import Any

import numpy as np
import pytest

import cgshim
from cgshim.testing.conformance import Framework


@cgshim.op_custom_gradient
def product(x: Any, y: float = 3.0, *, shift: float = 0.0) -> Any:
    """x times y."""
    return x * y + shift, lambda upstream: (7.0 * upstream * y, None)


@cgshim.op_custom_gradient(forward_mode=True, name="twofold")
def named(x: Any) -> Any:
    """Twice x."""
    return 2.0 * x, lambda upstream: 5.0 * upstream


def _double(x: Any) -> Any:
    return 2.0 * x, lambda upstream: 5.0 * upstream


another_name = cgshim.op_custom_gradient(_double, name="another")


class Layer:
    """Something with a weight."""

    scale = 3.0

    @cgshim.op_custom_gradient
    def method(self, x: Any) -> Any:
        """x times the scale of the layer."""
        return x * self.scale, lambda upstream: 7.0 * upstream

    @cgshim.op_custom_gradient
    @classmethod
    def of_class(cls, x: Any) -> Any:
        return x * cls.scale, lambda upstream: 7.0 * upstream

    @classmethod
    @cgshim.op_custom_gradient
    def of_class_outside(cls, x: Any) -> Any:
        return x * cls.scale, lambda upstream: 7.0 * upstream

    @cgshim.op_custom_gradient
    @staticmethod
    def static(x: Any) -> Any:
        return x * 3.0, lambda upstream: 7.0 * upstream

    @staticmethod
    @cgshim.op_custom_gradient
    def static_outside(x: Any) -> Any:
        return x * 3.0, lambda upstream: 7.0 * upstream


def check_threefold(framework: Framework, op: Any) -> None:
    framework.check(
        op, framework.tensor([1.0, 2.0]), upstream=framework.tensor([2.0, -3.0]),
        output=np.array([3.0, 6.0]), gradients=(np.array([14.0, -21.0]),),
    )  # fmt: skip


# --- What Python sees ---------------------------------------------------------------------------------------------


def test_name_and_documentation() -> None:
    assert (product.__name__, product.__qualname__, product.__doc__) == ("product", "product", "x times y.")
    assert (product.__module__, product.__wrapped__.__name__) == (__name__, "product")


def test_signature() -> None:
    assert inspect.signature(product) == inspect.signature(product.__wrapped__)
    assert list(inspect.signature(product).parameters) == ["x", "y", "shift"]
    assert list(inspect.signature(Layer().method).parameters) == ["x"]
    assert inspect.getfullargspec(product).kwonlyargs == ["shift"]


def test_repr() -> None:
    assert repr(product) == "<op product with a custom gradient>"
    assert repr(named) == "<op twofold with a custom gradient>"


def test_options_are_kept() -> None:
    assert (product.forward_mode, product.name) == (False, "product")
    assert (named.forward_mode, named.name, named.__name__) == (True, "twofold", "named")


def test_with_and_without_parentheses(backend: str) -> None:
    framework = Framework(backend)
    for decorate in (cgshim.op_custom_gradient, cgshim.op_custom_gradient(), cgshim.op_custom_gradient(name="op")):
        check_threefold(framework, decorate(lambda x: (x * 3.0, lambda upstream: 7.0 * upstream)))


# --- What f may be ------------------------------------------------------------------------------------------------


class Threefold:
    """An f that is an object."""

    def __call__(self, x: Any) -> Any:
        return x * 3.0, lambda upstream: 7.0 * upstream


def _times(factor: float, x: Any, *, extra: float = 1.0) -> Any:
    return x * factor * extra, lambda upstream: 7.0 * upstream


CALLABLES = {
    "method": lambda: Layer().method,
    "method of the class": lambda: functools.partial(Layer.method, Layer()),
    "classmethod": lambda: Layer.of_class,
    "classmethod of an instance": lambda: Layer().of_class,
    "classmethod outside": lambda: Layer.of_class_outside,
    "staticmethod": lambda: Layer.static,
    "staticmethod of an instance": lambda: Layer().static,
    "staticmethod outside": lambda: Layer.static_outside,
    "callable object": lambda: cgshim.op_custom_gradient(Threefold()),
    "bound method": lambda: cgshim.op_custom_gradient(Threefold().__call__),
    "partial": lambda: cgshim.op_custom_gradient(functools.partial(_times, 3.0)),
    "partial by name": lambda: cgshim.op_custom_gradient(functools.partial(_times, 1.5, extra=2.0)),
}


@pytest.mark.parametrize("make", CALLABLES.values(), ids=CALLABLES.keys())
def test_callables(backend: str, make: Any) -> None:
    check_threefold(Framework(backend), make())


def test_methods_tell_instances_apart(backend: str) -> None:
    framework, wide = Framework(backend), Layer()
    wide.scale = 5.0
    framework.check_equal(wide.method(framework.tensor(2.0)), np.array(10.0))
    framework.check_equal(Layer().method(framework.tensor(2.0)), np.array(6.0))


# --- Pickling and copying -----------------------------------------------------------------------------------------

OPS = {
    "by its own name": product,
    "with options": named,
    "by another name": another_name,
    "a bound method": Layer().method,
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_pickling(backend: str, op: Any) -> None:
    framework = Framework(backend)
    again = pickle.loads(pickle.dumps(op))
    assert (again.name, again.forward_mode, repr(again)) == (op.name, op.forward_mode, repr(op))
    x, upstream = framework.tensor([1.0, 2.0]), framework.tensor([2.0, -3.0])
    _, expected = cgshim.op_vjp(op, x)
    framework.check(again, x, upstream=upstream, gradients=framework.numpy(expected(upstream)))


def test_a_module_level_op_is_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(product)) is product


def test_a_local_op_is_refused_as_functions_are() -> None:
    op = cgshim.op_custom_gradient(lambda x: (x, lambda upstream: upstream))
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(op)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_copying(backend: str, op: Any, duplicate: Any) -> None:
    framework = Framework(backend)
    x, upstream = framework.tensor([1.0, 2.0]), framework.tensor([2.0, -3.0])
    _, expected = cgshim.op_vjp(op, x)
    framework.check(duplicate(op), x, upstream=upstream, gradients=framework.numpy(expected(upstream)))


def test_deepcopy_of_what_holds_an_op() -> None:
    local = cgshim.op_custom_gradient(lambda x: (x * 3.0, lambda upstream: 7.0 * upstream))
    again = copy.deepcopy({"ops": [local, product]})
    np.testing.assert_allclose(again["ops"][0](np.array([1.0, 2.0])), [3.0, 6.0])
    assert again["ops"][1] is product
