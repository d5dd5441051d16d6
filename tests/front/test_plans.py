"""Plans are made once for all calls with tensors of the same types, and again when anything of them
changes.
"""

from __future__ import annotations

import gc
import importlib
import weakref
from typing import Any

import numpy as np
import pytest

import cgshim
from cgshim import op_custom_gradient, op_vjp
from cgshim.testing.conformance import Framework

X, UPSTREAM = [2.0, 3.0], [5.0, 7.0]


@pytest.fixture
def framework(backend: str) -> Framework:
    return Framework(backend)


def gradient(framework: Framework, op: Any, *args: Any, upstream: Any = UPSTREAM) -> np.ndarray:
    """The gradient of the first argument."""
    _, pullback = op_vjp(op, *args)
    return framework.numpy(pullback(framework.tensor(upstream))[0])


def test_a_call_finds_the_plan_of_another(framework: Framework) -> None:
    @op_custom_gradient
    def scaled(x, y):
        return x * y, lambda upstream: (11 * upstream * y, 13 * upstream * x)

    for factor in (1.0, 4.0):
        x, y = framework.tensor(X), framework.tensor([factor, 10.0])
        np.testing.assert_allclose(
            gradient(framework, scaled, x, y), [11 * 5 * factor, 11 * 7 * 10]
        )


def test_the_arguments_of_a_second_call_are_not_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    double = op_custom_gradient(lambda x: (2 * x, lambda upstream: 3 * upstream))
    double(np.array(X))
    monkeypatch.setattr("cgshim._op.backend_for", None)
    np.testing.assert_array_equal(double(np.array([5.0])), [10.0])


def test_another_form_of_rule_from_the_same_op(framework: Framework) -> None:
    form = ["structured"]

    @op_custom_gradient
    def doubled(x):
        def structured(upstream):
            return 3 * upstream

        def arguments(x, upstream):
            return 5 * upstream * x

        def of_variables(upstream, variables=None):
            return 7 * upstream

        return 2 * x, locals()[form[0]]

    x = framework.tensor(X)
    for form[0], expected in [
        ("structured", [15, 21]), ("arguments", [50, 105]), ("of_variables", [35, 49]), ("structured", [15, 21])
    ]:  # fmt: skip
        np.testing.assert_allclose(gradient(framework, doubled, x), expected)


def test_another_default_of_a_rule_from_the_same_line(framework: Framework) -> None:
    @op_custom_gradient
    def doubled(x, *, extra):
        return 2 * x, (lambda upstream, factor=3: factor * upstream) if extra else (
            lambda upstream: 5 * upstream
        )

    x = framework.tensor(X)
    for extra, expected in [(True, [15, 21]), (False, [25, 35]), (True, [15, 21])]:
        np.testing.assert_allclose(
            gradient(framework, lambda x, e=extra: doubled(x, extra=e), x), expected
        )


def test_a_number_where_a_tensor_was(framework: Framework) -> None:
    @op_custom_gradient
    def scaled(x, factor):
        return factor * x, lambda upstream: (17 * factor * upstream, None)

    x = framework.tensor(X)
    for factor in (framework.tensor(2.0), 2.0, 3.0, framework.tensor(3.0), 2):
        value = float(np.asarray(framework.numpy(factor)))
        np.testing.assert_allclose(
            gradient(framework, scaled, x, factor), np.array([85, 119]) * value
        )


def test_another_number_of_arguments(framework: Framework) -> None:
    @op_custom_gradient
    def added(*xs):
        return sum(xs), lambda upstream: [(at + 2) * upstream for at in range(len(xs))]

    x = framework.tensor(X)
    for count in (1, 3, 2, 1):
        np.testing.assert_allclose(gradient(framework, lambda x, n=count: added(*[x] * n), x),
                                   np.array(UPSTREAM) * sum(range(2, count + 2)))  # fmt: skip


