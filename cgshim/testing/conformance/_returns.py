"""Everything that a grad_fn may return, and how cgshim reads it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import cgshim
from cgshim import CustomGradientValueError, op_custom_gradient
from cgshim._protocol import Tensor
from cgshim.testing.conformance._common import OF_X, OF_Y, U, X, Y, wrong_gradients
from cgshim.testing.conformance._framework import Framework, raised
from cgshim.testing.conformance._registry import case


class Point(NamedTuple):
    """A container with fields."""

    x: Any
    y: Any


class Swapped(NamedTuple):
    """A container with the same fields in another order."""

    y: Any
    x: Any


class Checked(Point):
    """A container that checks its fields."""

    def __new__(cls, x: Any, y: Any) -> Checked:
        assert x.shape is not None
        assert y.shape is not None
        return super().__new__(cls, x, y)


SEVERAL: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], str]] = {
    "a tuple": (lambda x, a, b: (x, {"a": a, "b": b}, None), "xab"),
    "a list": (lambda x, a, b: [x, {"a": a, "b": b}, None], "xab"),
    "keys in another order": (lambda x, a, b: (x, {"b": b, "a": a}, None), "xab"),
    "static argument left out": (lambda x, a, b: (x, {"a": a, "b": b}), "xab"),
    "a number for a static argument": (lambda x, a, b: (x, {"a": a, "b": b}, 0.0), "xab"),
    "a tensor for a static argument": (lambda x, a, b: (x, {"a": a, "b": b}, x), "xab"),
    "flat": (lambda x, a, b: (x, a, b), "xab"),
    "a flat list": (lambda x, a, b: [x, a, b], "xab"),
    "None for a tensor": (lambda x, a, b: (None, {"a": a, "b": b}, None), "ab"),
    "None for a tree": (lambda x, a, b: (x, None, None), "x"),
    "None for a leaf": (lambda x, a, b: (x, {"a": None, "b": b}), "xb"),
    "None for a flat leaf": (lambda x, a, b: (x, None, b), "xb"),
    "None for all": (lambda x, a, b: (None, None, None), ""),
}
"""the result of a rule for the arguments x, {"a": a, "b": b} and a static one, and its nonzero
gradients
"""


@case(form=SEVERAL)
def return_for_several_arguments(
    framework: Framework, form: tuple[Callable[..., Any], str]
) -> None:
    write, nonzero = form

    @op_custom_gradient
    def op(x: Tensor, p: Any, mode: str) -> Any:
        assert mode == "static"
        return x * p["a"] * p["b"], lambda u: write(
            7.0 * u * x, 11.0 * u[0] * p["a"], 13.0 * u * p["b"]
        )

    b = np.array([3.0, 4.0])
    expected = {"x": 7.0 * U * X, "a": np.array(11.0 * U[0] * Y), "b": 13.0 * U * b}
    of_x, of_a, of_b = (
        expected[name] if name in nonzero else np.zeros_like(expected[name]) for name in "xab"
    )
    framework.check_at(
        lambda x, p: op(x, p, "static"), X, {"b": b, "a": Y}, upstream=U,
        output=X * Y * b, gradients=(of_x, {"a": of_a, "b": of_b}),
    )  # fmt: skip


@case()
def return_with_a_gradient_missing_or_misplaced(framework: Framework) -> None:
    """Gradients are read by position: a missing one, and one in another place, are errors."""

    @op_custom_gradient
    def two(x: Tensor, low: float, y: Tensor, high: float = 9.0) -> Any:
        return x * y, lambda u: (7.0 * u, 5.0 * u)[: int(high)]

    @op_custom_gradient
    def misplaced(x: Tensor, low: float, high: float = 9.0) -> Any:
        return x * 1.0, lambda u: (None, 7.0 * u)

    @op_custom_gradient
    def swapped(x: Tensor, y: Tensor) -> Any:
        return x * y, lambda u: Swapped(y=11.0 * u, x=7.0 * u)

    x = framework.tensor(X)
    for fn in (
        lambda x: two(x, 1.0, framework.tensor(X), 1.0),
        lambda x: misplaced(x, 1.0),
        lambda x: swapped(x, framework.tensor(X)),
    ):
        error = raised(CustomGradientValueError, lambda fn=fn: cgshim.op_vjp(fn, x)[1](x))
        assert "must return one gradient for each argument" in str(error), str(error)


ONE: dict[str, Callable[[Tensor], Any]] = {
    "bare": lambda g: g,
    "a one-tuple": lambda g: (g,),
    "a one-list": lambda g: [g],
}


@case(write=ONE)
def return_for_one_argument(framework: Framework, write: Callable[[Tensor], Any]) -> None:
    op = op_custom_gradient(lambda x: (x * x, lambda u: write(7.0 * u * x)))
    framework.check_at(op, X, upstream=U, gradients=(7.0 * U * X,))


@case()
def return_for_a_container_that_checks_its_fields(framework: Framework) -> None:
    @op_custom_gradient
    def lone(point: Any) -> Any:
        return point.x * point.y, lambda u: [Checked(7.0 * u * point.x, 11.0 * u * point.y)]

    @op_custom_gradient
    def beside(point: Any, z: Tensor) -> Any:
        return point.x * z + point.y, lambda u: (None, 13.0 * u * point.x)

    framework.check_at(
        lambda x, y: lone(Checked(x, y)), X, X, upstream=U, gradients=(7.0 * U * X, 11.0 * U * X)
    )
    none = np.zeros_like(X)
    framework.check_at(
        lambda x, y, z: beside(Checked(x, y), z), X, X, X,
        upstream=U, gradients=(none, none, 13.0 * U * X),
    )  # fmt: skip


TREES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Tensor, Tensor], Any]]] = {
    "a dict, its structure": (lambda x, y: {"x": x, "y": y}, lambda x, y: {"y": y, "x": x}),
    "a dict, a one-tuple": (lambda x, y: {"x": x, "y": y}, lambda x, y: ({"x": x, "y": y},)),
    "a dict, flat": (lambda x, y: {"y": y, "x": x}, lambda x, y: (x, y)),
    "a list, its structure": (lambda x, y: [x, y], lambda x, y: [x, y]),
    "a list, as a tuple": (lambda x, y: [x, y], lambda x, y: (x, y)),
    "a list, in a one-tuple": (lambda x, y: [x, y], lambda x, y: ((x, y),)),
    "a tuple, its structure": (lambda x, y: (x, y), lambda x, y: (x, y)),
    "a tuple, as a list": (lambda x, y: (x, y), lambda x, y: [x, y]),
    "a namedtuple, its structure": (Point, Point),
    "a namedtuple, as a tuple": (Point, lambda x, y: (x, y)),
    "a namedtuple, in a one-list": (Point, lambda x, y: [Point(x, y)]),
    "nested, its structure": (
        lambda x, y: {"p": [x, None, Point("s", y)]},
        lambda x, y: {"p": [x, None, Point(None, y)]},
    ),
    "None for a static branch": (lambda x, y: [x, ("s", 3), y], lambda x, y: [x, None, y]),
    "nested, flat": (lambda x, y: {"p": [x, None, Point("s", y)]}, lambda x, y: [x, y]),
    "a one-list in a list": (lambda x, y: [[x], y], lambda x, y: [[x], y]),
    "a one-list in a list, flat": (lambda x, y: [[x], y], lambda x, y: [x, y]),
}
"""A tree around two tensors, and the rule's result for it."""


