"""NumPy arrays given to an f that computes in the framework: they are constants, and so is what f makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import cgshim
from cgshim import op_custom_gradient
from cgshim._dtypes import dtype_name
from cgshim._protocol import Tensor
from cgshim.testing.conformance._captured import refused
from cgshim.testing.conformance._framework import Framework
from cgshim.testing.conformance._registry import case


class Two(NamedTuple):
    """A container with fields."""

    first: Any
    second: Any


OUTPUTS: dict[str, Callable[[Any, Any], Any]] = {
    "one": lambda y, z: y,
    "two": lambda y, z: (y, z),
    "a dict": lambda y, z: {"y": y, "z": z},
    "a namedtuple in a list": lambda y, z: [Two(y, z)],
    "with None and what is static": lambda y, z: {"y": (y, None, "static"), "n": 3},
    "twice the same": lambda y, z: [y, y],
}
"""What f returns of two tensors that it has made."""


def _no_rule(upstream: Any) -> Any:
    raise AssertionError("a constant has no gradient")


@case(pack=OUTPUTS)
def numpy_arrays_alone(framework: Framework, pack: Callable[[Any, Any], Any]) -> None:
    """The output is the framework's, by itself and in what is differentiated; the rule is never asked."""

    @op_custom_gradient
    def op(array: Any, tree: Any, mode: Any = None, *, scale: float = 1.0) -> Any:
        assert isinstance(array, np.ndarray)
        y = framework.tensor(array * scale)
        return pack(y, y * framework.tensor(tree["b"])), _no_rule

    array, tree = np.array([1.0, 2.0], "float32"), {"b": np.array([3.0, 5.0], "float32")}
    expected = pack(np.array([4.0, 8.0]), np.array([12.0, 40.0]))
    found = op(array, tree, scale=4.0)
    assert any(map(framework.backend.is_tensor, framework.backend.tree_flatten(found)[0]))
    framework.check_equal(found, expected)

    def product(x: Tensor) -> Tensor:
        y = framework.backend.tree_flatten(op(array, tree, scale=4.0))[0]
        return x * next(filter(framework.backend.is_tensor, y))

    framework.check(
        product, framework.tensor([1.0, 10.0]), upstream=framework.tensor([2.0, -3.0]),
        output=np.array([4.0, 80.0]), gradients=(np.array([8.0, -24.0]),),
    )  # fmt: skip


@case(pack=OUTPUTS)
def numpy_arrays_beside_a_captured_tensor(framework: Framework, pack: Callable[[Any, Any], Any]) -> None:
    """What is captured and differentiated is refused, wherever in the output it is."""
    array = np.array([1.0, 2.0], "float32")

    def captured(w: Tensor) -> Any:
        return op_custom_gradient(lambda a: (pack(framework.tensor(a) * w, framework.tensor(a)), _no_rule))(array)

    def read(w: Tensor) -> Tensor:
        leaves, _ = framework.backend.tree_flatten(captured(w))
        return next(filter(framework.backend.is_tensor, leaves))

    for differentiate in (cgshim.op_vjp, framework.differentiate_state):
        error = refused(differentiate, read, framework.tensor(5.0))
        assert "as an argument" in str(error)
    framework.check_equal(read(framework.tensor(5.0)), np.array([5.0, 10.0]))


@case(dtype={"float32": "float32", "int32": "int32", "complex64": "complex64"})
def numpy_array_of_another_byte_order(framework: Framework, dtype: str) -> None:
    """A constant as any other, with the numbers that it has."""
    swapped = np.array([3.0, 4.0]).astype(np.dtype(dtype).newbyteorder())

    @op_custom_gradient
    def op(x: Tensor, constant: Tensor) -> Any:
        assert framework.backend.is_tensor(constant)
        assert dtype_name(constant.dtype) == dtype
        return (x * 2.0, constant), lambda u: (7.0 * u[0], None)

    framework.check_equal(op(framework.tensor([1.0, 2.0]), swapped), (np.array([2.0, 4.0]), np.array([3.0, 4.0])))
    framework.check(
        lambda x: op(x, swapped)[0], framework.tensor([1.0, 2.0]),
        upstream=framework.tensor([2.0, -3.0]), gradients=(np.array([14.0, -21.0]),),
    )  # fmt: skip