@pytest.mark.parametrize("container", [list, tuple])
def test_another_list_of_tensors(framework: Framework, container: Any) -> None:
    """The rule reads what it was given; f may write to its list, which is its own."""

    @op_custom_gradient
    def weighed(tensors, factor):
        own = list(tensors)
        if container is list:
            tensors.append(None)
        value = sum(x * (at + 1) for at, x in enumerate(own)) * factor

        def grad(upstream):
            return container([(at + 3) * upstream * x for at, x in enumerate(own)]), 0 * factor

        return value, grad

    factor = framework.tensor(10.0)
    for count in (1, 3, 2, 1, 0):
        xs = container([framework.tensor([2.0 + at, 3.0]) for at in range(count)])
        if not count:
            assert float(np.asarray(framework.numpy(weighed(xs, factor)))) == 0
            continue
        value, pullback = op_vjp(weighed, xs, factor)
        expected = sum((at + 1) * np.array([2.0 + at, 3.0]) for at in range(count)) * 10
        np.testing.assert_allclose(framework.numpy(value), expected)
        gradients, _ = pullback(framework.tensor(UPSTREAM))
        assert len(gradients) == len(xs) == count
        for at, gradient_of_one in enumerate(gradients):
            expected = (at + 3) * np.array(UPSTREAM) * np.array([2.0 + at, 3.0])
            np.testing.assert_allclose(framework.numpy(gradient_of_one), expected)


def test_a_list_that_holds_what_is_no_tensor(framework: Framework) -> None:
    @op_custom_gradient
    def logged(x, log):
        log.append(len(log))
        return 2 * x, lambda upstream: (3 * upstream, None)

    x, log = framework.tensor(X), list[int]()
    for calls in (1, 2, 3):
        np.testing.assert_allclose(
            gradient(framework, lambda x: logged(x, log), x), 3 * np.array(UPSTREAM)
        )
        assert log == [*range(calls)]


def test_a_changed_choice(framework: Framework, monkeypatch: pytest.MonkeyPatch) -> None:
    @op_custom_gradient
    def doubled(x):
        return 2 * x, lambda upstream: 3 * upstream

    other = "numpy" if framework.name != "numpy" else "nonesuch"
    x = framework.tensor(X)
    doubled(x)
    monkeypatch.setattr("cgshim._dispatch._of_environment", other)
    with pytest.raises(cgshim.BackendError):
        doubled(x)
    monkeypatch.setattr("cgshim._dispatch._of_environment", framework.name)
    np.testing.assert_allclose(gradient(framework, doubled, x), [15, 21])
    monkeypatch.setattr("cgshim._dispatch._of_environment", None)
    np.testing.assert_allclose(gradient(framework, doubled, x), [15, 21])
    if framework.name != "numpy":
        with (
            cgshim.use_backend("numpy"),
            pytest.raises(cgshim.BackendError, match="use_backend chooses numpy"),
        ):
            doubled(x)


def test_a_tensor_type_that_holds_no_numbers() -> None:
    @op_custom_gradient
    def kept(x):
        return x, lambda upstream: upstream

    assert kept(np.array([2.0])) == 2.0
    names = np.array(["a", "b"])  # of the same type, and no tensor
    assert kept(names) is names


class Labelled(np.ndarray):
    """A subclass that a module has under its name, so that a plan for it is kept."""


def _of_torch(x: Any) -> list[Any]:
    import torch

    class Subclass(torch.Tensor):
        """One that no module has under its name."""

    return [torch.nn.Parameter(x), x.as_subclass(Subclass)]


OTHER_CLASSES = {
    "numpy": lambda x: [x.view(Labelled), np.float32(4.0) * x[:1][0]],
    "jax": lambda x: [np.asarray(x)],
    "torch": _of_torch,
    "tensorflow": lambda x: [importlib.import_module("tensorflow").Variable(x), np.asarray(x)],
}


