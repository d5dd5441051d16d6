"""JVP rules: op_custom_jvp, and an f that returns a rule for each mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cgshim import (
    CustomGradientTypeError,
    CustomGradientValueError,
    TransformationError,
    op_cast,
    op_convert_to_numpy,
    op_convert_to_tensor,
    op_custom_gradient,
    op_custom_jvp,
    op_grad,
    op_stop_gradient,
    op_vjp,
    ops,
)
from cgshim._protocol import Tensor
from cgshim._transforms import jvp_of
from cgshim.testing.conformance._common import Holder, U, X, Y
from cgshim.testing.conformance._framework import Framework, raised, tangent
from cgshim.testing.conformance._linear import NONLINEAR_IN_TWO
from cgshim.testing.conformance._registry import case


@op_custom_jvp
def product(x: Tensor, y: Tensor) -> Any:
    """x * y of a vector and a number; its derivative is wrong on purpose."""
    slope = ops.sin(x)
    return x * y, lambda dx, dy: 7.0 * y * dx + slope * dy


@case()
def jvp_in_reverse(framework: Framework) -> None:
    gradients = (7 * Y * U, (np.sin(X) * U).sum())
    framework.check_at(product, X, Y, upstream=U, output=X * Y, gradients=gradients)


@case()
def jvp_in_forward_mode(framework: Framework) -> None:
    x, y, dx, dy = framework.tensors((X, Y, np.array([2.0, -1.0]), 3.0))
    _, (output_tangent,) = jvp_of(framework.backend)(lambda *xs: [product(*xs)], [x, y], [dx, dy])
    framework.check_equal(output_tangent, 7 * Y * np.array([2.0, -1.0]) + 3 * np.sin(X))
    of_one = tangent(framework, lambda y: product(x, y), y, dy)
    framework.check_equal(of_one, 3 * np.sin(X))


@case(order={"first": 1, "second": 2, "third": 3})
def jvp_reads_its_output(framework: Framework, order: int) -> None:
    """An output that jvp_fn keeps is the op's, whose derivative is jvp_fn again."""

    @op_custom_jvp
    def triple(x: Tensor) -> Any:
        y = ops.exp(x)
        return y, lambda dx: 3.0 * y * dx

    framework.check_derivative(triple, order, 3**order * np.exp(0.5), at=0.5)


@case(order={"second": 2, "third": 3})
def jvp_keeps_what_f_made(framework: Framework, order: int) -> None:
    """A residual is a function of the arguments, through f's own operations."""

    @op_custom_jvp
    def op(x: Tensor) -> Any:
        residual = {"of x": [x**3]}
        return ops.sin(x), lambda dx: 5.0 * residual["of x"][0] * dx

    expected = {2: 15 * 0.5**2, 3: 30 * 0.5}[order]
    framework.check_derivative(op, order, expected, at=0.5)


@case()
def jvp_keeps_what_nobody_connected(framework: Framework) -> None:
    """A residual that f made in NumPy is a constant: the tangent has no derivative."""

    @op_custom_jvp
    def op(x: Tensor) -> Any:
        slope = op_convert_to_tensor(np.cos(op_convert_to_numpy(x)), "float32")
        return ops.sin(x), lambda dx: 3.0 * slope * dx

    framework.check_derivative(op, 1, 3 * np.cos(0.5), at=0.5)
    x, v = framework.tensors((0.5, 2.0))
    along: Callable[[Tensor], Tensor] = lambda x: tangent(framework, op, x, v)
    raised(Exception, op_grad(op_grad(op)), x)
    raised(Exception, op_grad(along), x)
    raised(Exception, tangent, framework, along, x, v)