@case(form=TREES)
def return_for_a_tree(
    framework: Framework, form: tuple[Callable[..., Any], Callable[..., Any]]
) -> None:
    build, write = form

    @op_custom_gradient
    def op(tree: Any) -> Any:
        leaves, _ = framework.backend.tree_flatten(tree)
        x, y = filter(framework.backend.is_tensor, leaves)
        return x * y, lambda u: write(*wrong_gradients(x, y, u))

    leaves, structure = framework.backend.tree_flatten(build(OF_X, OF_Y))
    without_static = [leaf if leaf is OF_X or leaf is OF_Y else None for leaf in leaves]
    gradients = framework.backend.tree_unflatten(structure, without_static)
    framework.check_at(op, build(X, Y), upstream=U, gradients=(gradients,))


ELSEWHERE: dict[str, tuple[Callable[..., Any], Callable[[Tensor, Tensor], Any]]] = {
    "another key": (lambda x, y: {"x": x, "y": y}, lambda x, y: {"x": x, "z": y}),
    "a key more": (lambda x, y: {"x": x, "y": y}, lambda x, y: {"x": x, "y": y, "z": y}),
    "a key less": (lambda x, y: {"x": x, "y": y}, lambda x, y: {"x": x}),
    "a key of an OrderedDict": (
        lambda x, y: OrderedDict(y=y, x=x),
        lambda x, y: OrderedDict(y=y, z=x),
    ),
    "a key within": (lambda x, y: [{"x": x}, {"y": y}], lambda x, y: [{"x": x}, {"x": y}]),
    "a key two levels down": (
        lambda x, y: {"p": {"x": x, "y": y}},
        lambda x, y: {"p": {"y": y, "z": x}},
    ),
    "a dict for a namedtuple": (Point, lambda x, y: {"x": x, "y": y}),
    "a namedtuple of other fields": (Point, lambda x, y: Swapped(y, x)),
    "a namedtuple of other fields within": (
        lambda x, y: [Point(x, y)],
        lambda x, y: [Swapped(y, x)],
    ),
    "a namedtuple for a dict": (lambda x, y: {"x": x, "y": y}, lambda x, y: Swapped(y, x)),
    "a list that is too short": (lambda x, y: [x, y], lambda x, y: [x]),
    "a generator": (lambda x, y: [x, y], lambda x, y: (g for g in (x, y))),
}
"""A tree around two tensors of one shape, and a rule's result with as many leaves, or other ones.
"""


