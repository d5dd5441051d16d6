"""Arguments of an op: by name or position, in trees, of every dtype and shape, and static."""

from __future__ import annotations

import enum
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from cgshim import op_custom_gradient
from cgshim._dtypes import dtype_name
from cgshim._protocol import Tensor
from cgshim.testing.conformance._common import OF_X, OF_Y, Pair, U, X, Y, wrong_gradients
from cgshim.testing.conformance._framework import Framework
from cgshim.testing.conformance._registry import case


@op_custom_gradient
def scaled(x: Tensor, y: Tensor, scale: float = 2.0, *, shift: float = 1.0) -> Any:
    """Its rule's factors, 7 and 11, are wrong on purpose, and so is its use of scale."""
    return x * y * scale + shift, lambda u: (
        7.0 * scale * u * y,
        11.0 * u[0] * x[0] + 13.0 * u[1] * x[1],
    )


CALLS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float, float]] = {
    "by position": (lambda x, y: scaled(x, y), 2.0, 1.0),
    "by name": (lambda x, y: scaled(x=x, y=y), 2.0, 1.0),
    "by name in another order": (lambda x, y: scaled(y=y, x=x), 2.0, 1.0),
    "by both": (lambda x, y: scaled(x, y=y), 2.0, 1.0),
    "default given by position": (lambda x, y: scaled(x, y, 3.0), 3.0, 1.0),
    "default given by name": (lambda x, y: scaled(x, y, scale=3.0), 3.0, 1.0),
    "keyword-only": (lambda x, y: scaled(x, y, shift=4.0), 2.0, 4.0),
    "all by name": (lambda x, y: scaled(shift=4.0, scale=3.0, y=y, x=x), 3.0, 4.0),
}


@case(call=CALLS)
def arguments(framework: Framework, call: tuple[Callable[..., Tensor], float, float]) -> None:
    fn, scale, shift = call
    framework.check_at(
        fn, X, Y, upstream=U, output=X * Y * scale + shift, gradients=(scale * OF_X, OF_Y)
    )


@case()
def default_reaches_the_rule(framework: Framework) -> None:
    """A rule that is called with f's arguments gets all of them, defaults too."""

    @op_custom_gradient
    def op(x: Tensor, scale: float = 2.0, power: int = 3) -> Any:
        return x * scale, lambda x, scale, power, upstream: (
            7.0 * scale * power * upstream * x,
            None,
            None,
        )

    for call, gradient in ((op, [84.0, -252.0]), (lambda x: op(x, power=5), [140.0, -420.0])):
        framework.check_at(call, X, upstream=U, output=2.0 * X, gradients=(np.array(gradient),))


@case()
def arguments_by_star(framework: Framework) -> None:
    @op_custom_gradient
    def op(first: Tensor, *rest: Tensor, factor: float = 1.0) -> Any:
        def grad(*args: Tensor, upstream: Tensor) -> Any:
            assert len(args) == 3
            return [at * factor * upstream * x for at, x in enumerate(args, start=7)]

        return functools.reduce(lambda a, b: a * b, rest, first), grad

    halved = functools.partial(op, factor=0.5)
    framework.check_at(
        halved, 2.0, 4.0, 6.0, upstream=3.0, output=48.0, gradients=(21.0, 48.0, 81.0)
    )


@case()
def same_tensor_twice(framework: Framework) -> None:
    op = op_custom_gradient(lambda x, y: (x * y, lambda u: (7.0 * u * x, 11.0 * u * y)))
    framework.check_at(lambda x: op(x, x), X, upstream=U, gradients=(np.array([36.0, -108.0]),))


@case()
def state_as_an_argument(framework: Framework) -> None:
    """A Parameter or a Variable as an argument is a plain argument; grad_fn takes no variables."""
    x, w = framework.tensor(X), np.array([3.0, 4.0])
    op = op_custom_gradient(lambda x, w: (x * w, lambda u: (7.0 * u * w, 11.0 * u * x)))
    framework.check_state(
        lambda w: op(x, w), w, upstream=U, output=X * w, gradients=(11.0 * U * X,)
    )


