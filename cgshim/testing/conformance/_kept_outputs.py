"""Rules that keep an output of f: it stands for the op's output, with the rule's derivative."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import numpy as np

import cgshim
from cgshim import TransformationError, op_custom_gradient, op_stop_gradient, ops
from cgshim._op import CustomGradient
from cgshim._protocol import Tensor
from cgshim.testing.conformance._framework import Framework, tangent
from cgshim.testing.conformance._registry import ORDERS, case, orders
from cgshim.testing.conformance._residuals import HOLDERS, Rule

AT = 0.5
EXP = float(np.exp(AT))
"""the op's value there; its n-th derivative is 5^n times as large, because its rule has 5 for 1"""


def opaque_exp(x: Tensor) -> Tensor:
    """exp, which autodiff cannot trace."""
    return op_stop_gradient(ops.exp(x))


# --- Places of a kept output ----------------------------------------------------------------------

PLACES = {
    name: HOLDERS[name]
    for name in (
        *(
            "a variable",
            "a list",
            "a dict",
            "a tuple",
            "a namedtuple",
            "a partial",
            "a partial by name",
        ),
        *(
            "a namespace",
            "a nested function",
            "a default value",
            "a default value by name",
            "a helper of two functions",
            "two places",
        ),
    )
}
"""places that every framework must find; `residual` has more, which a framework may reject"""


@case(order=ORDERS, holder=PLACES)
def kept_output(framework: Framework, order: int, holder: Callable[[Tensor], Rule]) -> None:
    """Autodiff finds 0 in the second order, because f is opaque; a second run of f finds 0 too."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        y = opaque_exp(x)
        return y, holder(y)

    framework.check_derivative(op, order, 5**order * EXP, at=AT)


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "grad(upstream)": lambda y: lambda upstream: upstream["y"] * 5.0 * y,
    "grad(*args, upstream)": lambda y: (
        lambda *args, upstream: upstream["y"] * (5.0 * y + 0.0 * args[0])
    ),
    "grad(x, upstream)": lambda y: lambda x, upstream: upstream["y"] * (5.0 * y + 0.0 * x),
    "grad(d1)": lambda y: lambda *dys: dys[0] * 5.0 * y,
}


@case(order=ORDERS, form=FORMS)
def kept_output_of_a_tree(framework: Framework, order: int, form: Callable[[Tensor], Any]) -> None:
    """Every form of a rule, for an output in a dict."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        y = opaque_exp(x)
        return {"static": "s", "y": y}, form(y)

    framework.check_derivative(lambda x: op(x)["y"], order, 5**order * EXP, at=AT)


@op_custom_gradient
def five_exp(x: Tensor) -> Any:
    """exp with an opaque f; its rule keeps the output, and has 5 for 1."""
    y = opaque_exp(x)
    return y, lambda u: u * 5.0 * y


@op_custom_gradient
def seen_through(x: Tensor) -> Any:
    """The same with a traceable f: autodiff would find 5 and not 25 in the second order."""
    y = ops.exp(x)
    return y, lambda u: u * 5.0 * y


OPS: dict[str, CustomGradient[..., Tensor]] = {"opaque": five_exp, "seen through": seen_through}


@case(op=OPS, order=ORDERS)
def kept_output_of_an_expression(
    framework: Framework, op: Callable[[Tensor], Tensor], order: int
) -> None:
    """op(2 x) * x, where the upstream gradient itself is differentiated."""
    value = float(np.exp(2 * AT))
    expected = (
        order * 2 ** (order - 1) * 5 ** (order - 1) * value + AT * 2**order * 5**order * value
    )
    framework.check_derivative(lambda x: op(2.0 * x) * x, order, expected, at=AT)


@case(op=OPS, order={"1": 1, "2": 2})
def kept_output_of_an_op_of_an_op(
    framework: Framework, op: Callable[[Tensor], Tensor], order: int
) -> None:
    inner = float(np.exp(0.1))
    outer = float(np.exp(inner))
    expected = {1: 25 * inner * outer, 2: 25 * (5 * inner * outer + 25 * inner * inner * outer)}
    framework.check_derivative(lambda x: op(op(x)), order, expected[order], at=0.1)


@case(op=OPS, promised={"promised": True, "not promised": False})
def kept_output_forward_over_reverse(
    framework: Framework, op: CustomGradient[..., Tensor], promised: bool
) -> None:
    """The tangent of the gradient, 25 exp(x); without a promise of forward mode it may raise an
    error.
    """
    op = op_custom_gradient(op.__wrapped__, forward_mode=promised)
    try:
        output_tangent = tangent(framework, cgshim.op_grad(op), *framework.tensors((AT, 3.0)))
    except TransformationError:
        assert not promised
        return
    framework.check_equal(output_tangent, 75 * EXP)


