"""Shared by many cases: inputs, a product with a wrong rule, and a few classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cgshim._protocol import Tensor
from cgshim.testing.conformance._framework import Framework

X, Y, U = np.array([1.0, 2.0]), 5.0, np.array([2.0, -3.0])
"""x, a y of another shape, and an upstream gradient in the shape of x"""


def wrong_gradients(x: Any, y: Any, upstream: Any) -> tuple[Any, Any]:
    """Gradients for x * y, wrong on purpose for each element, unlike autodiff's."""
    return 7.0 * y * upstream, 11.0 * x[0] * upstream[0] + 13.0 * x[1] * upstream[1]


OF_X, OF_Y = wrong_gradients(X, Y, U)


def check_product(framework: Framework, op: Callable[..., Tensor]) -> None:
    """Check that op is x * y, with those wrong gradients."""
    framework.check_at(op, X, Y, upstream=U, output=X * Y, gradients=(OF_X, OF_Y))


class Pair(NamedTuple):
    """A container with fields."""

    first: Any
    second: Any


class Holder:
    """An object that no registry takes apart."""

    def __init__(self, held: Any) -> None:
        self.held = held


@dataclasses.dataclass
class Record:
    """A dataclass that no registry knows."""

    held: Any


class AuthorsError(Exception):
    """An error in the author's code."""