def test_another_class_of_tensor(framework: Framework) -> None:
    """Between them come calls with the usual class, which has a plan."""

    @op_custom_gradient
    def cubed(x):
        return x * x * x, lambda upstream: 7 * upstream * x

    x = framework.tensor(X)
    for other in OTHER_CLASSES[framework.name](x):
        np.testing.assert_allclose(framework.numpy(cubed(x)), [8, 27])
        given = np.asarray(framework.numpy(framework.backend.convert_to_tensor(other)))
        np.testing.assert_allclose(framework.numpy(cubed(other)), given**3)
        np.testing.assert_allclose(gradient(framework, cubed, x), [70, 147])


def test_the_plans_of_an_op_are_few() -> None:
    @op_custom_gradient
    def kept(x):
        return 2 * x, lambda upstream: 2 * upstream

    for at in range(200):
        made = type(f"Array{at}", (np.ndarray,), {})
        kept(np.ones(2).view(made))
    seen = weakref.ref(made)
    del made
    gc.collect()
    assert seen() is None
    for dtype in (np.float16, np.float32, np.float64, np.int8, np.int16, np.int32):
        kept(dtype(3))
    assert len(kept._plans) <= 64


def test_a_method_has_the_plans_of_its_instance(framework: Framework) -> None:
    class Scaled:
        def __init__(self, factor):
            self.factor = factor

        @op_custom_gradient
        def __call__(self, x):
            return self.factor * x, lambda upstream: 3 * self.factor * upstream

    x = framework.tensor(X)
    first, second = Scaled(2.0), Scaled(10.0)
    for op, factor in [(first, 2.0), (second, 10.0), (first, 2.0)]:
        np.testing.assert_allclose(gradient(framework, op, x), 3 * factor * np.array(UPSTREAM))


def test_the_plan_of_a_method_keeps_no_instance_alive(framework: Framework) -> None:
    class Scaled:
        @op_custom_gradient
        def scaled(self, x, /, *more):
            return 2 * x, lambda upstream: [3 * upstream] + [None] * len(more)

    x, instance = framework.tensor(X), Scaled()
    for more in ((), (x, x), ()):
        np.testing.assert_allclose(gradient(framework, instance.scaled, x, *more), [15, 21])
    alive = weakref.ref(instance)
    del instance
    gc.collect()
    assert alive() is None
    np.testing.assert_allclose(gradient(framework, Scaled().scaled, x), [15, 21])


class _ByInstance:
    """A descriptor that gives each instance another function."""

    def __call__(self, *args):
        raise AssertionError

    def __get__(self, instance, owner=None):
        return instance.function


def test_a_descriptor_that_gives_each_instance_another_function(framework: Framework) -> None:
    class Holder:
        op = op_custom_gradient(_ByInstance(), name="op")

        def __init__(self, function):
            self.function = function

    x = framework.tensor(X)
    plain = Holder(lambda x: (2 * x, lambda upstream: 3 * upstream))
    optional = Holder(lambda x, *, factor=5: (2 * x, lambda upstream: factor * upstream))
    for holder, expected in [(plain, [15, 21]), (optional, [25, 35]), (plain, [15, 21])]:
        np.testing.assert_allclose(gradient(framework, holder.op, x), expected)
    with pytest.raises(TypeError, match="too many positional arguments"):
        optional.op(x, x, factor=2)


@pytest.mark.parametrize("option", ["name", "forward_mode", "once_differentiable"])
def test_what_an_op_is_made_with_stays(option: str) -> None:
    op = op_custom_gradient(lambda x: (x, lambda upstream: upstream))
    with pytest.raises(AttributeError):
        setattr(op, option, True)


STATIC = [1, 1.0, True, 2.0, 0.0, -0.0, "double", None, (2, 3), (2.0, 3)]