@case(order=ORDERS)
def kept_output_of_an_op_inside(framework: Framework, order: int) -> None:
    """f returns another op's output, whose rule has 5; every order uses the outer rule's 3."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        y = five_exp(x)
        return y, lambda u: u * 3.0 * y

    framework.check_derivative(op, order, 3**order * EXP, at=AT)


def both_of(op: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """The first output of op, and twice the second."""

    def both(x: Tensor) -> Tensor:
        first, second = op(x)
        return first + 2.0 * second

    return both


CUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "opaque": op_stop_gradient,
    "seen through": lambda x: x * 1.0,
}


@case(cut=CUTS, order=ORDERS)
def kept_output_of_which_another_is_made(
    framework: Framework, cut: Callable[[Tensor], Tensor], order: int
) -> None:
    """The rule reads both outputs. If f is traceable, a framework may raise an error."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        first = cut(x) * 3.0
        second = cut(x) + ops.sin(first)
        return (
            first,
            second,
        ), lambda d1, d2: 5.0 * d1 + d2 * (1.0 + 5.0 * ops.cos(first)) + 0.0 * d2 * second

    c, s = float(np.cos(3 * AT)), float(np.sin(3 * AT))
    expected = {1: 7 + 10 * c, 2: -50 * s, 3: -250 * c}
    with contextlib.suppress(*([TransformationError] if cut is not op_stop_gradient else [])):
        framework.check_derivative(both_of(op), order, expected[order], at=AT)


@case(order=ORDERS)
def kept_output_that_is_returned_twice(framework: Framework, order: int) -> None:
    """Each copy is an output, and the rule may keep either: they have one derivative."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        y = opaque_exp(x)
        return (y, {"again": y}), lambda u: (5.0 * u[0] + 5.0 * u[1]["again"]) * y

    def both(x: Tensor) -> Tensor:
        first, second = op(x)
        return first + 2.0 * second["again"]

    framework.check_derivative(both, order, 3 * 5**order * EXP, at=AT)


@case(order=ORDERS)
def kept_output_that_is_returned_twice_is_the_first(framework: Framework, order: int) -> None:
    """The copies have different derivatives."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        y = opaque_exp(x)
        return (y, y), lambda u: (5.0 * u[0] + 11.0 * u[1]) * y

    def both(x: Tensor) -> Tensor:
        first, second = op(x)
        return first + 2.0 * second

    framework.check_derivative(both, order, 27 * 5 ** (order - 1) * EXP, at=AT)


# --- Beside other outputs and other residuals -----------------------------------------------------


@case(order=ORDERS)
def kept_output_beside_others(framework: Framework, order: int) -> None:
    """The rule keeps one of two outputs, and the gradient through both depends on it."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        y = opaque_exp(x)
        return [x * x, y], lambda u: 7.0 * u[0] * y + 5.0 * u[1] * y

    def both(x: Tensor) -> Tensor:
        outputs = op(x)
        return 2.0 * outputs[0] + outputs[1]

    framework.check_derivative(both, order, 19 * 5 ** (order - 1) * EXP, at=AT)


@case(order=ORDERS)
def kept_outputs_that_depend_on_each_other(framework: Framework, order: int) -> None:
    """Sine and cosine: the rule needs each for the other, and has 3 for 1 and -5 for -1."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        sine, cosine = op_stop_gradient(ops.sin(x)), op_stop_gradient(ops.cos(x))
        return (sine, cosine), lambda d1, d2: 3.0 * d1 * cosine - 5.0 * d2 * sine

    s, c = float(np.sin(AT)), float(np.cos(AT))
    expected = {1: 3 * c - 10 * s, 2: -15 * s - 30 * c, 3: -45 * c + 150 * s}
    framework.check_derivative(both_of(op), order, expected[order], at=AT)


def _in_variables(y: Tensor, square: Tensor) -> Rule:
    return lambda u: u * (5.0 * y + 3.0 * square)


def _in_a_namespace(y: Tensor, square: Tensor) -> Rule:
    ctx = types.SimpleNamespace(y=y, square=square)
    return lambda u: u * (5.0 * ctx.y + 3.0 * ctx.square)


BOTH = {
    "variables": _in_variables,
    "a namespace": _in_a_namespace,
}
"""how a rule keeps an output and an intermediate"""