@case(form=ELSEWHERE)
def return_for_another_tree(
    framework: Framework, form: tuple[Callable[..., Any], Callable[..., Any]]
) -> None:
    """Equal counts are not equal structures: a gradient belongs to the tensor that it names."""
    build, write = form
    leaf = framework.tensor([1.0, 2.0])
    op = op_custom_gradient(
        lambda tree: (leaf * 2.0, lambda u: write(7.0 * u, 11.0 * u)), name="op"
    )
    _, pullback = cgshim.op_vjp(op, build(leaf, leaf + 1.0))
    sentence = "op: grad_fn must return one gradient for each argument (tree), got "
    raised(CustomGradientValueError, pullback, framework.tensor(U), starts=sentence)


@case()
def return_none_for_a_branch(framework: Framework) -> None:
    op = op_custom_gradient(
        lambda p: (p["a"][0] * p["a"][1] * p["b"], lambda u: {"a": None, "b": 7.0 * u})
    )
    gradients = {"a": [np.zeros(2), np.zeros(2)], "b": 7.0 * U}
    framework.check_at(op, {"a": [X, X], "b": X}, upstream=U, output=X**3, gradients=(gradients,))


@case()
def return_a_python_number(framework: Framework) -> None:
    """A constant gradient needs no tensor."""
    op = op_custom_gradient(lambda x: (x * x, lambda u: 7))
    framework.check_at(op, 2.0, upstream=3.0, gradients=(7.0,))


@case()
def return_a_python_complex(framework: Framework) -> None:
    """For a complex argument; for a real one it raises an error, as a complex tensor does."""
    op = op_custom_gradient(lambda x: (x * x, lambda u: 7.0 + 0.0j))
    z, upstream = (framework.tensor(number, "complex64") for number in (2.0, 3.0))
    framework.check(op, z, upstream=upstream, gradients=(7.0,))
    _, pullback = cgshim.op_vjp(op, framework.tensor(2.0))
    error = raised(CustomGradientValueError, pullback, framework.tensor(3.0))
    assert "must be real as it is (f32[])" in str(error)


@case()
def return_a_list_in_the_place_of_variables(framework: Framework) -> None:
    """If f reads no variables, a list in the second place is the second argument's gradient."""
    rule = lambda u, variables=None: (7.0 * u, [11.0 * u])
    op = op_custom_gradient(lambda x, rest: (x * rest[0], rule))
    framework.check_at(op, X, [np.array([3.0, 4.0])], upstream=U, gradients=(7.0 * U, [11.0 * U]))


@case()
def return_a_numpy_array(framework: Framework) -> None:
    op = op_custom_gradient(lambda x: (x * x, lambda u: np.array([7.0, -9.0], "float32")))
    framework.check_at(op, X, upstream=U, gradients=(np.array([7.0, -9.0]),))


@case()
def return_a_mask(framework: Framework) -> None:
    """TensorFlow's product of upstream and a mask: 1.0 for each number."""
    mask = framework.tensor([1.0, 0.0]) > 0
    _, pullback = cgshim.op_vjp(
        op_custom_gradient(lambda x: (x * x, lambda u: mask)), framework.tensor(X)
    )
    error = raised(CustomGradientValueError, pullback, framework.tensor(U))
    assert "the gradient of x must hold numbers (f32[2]), got bool[2]" in str(error)


CASTS = {f"{returned} for {wanted}": (returned, wanted) for returned, wanted in
         [("float64", "float32"), ("float32", "float64"), ("float32", "float16"), ("float16", "float32"),
          ("float32", "complex64")]}  # fmt: skip


@case(dtypes=CASTS)
def return_another_float(framework: Framework, dtypes: tuple[str, str]) -> None:
    """A gradient in another float dtype is cast to the argument's."""
    returned, wanted = dtypes
    x, upstream = framework.tensor(X, wanted), framework.tensor(U, wanted)
    gradient = framework.tensor([7.0, -9.0], returned)
    op = op_custom_gradient(lambda x: (x * x, lambda u: gradient))
    framework.check(op, x, upstream=upstream, gradients=(np.array([7.0, -9.0]),))