def in_a_list(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    kept: list[Tensor] = []

    def once() -> Tensor:
        if not kept:
            kept.append(compute())
        return kept[0]

    return once


def as_jvp(f: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Return f, whose output has a rule for each mode, with only the forward-mode rule."""

    def op(x: Tensor) -> Any:
        output, _, jvp = f(x)
        return output, jvp

    return op_custom_jvp(op)


@case()
def jvp_around_each_mode(framework: Framework) -> None:
    @op_custom_jvp
    def op(x: Tensor) -> Any:
        return ops.sin(x), lambda dx: 5.0 * x**3 * dx

    x, v = framework.tensors((0.5, 2.0))
    framework.check_equal(tangent(framework, op_grad(op), x, v), 2 * 15 * 0.5**2)
    along: Callable[[Tensor], Tensor] = lambda x: tangent(framework, op, x, v)
    framework.check_derivative(along, 1, 2 * 15 * 0.5**2, at=0.5)
    framework.check_equal(tangent(framework, along, x, v), 2 * 2 * 15 * 0.5**2)


@case()
def jvp_of_trees(framework: Framework) -> None:
    """Tangents are structured as arguments and output, with None for static leaves and integers."""
    seen = []

    @op_custom_jvp
    def op(pair: Any, power: int, at: Tensor) -> Any:
        a, b = pair["a"], pair["b"]

        def jvp(d: Any, d_power: Any, d_at: Any) -> Any:
            seen.append((d_power, d_at))
            return {"sum": 2.0 * d["a"] + 3.0 * d["b"], "many": (power * d["a"], None)}

        return {"sum": a + b, "many": (a**power, at)}, jvp

    a, b, u, v = framework.tensors((2.0, 3.0, 5.0, 7.0))
    at = framework.tensor([1, 2], "int32")

    def fn(a: Tensor, b: Tensor) -> list[Tensor]:
        output = op({"a": a, "b": b}, 2, at)
        return [output["sum"], output["many"][0]]

    outputs, pullback = op_vjp(fn, a, b)
    framework.check_equal(list(outputs), [5.0, 4.0])
    framework.check_equal(pullback([u, v]), (2 * 5.0 + 2 * 7.0, 3 * 5.0))
    _, output_tangents = jvp_of(framework.backend)(fn, [a, b], [u, v])
    framework.check_equal(list(output_tangents), [2 * 5.0 + 3 * 7.0, 2 * 5.0])
    assert set(seen) == {(None, None)}


@case()
def jvp_without_a_tangent(framework: Framework) -> None:
    """A tangent of None is zero."""
    op = op_custom_jvp(lambda x: (ops.sin(x), lambda dx: None))
    framework.check_at(op, X, upstream=U, output=np.sin(X), gradients=(0 * X,))
    framework.check_equal(tangent(framework, op, *framework.tensors((X, U))), 0 * X)


@case()
def jvp_with_options_and_a_method(framework: Framework) -> None:
    class Scale(Holder):
        @op_custom_jvp
        def times(self, x: Tensor, *, power: int = 1) -> Any:
            return self.held * x**power, lambda dx: 7.0 * self.held * power * dx

    scale = Scale(3.0)
    fn = lambda x: scale.times(x, power=2)
    framework.check_at(fn, X, upstream=U, output=3 * X**2, gradients=(42 * U,))


@case()
def jvp_calls_ops(framework: Framework) -> None:
    """An op in jvp_fn has its own derivative in both modes."""
    inner = op_custom_jvp(lambda x: (ops.exp(x), lambda dx: 3.0 * x * dx))
    outer = op_custom_jvp(lambda x: (x * x, lambda dx: inner(x) * dx))
    framework.check_derivative(outer, 1, np.exp(0.5), at=0.5)
    framework.check_derivative(outer, 2, 1.5, at=0.5)
    output_tangent = tangent(framework, outer, *framework.tensors((0.5, 2.0)))
    framework.check_equal(output_tangent, 2 * np.exp(0.5))


# --- A rule for each mode -------------------------------------------------------------------------


@op_custom_gradient(forward_mode=True)
def rounded(x: Tensor, y: Tensor) -> Any:
    """A straight-through estimator, with another slope in forward mode; both read a residual."""
    slope = ops.cos(x)
    return (
        op_stop_gradient(ops.floor(x)) * y,
        lambda u: (7.0 * y * u, 2.0 * ops.sum(slope * u)),
        lambda dx, dy: 11.0 * y * dx + slope * dy,
    )


@case()
def both_rules(framework: Framework) -> None:
    gradients = (7 * Y * U, 2 * (np.cos(X) * U).sum())
    framework.check_at(rounded, X, Y, upstream=U, output=np.floor(X) * Y, gradients=gradients)
    x, y, dx, dy = framework.tensors((X, Y, U, 3.0))
    _, (output_tangent,) = jvp_of(framework.backend)(lambda *xs: [rounded(*xs)], [x, y], [dx, dy])
    framework.check_equal(output_tangent, 11 * Y * U + 3 * np.cos(X))


@case()
def both_rules_keep_their_own(framework: Framework) -> None:
    """jvp_fn's own residuals are connected too: in each mode around each mode."""

    @op_custom_gradient(forward_mode=True)
    def op(x: Tensor) -> Any:
        own = ops.sin(x)
        return x**3, lambda u: 7.0 * u * x, lambda dx: 11.0 * own * dx

    x, v = framework.tensors((0.5, 2.0))
    along: Callable[[Tensor], Tensor] = lambda x: tangent(framework, op, x, v)
    framework.check_equal(along(x), 22 * np.sin(0.5))
    framework.check_derivative(along, 1, 22 * np.cos(0.5), at=0.5)
    framework.check_equal(tangent(framework, along, x, v), 44 * np.cos(0.5))
    framework.check_equal(tangent(framework, op_grad(op), x, v), 14.0)


@case()
def both_rules_need_not_be_linear(framework: Framework) -> None:
    """Each mode uses its own rule as it is."""
    f = lambda x: (x * x, lambda u: u * abs(u), lambda dx: ops.exp(dx))
    op = op_custom_gradient(f, forward_mode=True)
    framework.check_at(op, X, upstream=U, output=X**2, gradients=(U * abs(U),))
    try:
        output_tangent = tangent(framework, op, *framework.tensors((X, U)))
    except TransformationError as error:  # a framework may support only linear operations
        starts = "<lambda>: jvp_fn must be linear in the tangents, got "
        if not str(error).startswith(starts):
            raise
    else:
        framework.check_equal(output_tangent, np.exp(U))


@case()
def both_rules_once(framework: Framework) -> None:
    op = op_custom_jvp(
        lambda x: (x**3, lambda dx: 7.0 * x * dx), once_differentiable=True, name="only_once"
    )
    framework.check_at(op, X, upstream=U, output=X**3, gradients=(7 * X * U,))
    framework.check_equal(tangent(framework, op, *framework.tensors((X, U))), 7 * X * U)
    second = op_grad(op_grad(op))
    raised(TransformationError, second, framework.tensor(0.5), starts="only_once: ")


# --- Errors ---------------------------------------------------------------------------------------

NONLINEAR: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "affine": lambda x, d: d + 1.0,
    "affine in x": lambda x, d: 7.0 * d + x,
    "constant": lambda x, d: 0.0 * op_stop_gradient(x) + 3.0,
    "square": lambda x, d: d * d,
    "sign": lambda x, d: ops.sign(d) * x,
    "absolute value": lambda x, d: ops.abs(d),
    "a cast to integers": lambda x, d: op_cast(op_cast(d, "int32"), "float32"),
    "a mask of tangents": lambda x, d: ops.where(d > 0.0, 7.0 * d, 0.0 * d),
    "a stopped gradient": lambda x, d: op_stop_gradient(7.0 * d),
    "a gradient stopped in part": lambda x, d: d + op_stop_gradient(6.0 * d),
}


@case(jvp=NONLINEAR)
def nonlinear_jvp(framework: Framework, jvp: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Reverse mode cannot transpose a nonlinear jvp_fn."""
    op = op_custom_jvp(lambda x: (x * x, lambda dx: jvp(x, dx)), name="crooked")

    def differentiated(x: Tensor, u: Tensor) -> Any:
        return op_vjp(op, x)[1](u)

    starts = "crooked: jvp_fn must be linear in the tangents, got "
    raised(TransformationError, differentiated, *framework.tensors((X, U)), starts=starts)


@case(jvp=NONLINEAR_IN_TWO)
def nonlinear_jvp_of_two(framework: Framework, jvp: Callable[[Tensor, Tensor], Tensor]) -> None:
    op = op_custom_jvp(lambda x, y: (x + y, lambda dx, dy: jvp(dx, dy)), name="crooked")

    def differentiated(x: Tensor, u: Tensor) -> Any:
        return op_vjp(op, x, 2.0 * x)[1](u)

    starts = "crooked: jvp_fn must be linear in the tangents, got "
    raised(TransformationError, differentiated, *framework.tensors((X, U)), starts=starts)


@case()
def jvp_of_another_shape(framework: Framework) -> None:
    op = op_custom_jvp(lambda x: (ops.sum(x * x), lambda dx: 7.0 * dx), name="vectorial")
    starts = "vectorial: the tangent of the output must have its shape f32[], got f32[2]; "
    x, u = framework.tensors((X, U))
    raised(CustomGradientValueError, tangent, framework, op, x, u, starts=starts)
    raised(CustomGradientValueError, op_grad(op), x, starts=starts)


@case()
def jvp_of_another_structure(framework: Framework) -> None:
    op = op_custom_jvp(lambda x: ((x, 2.0 * x), lambda dx: dx), name="halved")
    starts = "halved: jvp_fn must return a tangent structured as the output, got f32[2]; "
    fn = lambda x: op(x)[0]
    x, u = framework.tensors((X, U))
    raised(CustomGradientValueError, tangent, framework, fn, x, u, starts=starts)
    raised(CustomGradientValueError, lambda x: op_vjp(fn, x)[1](x), x, starts=starts)


@case()
def no_jvp(framework: Framework) -> None:
    op = op_custom_jvp(lambda x: x * x, name="alone")
    starts = "alone: <lambda> must return a pair (output, jvp_fn), got f32[2]; "
    raised(CustomGradientTypeError, op, framework.tensor(X), starts=starts)
