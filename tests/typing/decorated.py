"""What a type checker sees of an op: f's own parameters, and f's output without the rule. Checked
by `nox -s lint`.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

from cgshim import Tensor, op_custom_gradient, op_grad, op_vjp, ops

Array = NDArray[np.float64]
Rule = Callable[[Array], Array]


@op_custom_gradient
def plain(x: Array, scale: float = 1.0) -> tuple[Array, Rule]:
    return x * scale, lambda upstream: upstream * scale


@op_custom_gradient(forward_mode=True, name="another")
def with_options(x: Array, *, axis: int) -> tuple[tuple[Array, Array], Rule]:
    return (x, x), lambda upstream: upstream


@op_custom_gradient
def of_any_framework(x: Tensor, scale: float) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    return x * scale, lambda upstream: upstream * scale


class Layer:
    @op_custom_gradient
    def method(self, x: Array) -> tuple[Array, Rule]:
        return x, lambda upstream: upstream

    @op_custom_gradient
    @staticmethod
    def static(x: Array) -> tuple[Array, Rule]:
        return x, lambda upstream: upstream


x = np.ones(3)
assert_type(plain(x), Array)
assert_type(plain(x, scale=2.0), Array)
assert_type(with_options(x, axis=0), tuple[Array, Array])
assert_type(Layer().method(x), Array)
assert_type(Layer.static(x), Array)
assert_type(op_vjp(plain, x), tuple[Any, Callable[[Any], tuple[Any, ...]]])
assert_type(op_grad(plain)(x), Any)
assert_type(of_any_framework(x, 2.0), Tensor)

# Each of these is a mistake: mypy and pyright would report a needless ignore, had they not seen it.
plain("x")  # type: ignore[arg-type]
plain(x, factor=2.0)  # type: ignore[call-arg]
with_options(x)  # type: ignore[call-arg]
Layer().method()  # type: ignore[call-arg]
of_any_framework(x, "2")  # type: ignore[arg-type]
# f's missing rule is an error at the call, not here: a lambda has no types
op_custom_gradient(lambda x: x)(1)


ops.sum(1.0, axis=None)
ops.linalg.norm(1.0, ord=2)
ops.sine(1.0)  # type: ignore[attr-defined]
ops.sum(1.0, dim=0)  # type: ignore[call-arg]
ops.linalg.norms(1.0)  # type: ignore[attr-defined]
