"""A first derivative calls the very function that f returned: what it writes, pops, frees and counts happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cgshim import op_custom_gradient, op_vjp, ops
from cgshim._protocol import Tensor
from cgshim.testing.conformance._framework import Framework
from cgshim.testing.conformance._registry import case

AT, UPSTREAM = np.array([0.5, -2.0]), np.array([3.0, 7.0])


def pulled_back(framework: Framework, op: Callable[[Tensor], Tensor]) -> Any:
    """The gradient at AT, as an array."""
    _, pullback = op_vjp(op, framework.tensor(AT))
    (gradient,) = pullback(framework.tensor(UPSTREAM))
    return framework.numpy(gradient)


@case()
def the_rule_is_the_object_that_f_returned(framework: Framework) -> None:
    class Slope:
        def __init__(self) -> None:
            self.called = 0

        def __call__(self, u: Tensor) -> Tensor:
            self.called += 1
            return 5.0 * u

    returned: list[Slope] = []

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        returned.append(Slope())
        return 2.0 * x, returned[-1]

    np.testing.assert_allclose(pulled_back(framework, op), 5.0 * UPSTREAM)
    assert [slope.called for slope in returned] == [1]


@case()
def what_a_rule_writes_into_a_list_and_a_dict(framework: Framework) -> None:
    """They are f's own, the op's option and a static argument; the last two outlive the call."""
    log: list[Tensor] = []
    table = {"calls": 0}

    @op_custom_gradient
    def op(x: Tensor, table: Any, *, log: list[Any]) -> Any:
        own = [0.0]

        def grad(u: Tensor) -> Any:
            own[0] += 5.0
            log.append(u)
            table["calls"] += 1
            return own[0] * u, None

        return 2.0 * x, grad

    class Table:
        """What no registry takes apart."""

        def __getitem__(self, key: str) -> int:
            return table[key]

        def __setitem__(self, key: str, value: int) -> None:
            table[key] = value

    for times in (1, 2):
        found = pulled_back(framework, lambda x: op(x, Table(), log=log))
        np.testing.assert_allclose(found, 5.0 * UPSTREAM)
        assert (len(log), table["calls"]) == (times, times)
    np.testing.assert_allclose(framework.numpy(log[0]), UPSTREAM)


@case()
def what_a_rule_counts(framework: Framework) -> None:
    """f, the rule and a helper share a variable."""
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        step()
        return 2.0 * x, lambda u: float(step()) * u

    np.testing.assert_allclose(pulled_back(framework, op), 2.0 * UPSTREAM)
    np.testing.assert_allclose(pulled_back(framework, op), 4.0 * UPSTREAM)


@case()
def what_a_rule_pops_and_frees(framework: Framework) -> None:
    class Layer:
        def __init__(self) -> None:
            self.stack: list[Tensor] = []
            self.slope: Tensor | None = None

        @op_custom_gradient
        def op(self, x: Tensor) -> Any:
            self.stack.append(ops.exp(x))
            self.slope = 5.0 * x

            def grad(u: Tensor) -> Tensor:
                slope, self.slope = self.slope, None
                return u * self.stack.pop() * slope

            return 2.0 * x, grad

    layer = Layer()
    expected = UPSTREAM * np.exp(AT) * 5.0 * AT
    np.testing.assert_allclose(pulled_back(framework, layer.op), expected, rtol=1e-5)
    assert (layer.stack, layer.slope) == ([], None)