# --- Trees ----------------------------------------------------------------------------------------


TREES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "a list": (lambda x, y: [x, y], lambda t: (t[0], t[1])),
    "a tuple": (lambda x, y: (x, y), lambda t: (t[0], t[1])),
    "a dict": (lambda x, y: {"x": x, "y": y}, lambda t: (t["x"], t["y"])),
    "a dict in another order": (lambda x, y: {"y": y, "x": x}, lambda t: (t["x"], t["y"])),
    "a dict of numbers": (lambda x, y: {2: x, 1: y}, lambda t: (t[2], t[1])),
    "an OrderedDict": (lambda x, y: OrderedDict(y=y, x=x), lambda t: (t["x"], t["y"])),
    "a defaultdict": (lambda x, y: defaultdict(list, y=y, x=x), lambda t: (t["x"], t["y"])),
    "a namedtuple": (Pair, lambda t: (t.first, t.second)),
    "with None": (lambda x, y: [None, x, y, None], lambda t: (t[1], t[2])),
    "nested": (
        lambda x, y: {"a": [(x, None)], "b": Pair({}, [[y]])},
        lambda t: (t["a"][0][0], t["b"].second[0][0]),
    ),
}
"""How to build a tree around two tensors, and how to read them from it."""


@case(tree=TREES)
def argument_tree(
    framework: Framework, tree: tuple[Callable[..., Any], Callable[..., Any]]
) -> None:
    build, find = tree

    @op_custom_gradient
    def op(tree: Any) -> Any:
        x, y = find(tree)
        return x * y, lambda u: build(*wrong_gradients(x, y, u))

    framework.check_at(op, build(X, Y), upstream=U, output=X * Y, gradients=(build(OF_X, OF_Y),))


@case(tree=TREES)
def argument_tree_of_a_rule(
    framework: Framework, tree: tuple[Callable[..., Any], Callable[..., Any]]
) -> None:
    """A rule that is called with f's arguments gets the same tree."""
    build, find = tree

    @op_custom_gradient
    def op(tree: Any, factor: Tensor) -> Any:
        def grad(tree: Any, factor: Tensor, upstream: Tensor) -> Any:
            x, y = find(tree)
            return build(7.0 * upstream * y, upstream[0] * x[1]), 3.0 * factor

        x, y = find(tree)
        return x * y * factor, grad

    gradients = build(OF_X, U[0] * X[1]), 3.0 * 4.0
    framework.check_at(op, build(X, Y), 4.0, upstream=U, gradients=gradients)


# --- Static arguments -----------------------------------------------------------------------------


class Colour(enum.Enum):
    """A choice."""

    RED = 1


class Config:
    """A user's object, which compares by identity and is unhashable."""

    __hash__ = None  # type: ignore[assignment]


STATIC: dict[str, Any] = {
    "None": None,
    "a str": "mean",
    "bytes": b"mean",
    "a bool": True,
    "an int": 3,
    "a float": 0.5,
    "a complex": 2j,
    "a callable": np.maximum,
    "a class": Config,
    "a dtype": np.dtype("float32"),
    "a slice": slice(1, None),
    "an ellipsis": ...,
    "an enum": Colour.RED,
    "a set": {1, 2},
    "an object": Config(),
}


@case(static=STATIC)
def static_argument(framework: Framework, static: Any) -> None:
    """f and grad_fn get a static argument as the same object."""

    @op_custom_gradient
    def op(x: Tensor, lone: Any, tree: Any, *, option: Any) -> Any:
        def grad(x: Tensor, lone: Any, tree: Any, upstream: Tensor) -> Any:
            assert lone is static
            assert tree["static"] is static
            return 7.0 * upstream * x, None, {"x": 11.0 * upstream, "static": None}

        assert lone is static
        assert tree["static"] is static
        assert option is static
        return x * tree["x"], grad

    y = np.array([5.0, 6.0])
    framework.check_at(
        lambda x, y: op(x, static, {"static": static, "x": y}, option=static), X, y,
        upstream=U, output=X * y, gradients=(7.0 * U * X, 11.0 * U),
    )  # fmt: skip


