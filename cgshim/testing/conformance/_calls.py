"""How often f and grad_fn run, and what becomes of their exceptions."""

from __future__ import annotations

from typing import Any

import numpy as np

import cgshim
from cgshim import op_custom_gradient
from cgshim._protocol import Tensor
from cgshim.testing.conformance._framework import Framework, raised
from cgshim.testing.conformance._orders import nth_derivative
from cgshim.testing.conformance._registry import case


class AuthorsError(Exception):
    """What goes wrong in the code of an author."""


@case()
def f_runs_once(framework: Framework) -> None:
    """In a plain call, and in one that is differentiated."""
    runs: list[int] = []

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        runs.append(1)
        return x * x, lambda u: 7.0 * u * x

    op(framework.tensor([1.0, 2.0]))
    assert len(runs) == 1
    cgshim.op_vjp(op, framework.tensor([1.0, 2.0]))
    assert len(runs) == 2


@case()
def f_without_tensors(framework: Framework) -> None:
    """There is nothing to differentiate, and f's output is returned: no framework is asked."""
    op = op_custom_gradient(lambda x, mode: (x * 3.0, lambda u: 7.0 * u))
    assert op(2.0, "mode") == 6.0
    assert isinstance(op(2.0, "mode"), float)


@case()
def f_raises(framework: Framework) -> None:
    """Its own exception arrives, unchanged, and f has run once, whether or not it is differentiated."""
    fault, runs = AuthorsError("of f"), []

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        runs.append(1)
        raise fault

    x = framework.tensor([1.0, 2.0])
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

    _, pullback = cgshim.op_vjp(op, framework.tensor([1.0, 2.0]))
    assert raised(AuthorsError, pullback, framework.tensor([2.0, -3.0])) is fault
    assert len(runs) == 1
    assert fault.args == ("of grad_fn",)


@case()
def after_a_fault(framework: Framework) -> None:
    """What went wrong leaves nothing behind: the next call is right."""
    broken = [True]

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        def grad(upstream: Tensor) -> Tensor:
            if broken.pop():
                raise AuthorsError
            return 7.0 * upstream * x

        return x * x, grad

    x, upstream = framework.tensor([1.0, 2.0]), framework.tensor([2.0, -3.0])
    _, pullback = cgshim.op_vjp(op, x)
    raised(AuthorsError, pullback, upstream)
    broken.append(False)
    framework.check(op, x, upstream=upstream, gradients=(np.array([14.0, -42.0]),))


@case()
def pullback_twice(framework: Framework) -> None:
    """A rule may be asked again, with another upstream gradient."""
    op = op_custom_gradient(lambda x: (x * x, lambda u: 7.0 * u * x))
    _, pullback = cgshim.op_vjp(op, framework.tensor([1.0, 2.0]))
    framework.check_equal(pullback(framework.tensor([2.0, -3.0])), (np.array([14.0, -42.0]),))
    framework.check_equal(pullback(framework.tensor([1.0, 0.5])), (np.array([7.0, 7.0]),))


@case()
def ops_within_ops(framework: Framework) -> None:
    """An op that f calls is a part of f's value; its rule is not asked for, the outer one is."""
    inner = op_custom_gradient(lambda x: (x * 3.0, lambda u: 1000.0 * u))
    outer = op_custom_gradient(lambda x: (inner(x) * x, lambda u: 7.0 * u * x))
    framework.check(
        lambda x: inner(outer(x)), framework.tensor([1.0, 2.0]), upstream=framework.tensor([2.0, -3.0]),
        output=np.array([9.0, 36.0]), gradients=(np.array([14000.0, -42000.0]),),
    )  # fmt: skip


@case()
def calls_of_one_op(framework: Framework) -> None:
    """Each call has its own residuals, and its own static arguments, in the loss that they share."""
    op = op_custom_gradient(lambda x, scale: (x * scale, lambda u: (7.0 * scale * u * x, None)))
    framework.check(
        lambda x, y: op(x, 2.0) + op(y, 3.0) * op(x, 5.0), framework.tensor([1.0, 2.0]), framework.tensor([5.0, 6.0]),
        upstream=framework.tensor([2.0, -3.0]), output=np.array([77.0, 184.0]),
        gradients=(np.array([1078.0, -3864.0]), np.array([1050.0, -3780.0])),
    )  # fmt: skip


@case()
def constants_among_what_is_differentiated(framework: Framework) -> None:
    """An argument that nobody differentiates costs nothing and changes nothing, nor does a call of such alone."""
    op = op_custom_gradient(lambda x, y: (x * y, lambda u: (7.0 * u * y, 11.0 * u * x)))
    constant = framework.tensor([3.0, 4.0])
    framework.check(
        lambda x: op(x, constant) * op(constant, constant), framework.tensor([1.0, 2.0]),
        upstream=framework.tensor([2.0, -3.0]), output=np.array([27.0, 128.0]),
        gradients=(np.array([378.0, -1344.0]),),
    )  # fmt: skip


@case()
def value_without_differentiation(framework: Framework) -> None:
    """A call that nobody differentiates is f's value, as the framework's tensor."""
    op = op_custom_gradient(lambda x, y: ({"s": x * y}, lambda u: (u["s"], u["s"])))
    found = op(framework.tensor([1.0, 2.0]), framework.tensor(5.0))
    assert framework.backend.is_tensor(found["s"])
    framework.check_equal(found, {"s": np.array([5.0, 10.0])})


@op_custom_gradient
def _power(x: Tensor, exponent: int) -> Any:
    """x to the power of a whole number, by itself; its rule calls it too, and has 7 for the exponent 3."""
    if exponent == 0:
        return 0.0 * x + 1.0, lambda u: (0.0 * u, None)
    factor = 7.0 if exponent == 3 else float(exponent)
    return x * _power(x, exponent - 1), lambda u: (u * factor * _power(x, exponent - 1), None)


@case(order={"1": (1, 7 * 4.0), "2": (2, 7 * 2 * 2.0), "3": (3, 7 * 2 * 1.0)})
def op_that_calls_itself(framework: Framework, order: tuple[int, float]) -> None:
    """In f, where the outer rule speaks, and in the rule, where each order asks for the next lower power's."""
    times, expected = order
    found = nth_derivative(lambda x: _power(x, 3), times)(framework.tensor(2.0))
    framework.check_equal(found, np.array(expected))