def test_static_arguments_are_told_apart(framework: Framework) -> None:
    """Equal ones too, where f may tell them apart; each call gets the gradient of its own."""

    @op_custom_gradient
    def told(x, static, y, factor=3.0, *, scale=1):
        by = 1.0 + STATIC.index(static) + 10 * len(repr((static, factor, scale)))

        def grad(upstream):
            return 3 * by * upstream, None, 5 * by * upstream, None

        return by * (x + y), grad

    x, y = framework.tensor(X), framework.tensor([7.0, 11.0])
    for factor, scale in [(3.0, 1), (3, 1), (3.0, True)] * 2:
        for static in STATIC:
            by = 1.0 + STATIC.index(static) + 10 * len(repr((static, factor, scale)))
            calls = [
                lambda x, y: told(x, static, y, factor, scale=scale),  # noqa: B023
                lambda x, y: told(y=y, x=x, scale=scale, factor=factor, static=static),  # noqa: B023
            ]
            if (repr(factor), repr(scale)) == ("3.0", "1"):
                calls.append(lambda x, y: told(x, static, y))  # noqa: B023
            for call in calls:
                value, pullback = op_vjp(call, x, y)
                of_x, of_y = pullback(framework.tensor(UPSTREAM))
                np.testing.assert_allclose(framework.numpy(value), by * np.array([9.0, 14.0]))
                np.testing.assert_allclose(framework.numpy(of_x), 3 * by * np.array(UPSTREAM))
                np.testing.assert_allclose(framework.numpy(of_y), 5 * by * np.array(UPSTREAM))


def test_static_arguments_that_cannot_be_written_out(framework: Framework) -> None:
    """Python writes out no number of more than 4300 digits, and NaN equals nothing."""

    @op_custom_gradient
    def scaled(x, number, *, text="a"):
        by = 1.0 + number % 7 if isinstance(number, int) else 1.0
        return by * x, lambda upstream: (3 * by * upstream, None)

    x, nan = framework.tensor(X), float("nan")
    for number, text in [(10**5000, "a"), (10**5000 + 1, "\ud800"), (nan, "a")] * 2:
        by = 1.0 + number % 7 if isinstance(number, int) else 1.0
        _, pullback = op_vjp(lambda x: scaled(x, number, text=text), x)  # noqa: B023
        of_x = framework.numpy(pullback(framework.tensor(UPSTREAM))[0])
        np.testing.assert_allclose(of_x, 3 * by * np.array(UPSTREAM), rtol=1e-6)


def test_static_arguments_that_are_always_others(framework: Framework) -> None:
    @op_custom_gradient
    def scaled(x, factor):
        return factor * x, lambda upstream: (3 * factor * upstream, None)

    x = framework.tensor(X)
    for at in range(100):
        _, pullback = op_vjp(lambda x: scaled(x, 1.0 + at), x)  # noqa: B023
        expected = 3 * (1.0 + at) * np.array(UPSTREAM)
        np.testing.assert_allclose(
            framework.numpy(pullback(framework.tensor(UPSTREAM))[0]), expected, rtol=1e-5
        )


def test_an_op_with_static_arguments_is_freed_at_once(framework: Framework) -> None:
    scaled = op_custom_gradient(
        lambda x, factor=2.0: (factor * x, lambda upstream: (upstream, None))
    )
    x = framework.tensor(X)
    scaled(x, 3.0), scaled(x)
    alive = weakref.ref(scaled)
    gc.collect()
    gc.disable()
    try:
        del scaled
        assert alive() is None
    finally:
        gc.enable()


def test_positional_parameters_have_no_name(framework: Framework) -> None:
    @op_custom_gradient
    def scaled(x, factor=2.0, /, *, shift=0.0):
        return factor * x + shift, lambda upstream: (3 * factor * upstream, None)

    x = framework.tensor(X)
    for _ in range(2):
        np.testing.assert_allclose(framework.numpy(scaled(x, shift=1.0)), [5.0, 7.0])
        with pytest.raises(cgshim.CustomGradientTypeError, match="factor"):
            scaled(x, factor=3.0)
        with pytest.raises(cgshim.CustomGradientTypeError, match="too many positional"):
            scaled(x, 3.0, 4.0)
