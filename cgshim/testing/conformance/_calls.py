"""Calls of f and grad_fn: how often, with which exceptions, and what a rule may write and free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cgshim
from cgshim import op_custom_gradient, ops
from cgshim._protocol import Tensor
from cgshim.testing.conformance._common import AuthorsError, U, X, Y
from cgshim.testing.conformance._framework import Framework, raised
from cgshim.testing.conformance._registry import case, orders
from cgshim.testing.conformance._runs import counted


@case()
def f_runs_once(framework: Framework) -> None:
    """f runs once, in a plain call and in a differentiated one."""
    op, runs = counted(lambda x: (x * x, lambda u: 7.0 * u * x))
    op(framework.tensor(X))
    assert len(runs) == 1
    cgshim.op_vjp(op, framework.tensor(X))
    assert len(runs) == 2


@case()
def f_without_tensors(framework: Framework) -> None:
    """Without tensors f's output is returned, and no framework is used."""
    op = op_custom_gradient(lambda x, mode: (x * 3.0, lambda u: 7.0 * u))
    assert op(2.0, "mode") == 6.0
    assert isinstance(op(2.0, "mode"), float)


@case()
def f_raises(framework: Framework) -> None:
    """f's own exception arrives unchanged after one run, differentiated or not."""
    fault, runs = AuthorsError("of f"), []

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        runs.append(1)
        raise fault

    x = framework.tensor(X)
    assert raised(AuthorsError, op, x) is fault
    assert len(runs) == 1
    assert raised(AuthorsError, cgshim.op_vjp, op, x) is fault
    assert len(runs) == 2
    assert fault.args == ("of f",)


@case()
def grad_fn_raises(framework: Framework) -> None:
    fault, runs = AuthorsError("of grad_fn"), []

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        def grad(upstream: Tensor) -> Tensor:
            runs.append(1)
            raise fault

        return x * x, grad

    _, pullback = cgshim.op_vjp(op, framework.tensor(X))
    assert raised(AuthorsError, pullback, framework.tensor(U)) is fault
    assert len(runs) == 1
    assert fault.args == ("of grad_fn",)


@case()
def after_a_fault(framework: Framework) -> None:
    """The call after an error is right."""
    broken = [True]

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        def grad(upstream: Tensor) -> Tensor:
            if broken.pop():
                raise AuthorsError
            return 7.0 * upstream * x

        return x * x, grad

    _, pullback = cgshim.op_vjp(op, framework.tensor(X))
    raised(AuthorsError, pullback, framework.tensor(U))
    broken.append(False)
    framework.check_at(op, X, upstream=U, gradients=(7.0 * U * X,))


@case()
def pullback_twice(framework: Framework) -> None:
    """A pullback may be called twice, with other upstream gradients."""
    op = op_custom_gradient(lambda x: (x * x, lambda u: 7.0 * u * x))
    _, pullback = cgshim.op_vjp(op, framework.tensor(X))
    for upstream in (U, np.array([1.0, 0.5])):
        framework.check_equal(pullback(framework.tensor(upstream)), (7.0 * upstream * X,))


@case()
def ops_within_ops(framework: Framework) -> None:
    """f may call an op as part of its value; only the outer rule is called."""
    inner = op_custom_gradient(lambda x: (x * 3.0, lambda u: 1000.0 * u))
    outer = op_custom_gradient(lambda x: (inner(x) * x, lambda u: 7.0 * u * x))
    framework.check_at(
        lambda x: inner(outer(x)), X, upstream=U, output=9.0 * X**2, gradients=(7000.0 * U * X,)
    )


@case()
def calls_of_one_op(framework: Framework) -> None:
    """Each call in a loss has its own residuals and static arguments."""
    op = op_custom_gradient(lambda x, scale: (x * scale, lambda u: (7.0 * scale * u * x, None)))
    y = np.array([5.0, 6.0])
    of_x, of_y = 7.0 * (2.0 + 5.0 * 3.0 * y) * U * X, 7.0 * 3.0 * U * 5.0 * X * y
    framework.check_at(
        lambda x, y: op(x, 2.0) + op(y, 3.0) * op(x, 5.0), X, y, upstream=U,
        output=2.0 * X + 3.0 * y * 5.0 * X, gradients=(of_x, of_y),
    )  # fmt: skip


@case()
def constants_among_what_is_differentiated(framework: Framework) -> None:
    """A constant argument changes nothing, nor does a call with only constants."""
    op = op_custom_gradient(lambda x, y: (x * y, lambda u: (7.0 * u * y, 11.0 * u * x)))
    c = np.array([3.0, 4.0])
    constant = framework.tensor(c)
    framework.check_at(
        lambda x: op(x, constant) * op(constant, constant), X, upstream=U,
        output=X * c**3, gradients=(7.0 * U * c**3,),
    )  # fmt: skip


@case()
def value_without_differentiation(framework: Framework) -> None:
    """The value without differentiation is f's value, as the framework's tensor."""
    op = op_custom_gradient(lambda x, y: ({"s": x * y}, lambda u: (u["s"], u["s"])))
    output = op(*framework.tensors((X, Y)))
    assert framework.backend.is_tensor(output["s"])
    framework.check_equal(output, {"s": X * Y})


@op_custom_gradient
def _power(x: Tensor, exponent: int) -> Any:
    """x to the power of a whole number, by recursion; its rule recurs too, and has 7 for exponent
    3.
    """
    if exponent == 0:
        return 0.0 * x + 1.0, lambda u: (0.0 * u, None)
    factor = 7.0 if exponent == 3 else float(exponent)
    return x * _power(x, exponent - 1), lambda u: (u * factor * _power(x, exponent - 1), None)


@case(order=orders(7 * 4.0, 7 * 2 * 2.0, 7 * 2 * 1.0))
def op_that_calls_itself(framework: Framework, order: tuple[int, float]) -> None:
    """In f the outer rule counts; in the rule, each order uses the rule of the next lower power."""
    framework.check_derivative(lambda x: _power(x, 3), *order, at=2.0)


# --- A first derivative calls the very function that f returned -----------------------------------

AT, UPSTREAM = np.array([0.5, -2.0]), np.array([3.0, 7.0])


def check(framework: Framework, op: Callable[[Tensor], Tensor], gradient: Any) -> None:
    """Check op, which doubles x, and its gradient."""
    framework.check_at(op, AT, upstream=UPSTREAM, output=2.0 * AT, gradients=(gradient,))


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

    check(framework, op, 5.0 * UPSTREAM)
    assert [slope.called for slope in returned] == [1]


@case()
def what_a_rule_writes_into_a_list_and_a_dict(framework: Framework) -> None:
    """They are f's own, an option and a static argument; the last two outlive the call."""
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
        """An object that no registry takes apart."""

        def __getitem__(self, key: str) -> int:
            return table[key]

        def __setitem__(self, key: str, value: int) -> None:
            table[key] = value

    for times in (1, 2):
        check(framework, lambda x: op(x, Table(), log=log), 5.0 * UPSTREAM)
        assert (len(log), table["calls"]) == (times, times)
    framework.check_equal(log[0], UPSTREAM)


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

    check(framework, op, 2.0 * UPSTREAM)
    check(framework, op, 4.0 * UPSTREAM)


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
    check(framework, layer.op, UPSTREAM * np.exp(AT) * 5.0 * AT)
    assert (layer.stack, layer.slope) == ([], None)