@case(order=ORDERS, holder=BOTH)
def kept_output_beside_an_intermediate(
    framework: Framework, order: int, holder: Callable[[Tensor, Tensor], Rule]
) -> None:
    """The output has the rule's derivative; the intermediate (x * x) has f's own."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        y = opaque_exp(x)
        return y, holder(y, x * x)

    first = 5 * EXP + 3 * AT * AT
    second = 5 * first + 6 * AT
    expected = {1: first, 2: second, 3: 5 * second + 6}
    framework.check_derivative(op, order, expected[order], at=AT)


@case(order=orders(17 * AT, 17.0, 0.0))
def kept_output_that_is_an_argument(framework: Framework, order: tuple[int, float]) -> None:
    """It counts as the argument: its derivative is 1, and not the rule's."""

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        return (x, op_stop_gradient(x * x)), lambda d1, d2: 7.0 * d1 * x + 5.0 * d2 * x

    framework.check_derivative(both_of(op), *order, at=AT)


RETURNED: dict[str, Callable[[Tensor, Tensor], Rule]] = {
    "a rule": lambda x, b: lambda u: (7.0 * u * x, 5.0 * u * x * b),
    "one that branches": lambda x, b: lambda u: (7.0 * u * x, 5.0 * u * x * b) if x > 0 else (u, u),
}


def _returning(rule: Callable[[Tensor, Tensor], Rule]) -> Callable[[Tensor, Tensor], Tensor]:
    return op_custom_gradient(lambda x, b: (x, rule(x, b)))


@case(order=orders(7 * AT, 7.0, 0.0), rule=RETURNED)
def returned_argument(
    framework: Framework, order: tuple[int, float], rule: Callable[[Tensor, Tensor], Rule]
) -> None:
    op, b = _returning(rule), framework.tensor(3.0)
    framework.check_derivative(lambda x: op(x, b), *order, at=AT)


@case(order=orders(15 * AT, 5 * AT, 0.0), rule=RETURNED)
def returned_argument_of_a_constant(
    framework: Framework, order: tuple[int, float], rule: Callable[[Tensor, Tensor], Rule]
) -> None:
    """Where the argument is constant, the rule still reads it, and not the output."""
    op, x = _returning(rule), framework.tensor(AT)
    framework.check_derivative(lambda b: op(x, b), *order, at=3.0)


# --- Several arguments ----------------------------------------------------------------------------


@op_custom_gradient
def of_two(x: Tensor, b: Tensor) -> Any:
    """b exp(x) for x of shape (2,) and a scalar b; 7, 11 and 13 are wrong on purpose."""
    y = op_stop_gradient(b * ops.exp(x))
    return y, lambda u: (7.0 * u * y, 11.0 * u[0] * y[0] + 13.0 * u[1] * y[1])


def _rule_of_two(y: Any, u: Any) -> tuple[Any, Any]:
    return 7 * u * y, np.array(11 * u[0] * y[0] + 13 * u[1] * y[1])


@case(of={"the gradient of x": 0, "the gradient of b": 1})
def kept_output_in_mixed_partials(framework: Framework, of: int) -> None:
    """The derivative of one gradient by both arguments and by upstream."""
    x, b, w = np.array([0.5, -0.25]), 3.0, np.array([2.0, -3.0])
    y = b * np.exp(x)
    gradient = lambda x, b, w: cgshim.op_vjp(of_two, x, b)[1](w)[of]
    factor = np.array([7.0, 7.0]) if of == 0 else np.array([11.0, 13.0])
    v = np.array([0.5, 1.5]) if of == 0 else np.array(0.5)
    framework.check_at(
        gradient, x, b, w, upstream=v, output=_rule_of_two(y, w)[of],
        gradients=(*_rule_of_two(y, factor * w * v), factor * y * v),
    )  # fmt: skip


@case()
def kept_output_does_not_keep_other_gradients(framework: Framework) -> None:
    """A gradient penalty over a vector: each element gets the rule of its own output."""

    def penalty(x: Tensor) -> Tensor:
        y = five_exp(x)
        slopes = cgshim.op_grad(lambda x: five_exp(x)[0] + 2.0 * five_exp(x)[1])(x)
        return y[0] + slopes[0] * slopes[1]

    x = np.array([0.5, -0.25])
    y = np.exp(x)
    product = 5 * y[0] * 10 * y[1]
    framework.check_derivative(penalty, 1, np.array([5 * y[0] + 5 * product, 5 * product]), at=x)
