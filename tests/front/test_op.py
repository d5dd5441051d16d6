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
from cgshim import CustomGradientTypeError, op_custom_gradient
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


def _multiple(x: Any, factor: float) -> Any:
    return factor * x, lambda upstream: 5.0 * upstream


class Multiple:
    """A function that has no name."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Any) -> Any:
        return _multiple(x, self.factor)


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


# --- What Python sees -----------------------------------------------------------------------------


def test_name_and_documentation() -> None:
    assert (product.__name__, product.__qualname__, product.__doc__) == (
        "product",
        "product",
        "x times y.",
    )
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
    for decorate in (
        cgshim.op_custom_gradient,
        cgshim.op_custom_gradient(),
        cgshim.op_custom_gradient(name="op"),
    ):
        check_threefold(framework, decorate(lambda x: (x * 3.0, lambda upstream: 7.0 * upstream)))


# --- The op is not what it wraps, nor what wraps it -----------------------------------------------


def twofold(x: Any, *, ignored: float = 0.0) -> Any:
    """What decorators are told that they wrap: it is no pair, and its gradient is 2."""
    return 2.0 * x


def _threefold() -> Any:
    return cgshim.op_custom_gradient(
        lambda x: (x * 3.0, lambda upstream: 7.0 * upstream), name="threefold"
    )


def _wrapped_by_functools() -> Any:
    op = _threefold()
    assert functools.wraps(twofold)(op) is op
    assert (op.__name__, op.__doc__, op.__wrapped__) == ("twofold", twofold.__doc__, twofold)
    return op


def _wrapped_by_hand() -> Any:
    op = _threefold()
    op.__wrapped__ = twofold
    return op


def _with_another_signature() -> Any:
    op = _threefold()
    op.__signature__ = inspect.signature(twofold)
    assert list(inspect.signature(op).parameters) == ["x", "ignored"]
    return op


def _with_other_attributes() -> Any:
    op = _threefold()
    op._f = twofold if not hasattr(type(op), "_f") else op._f
    op.__dict__.update(f=twofold, _parameters=None, backward=twofold, forward_mode=True)
    return op


WRAPPED = {
    "functools.wraps": _wrapped_by_functools,
    "__wrapped__ assigned": _wrapped_by_hand,
    "__signature__ assigned": _with_another_signature,
    "names in its __dict__": _with_other_attributes,
    "wraps, copied": lambda: copy.copy(_wrapped_by_functools()),
    "wraps, copied deeply": lambda: copy.deepcopy(_wrapped_by_functools()),
    "wraps, in a partial": lambda: functools.partial(_wrapped_by_functools()),
}


@pytest.mark.parametrize("make", WRAPPED.values(), ids=WRAPPED.keys())
def test_an_op_goes_on_running_its_own_function(backend: str, make: Any) -> None:
    op = make()
    check_threefold(Framework(backend), op)
    assert getattr(op, "func", op).name == "threefold"
    assert not getattr(op, "func", op).forward_mode


def test_a_function_that_wraps_an_op_is_no_op(backend: str) -> None:
    framework, op = Framework(backend), _threefold()

    @functools.wraps(op)
    def halved(x: Any) -> Any:
        return 0.5 * op(x)

    framework.check(
        halved,
        framework.tensor(2.0),
        upstream=framework.tensor(4.0),
        output=np.array(3.0),
        gradients=(np.array(14.0),),
    )


class Slotted:
    """An object that compares by value, and can be hashed."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted) and self.scale == other.scale

    def __hash__(self) -> int:
        return hash(self.scale)

    @cgshim.op_custom_gradient
    def method(self, x: Any) -> Any:
        return x * self.scale, lambda upstream: 7.0 * upstream

    @cgshim.op_custom_gradient
    def another(self, x: Any) -> Any:
        return x * self.scale, lambda upstream: 7.0 * upstream


def test_methods_of_one_object_are_equal() -> None:
    """As Python's own methods are: a cache or a static argument takes them for one."""
    layer, other = Layer(), Layer()
    assert layer.method == layer.method
    assert layer.method is not layer.method
    assert hash(layer.method) == hash(layer.method)
    assert len({layer.method, layer.method, Layer.of_class, Layer.of_class, layer.of_class}) == 2
    assert layer.method != other.method
    assert layer.method != Layer.method
    assert Layer.method == Layer.method
    assert layer.method != layer.scale