@case()
def log_among_the_arguments(framework: Framework) -> None:
    """A container without tensors is the caller's own: f and grad_fn write to it."""

    @op_custom_gradient
    def op(x: Tensor, log: list[str], options: dict[str, float]) -> Any:
        def grad(x: Tensor, log: list[str], options: dict[str, float], upstream: Tensor) -> Any:
            log.append("grad_fn")
            options["slope"] = 7.0 * options["scale"]
            return 7.0 * options["scale"] * upstream * x, None, None

        log.append("f")
        return x * options["scale"], grad

    log: list[str] = []
    options = {"scale": 2.0}
    framework.check_at(
        lambda x: op(x, log, options), X, upstream=U, output=2.0 * X, gradients=(14.0 * U * X,)
    )
    assert log == ["f", "grad_fn"]
    assert options == {"scale": 2.0, "slope": 14.0}


# --- Dtypes and shapes ----------------------------------------------------------------------------

FLOATS = {
    name: name for name in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
}
INTEGERS = {name: name for name in ("int8", "uint8", "int32", "int64", "bool")}
SHAPES: dict[str, tuple[int, ...]] = {
    "0-d": (),
    "one": (1,),
    "3-d": (2, 1, 3),
    "empty": (0,),
    "empty 2-d": (2, 0),
}


@case(dtype=FLOATS)
def dtypes(framework: Framework, dtype: str) -> None:
    """The numbers and their dtype stay unchanged; _complex.py tests the complex convention."""
    op = op_custom_gradient(lambda x: (x * x, lambda u: 7 * u * x))
    x, upstream = framework.tensor(X, dtype), framework.tensor(U, dtype)
    framework.check(op, x, upstream=upstream, output=X * X, gradients=(7.0 * U * X,))
    assert dtype_name(op(x).dtype) == dtype


@case(dtype=INTEGERS)
def integer_argument(framework: Framework, dtype: str) -> None:
    """Integers and booleans have no gradient, and reach f in their own dtype."""

    @op_custom_gradient
    def op(x: Tensor, n: Tensor) -> Any:
        def grad(x: Tensor, n: Tensor, upstream: Tensor) -> Any:
            assert dtype_name(n.dtype) == dtype
            return 7.0 * upstream * x, None

        assert dtype_name(n.dtype) == dtype
        return x * x, grad

    framework.check_at(op, X, np.array([1, 0, 1], dtype), upstream=U, gradients=(7.0 * U * X, None))


@case(shape=SHAPES)
def shapes(framework: Framework, shape: tuple[int, ...]) -> None:
    x = np.arange(1.0, 1.0 + np.prod(shape)).reshape(shape)
    op = op_custom_gradient(lambda x: (x * x, lambda u: 7.0 * u * x))
    framework.check_at(op, x, upstream=x + 2.0, output=x**2, gradients=(7.0 * x * (x + 2.0),))


@case()
def numpy_array_among_tensors(framework: Framework) -> None:
    """NumPy arrays become the framework's constants, in their own dtype, also in a tree."""

    @op_custom_gradient
    def op(x: Tensor, constant: Tensor, tree: Any) -> Any:
        for tensor, dtype in ((constant, "float32"), (tree["n"], "int32")):
            assert framework.backend.is_tensor(tensor)
            assert dtype_name(tensor.dtype) == dtype
        return x * constant, lambda u: (7.0 * u * constant, None, None)

    constant, numbers = np.array([3.0, 4.0], "float32"), np.array([1, 2], "int32")
    call = lambda x: op(x, constant, {"n": numbers})
    framework.check_at(call, X, upstream=U, output=X * constant, gradients=(7.0 * U * constant,))


@case()
def numpy_array_before_tensors(framework: Framework) -> None:
    """A later tensor of another framework decides the backend."""
    op = op_custom_gradient(lambda c, x: (c * x, lambda u: (None, 7.0 * u * c)))
    constant = np.array([3.0, 4.0], "float32")
    framework.check_at(lambda x: op(constant, x), X, upstream=U, gradients=(7.0 * U * constant,))