def test_methods_of_equal_objects_are_what_pythons_methods_are() -> None:
    a, b = Slotted(2.0), Slotted(2.0)
    assert (a.method == b.method) == (a.__init__ == b.__init__)  # type: ignore[misc]
    assert a.method != a.another
    assert a.method == a.method
    assert hash(a.method) == hash(a.method)


def test_ops_are_equal_to_themselves_alone() -> None:
    a, b = (cgshim.op_custom_gradient(_double) for _ in range(2))
    assert a == a  # the comparison is what is tested
    assert a != b
    assert len({a, b, a}) == 2
    assert a != _double


# --- What f may be --------------------------------------------------------------------------------


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


# --- Pickling and copying -------------------------------------------------------------------------


@cgshim.op_custom_gradient(once_differentiable=True)
def once(x: Any) -> Any:
    """x x, with 7 for 2."""
    return x * x, lambda upstream: 7.0 * upstream * x


class Once:
    """An object whose op is differentiable once."""

    @cgshim.op_custom_gradient(once_differentiable=True, name="once_method")
    def method(self, x: Any) -> Any:
        return x * x, lambda upstream: 7.0 * upstream * x


def _square(x: Any) -> Any:
    return x * x, lambda upstream: 7.0 * upstream * x


once_by_another_name = cgshim.op_custom_gradient(
    _square, once_differentiable=True, name="once_by_another_name"
)

ONCE = {
    "itself": lambda: once,
    "pickled": lambda: pickle.loads(pickle.dumps(once)),
    "pickled by another name": lambda: pickle.loads(pickle.dumps(once_by_another_name)),
    "copied": lambda: copy.copy(once_by_another_name),
    "copied deeply": lambda: copy.deepcopy(once_by_another_name),
    "bound": lambda: Once().method,
    "bound, and pickled": lambda: pickle.loads(pickle.dumps(Once().method)),
    "bound, and copied": lambda: copy.copy(Once().method),
    "wrapped": lambda: functools.wraps(_double)(copy.copy(once_by_another_name)),
}


@pytest.mark.parametrize("make", ONCE.values(), ids=ONCE.keys())
def test_once_differentiable_survives(backend: str, make: Any) -> None:
    framework, op = Framework(backend), make()
    assert op.once_differentiable
    framework.check_equal(cgshim.op_grad(op)(framework.tensor(2.0)), np.array(14.0))
    with pytest.raises(cgshim.TransformationError, match=f"^{op.name}: "):
        cgshim.op_grad(cgshim.op_grad(op))(framework.tensor(2.0))


OPS = {
    "by its own name": product,
    "with options": named,
    "by another name": another_name,
    "a bound method": Layer().method,
    "a partial": cgshim.op_custom_gradient(functools.partial(_multiple, factor=2.0)),
    "an object": cgshim.op_custom_gradient(Multiple(2.0), forward_mode=True),
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
    framework.check(
        duplicate(op), x, upstream=upstream, gradients=framework.numpy(expected(upstream))
    )


def test_deepcopy_of_what_holds_an_op() -> None:
    local = cgshim.op_custom_gradient(lambda x: (x * 3.0, lambda upstream: 7.0 * upstream))
    again = copy.deepcopy({"ops": [local, product]})
    np.testing.assert_allclose(again["ops"][0](np.array([1.0, 2.0])), [3.0, 6.0])
    assert again["ops"][1] is product


# --- Functions written in C, which may not tell their parameters ----------------------------------


def test_functions_without_a_signature() -> None:
    """f is called with what comes, and a rule with one upstream gradient, structured as the output."""
    with pytest.raises(ValueError, match="signature"):
        inspect.signature(max)
    op = cgshim.op_custom_gradient(lambda x: ([2.0 * x, 3.0 * x], max))
    _, pullback = cgshim.op_vjp(op, np.array(1.0))
    assert pullback([np.array(5.0), np.array(7.0)]) == (7.0,)
    made = cgshim.op_custom_gradient(max, name="made")
    pair = np.array([1.0, 2.0]), lambda upstream: upstream
    with pytest.raises(
        cgshim.CustomGradientTypeError,
        match=r"^made: max must return a pair \(output, grad_fn\), got",
    ):
        made(np.array(1.0), np.array(2.0))
    assert made([pair], key=id) is pair[0]


def test_an_option_that_is_missing():
    @op_custom_gradient(name="op")
    def op(x, *, scale):
        return scale * x, lambda u: u * scale

    with pytest.raises(CustomGradientTypeError, match=r"^op: missing a required .*'scale'$"):
        op(np.array(3.0))
