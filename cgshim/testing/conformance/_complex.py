"""Complex numbers: rules use one convention in every framework, as TensorFlow and PyTorch do.

upstream and the gradients of a real loss are dL/dx + i dL/dy, so the rule of z * z is `u * conj(2 *
z)`. In JAX and autograd, which use the conjugate, op_vjp still returns the framework's own numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import cgshim
from cgshim import op_cast, op_custom_gradient, op_custom_jvp, op_host, op_stop_gradient, ops
from cgshim._protocol import Tensor
from cgshim.testing.conformance._foreign_functions import other_frameworks
from cgshim.testing.conformance._framework import Framework, tangent
from cgshim.testing.conformance._registry import case

COMPLEX = {"complex64": "complex64", "complex128": "complex128"}
REAL = {"complex64": "float32", "complex128": "float64"}
Z = [1.0 + 2.0j, 3.0 - 1.0j]
UPSTREAM = [2.0 - 1.0j, 0.5j]
ANOTHER = [0.5 + 3.0j, -2.0 + 1.0j]


Function = Callable[..., Tensor]


def square(z: Tensor) -> Tensor:
    return z * z


@op_custom_gradient(forward_mode=True)
def crooked_square(z: Tensor) -> Any:
    """z * z, with 7 for 1 in its rule."""
    return z * z, lambda u: 7.0 * u * ops.conj(2.0 * z)


def own_gradient(fn: Function, z: Tensor, upstream: Tensor) -> Any:
    """The framework's own vjp of the function."""
    return cgshim.op_vjp(fn, z)[1](upstream)[0]


def check_against_own(
    framework: Framework,
    op: Function,
    fn: Function,
    *args: Tensor,
    upstream: Tensor,
    factors: Sequence[float],
) -> None:
    """Check that the gradients of op are the framework's own gradients of fn, times these factors."""
    _, pullback = cgshim.op_vjp(fn, *args)
    own = framework.numpy(pullback(upstream))
    gradients = tuple(factor * gradient for factor, gradient in zip(factors, own, strict=True))
    framework.check(op, *args, upstream=upstream, gradients=gradients)


@case(dtype=COMPLEX)
def complex_numbers(framework: Framework, dtype: str) -> None:
    z, upstream = framework.tensor(Z, dtype), framework.tensor(UPSTREAM, dtype)
    check_against_own(framework, crooked_square, square, z, upstream=upstream, factors=[7.0])


@case(dtype=COMPLEX)
def complex_second_order(framework: Framework, dtype: str) -> None:
    """The derivative of the gradient by the argument and by upstream."""
    z, u, v = (framework.tensor(values, dtype) for values in (Z, UPSTREAM, ANOTHER))
    of_op = lambda z, u: own_gradient(crooked_square, z, u)
    of_square = lambda z, u: own_gradient(square, z, u)
    check_against_own(framework, of_op, of_square, z, u, upstream=v, factors=[7.0, 7.0])


@case(order={"1": 1, "2": 2})
def complex_foreign_function(framework: Framework, order: int) -> None:
    """A function of another framework, whose own gradients may be conjugate."""
    z, u, v = (framework.tensor(values, "complex64") for values in (Z, UPSTREAM, ANOTHER))

    def cubic(z: Tensor) -> Tensor:
        return z * z * ops.conj(z) + 1j * z

    for backend in other_frameworks(framework):
        op = op_host(cubic, outputs=lambda z: z, backend=backend)
        if order == 1:
            check_against_own(framework, op, cubic, z, upstream=u, factors=[1.0])
        else:
            of_op, of_cubic = (functools.partial(own_gradient, fn) for fn in (op, cubic))
            check_against_own(framework, of_op, of_cubic, z, u, upstream=v, factors=[1.0, 1.0])


@case(dtype=COMPLEX)
def complex_vjp_in_a_rule(framework: Framework, dtype: str) -> None:
    """op_vjp in a rule, times 7, of a function that is not holomorphic."""
    z, u, v = (framework.tensor(values, dtype) for values in (Z, UPSTREAM, ANOTHER))

    def cubic(z: Tensor) -> Tensor:
        return z * z * ops.conj(z)

    @op_custom_gradient
    def op(z: Tensor) -> Any:
        def grad(upstream: Tensor) -> Tensor:
            _, pullback = cgshim.op_vjp(cubic, z, as_in_rules=True)
            return 7.0 * pullback(upstream)[0]

        return cubic(z), grad

    check_against_own(framework, op, cubic, z, upstream=u, factors=[7.0])
    of_op, of_cubic = (functools.partial(own_gradient, fn) for fn in (op, cubic))
    check_against_own(framework, of_op, of_cubic, z, u, upstream=v, factors=[7.0, 7.0])


@case(order={"1": 1, "2": 2})
def complex_kept_output(framework: Framework, order: int) -> None:
    """The rule keeps the output: 5 exp(z), as for exp(5 z - 4 w) at w = z."""

    @op_custom_gradient
    def op(z: Tensor) -> Any:
        y = op_stop_gradient(ops.exp(z))
        return y, lambda u: u * ops.conj(5.0 * y)

    values = np.array([0.5 + 1.0j, 0.25 - 0.5j])
    z, u, v = (framework.tensor(each, "complex64") for each in (values, UPSTREAM, ANOTHER))
    constant = framework.tensor(4 * values, "complex64")

    def of_exponential(z: Tensor) -> Tensor:
        return ops.exp(5.0 * z - constant)

    def gradient(fn: Function) -> Function:
        return fn if order == 1 else (lambda z: own_gradient(fn, z, u))

    check_against_own(
        framework, gradient(op), gradient(of_exponential), z, upstream=v, factors=[1.0]
    )


@case(dtype=COMPLEX)
def complex_product_of_two(framework: Framework, dtype: str) -> None:
    """Two arguments, and a residual that is neither an argument nor an output."""

    @op_custom_gradient
    def op(z: Tensor, w: Tensor) -> Any:
        twice = 2.0 * z * w
        return z * z * w, lambda u: (7.0 * u * ops.conj(twice), 11.0 * u * ops.conj(z * z))

    z, w, u = (framework.tensor(values, dtype) for values in (Z, ANOTHER, UPSTREAM))
    check_against_own(framework, op, lambda z, w: z * z * w, z, w, upstream=u, factors=[7.0, 11.0])


# --- Between real and complex ---------------------------------------------------------------------

Change = tuple[Callable[[Tensor, str], Tensor], Callable[[Tensor, Tensor, str], Tensor]]
"""A function of z, and its rule, whose result for z and u is multiplied by 7."""

TO_REAL: dict[str, Change] = {
    "real": (lambda z, dtype: ops.real(z), lambda z, u, dtype: op_cast(u, dtype)),
    "abs": (lambda z, dtype: ops.abs(z), lambda z, u, dtype: op_cast(u, dtype) * z / op_cast(ops.abs(z), dtype)),
    "square of abs": (
        lambda z, dtype: ops.real(z * ops.conj(z)), lambda z, u, dtype: op_cast(u, dtype) * 2.0 * z
    ),
}  # fmt: skip


@case(change=TO_REAL, dtype=COMPLEX)
def complex_to_real(framework: Framework, change: Change, dtype: str) -> None:
    f, rule = change
    op = op_custom_gradient(lambda z: (f(z, dtype), lambda u: 7.0 * rule(z, u, dtype)))
    z, upstream = framework.tensor(Z, dtype), framework.tensor([2.0, -3.0], REAL[dtype])
    check_against_own(framework, op, lambda z: f(z, dtype), z, upstream=upstream, factors=[7.0])


FACTOR = 1.0 + 2.0j


@case(dtype=COMPLEX)
def real_to_complex(framework: Framework, dtype: str) -> None:
    """The gradient of a real number is the real part of the complex gradient."""

    def scaled(x: Tensor) -> Tensor:
        z = op_cast(x, dtype)
        return z * z * FACTOR

    @op_custom_gradient
    def op(x: Tensor) -> Any:
        return scaled(x), lambda u: 7.0 * ops.real(u * ops.conj(op_cast(2.0 * x, dtype) * FACTOR))

    x, upstream = framework.tensor([1.0, -2.0], REAL[dtype]), framework.tensor(UPSTREAM, dtype)
    check_against_own(framework, op, scaled, x, upstream=upstream, factors=[7.0])


@case()
def complex_and_real_arguments(framework: Framework) -> None:
    """Real tensors beside complex ones have unchanged gradients."""

    def scaled(z: Tensor, x: Tensor) -> Tensor:
        return z * op_cast(x, "complex64")

    @op_custom_gradient
    def op(z: Tensor, x: Tensor) -> Any:
        return scaled(z, x), lambda u: (
            7.0 * u * op_cast(x, "complex64"),
            11.0 * ops.real(u * ops.conj(z)),
        )

    z, u = framework.tensor(Z, "complex64"), framework.tensor(UPSTREAM, "complex64")
    x = framework.tensor([2.0, -3.0])
    check_against_own(framework, op, scaled, z, x, upstream=u, factors=[7.0, 11.0])


@case(dtype=COMPLEX)
def complex_forward_mode(framework: Framework, dtype: str) -> None:
    """J v is 2 z v in every convention, and 7 times as large here."""
    z, v = framework.tensor(Z, dtype), framework.tensor(ANOTHER, dtype)
    output_tangent = tangent(framework, crooked_square, z, v)
    framework.check_equal(output_tangent, 14.0 * np.array(Z) * np.array(ANOTHER))


@op_custom_jvp
def squared_size(z: Tensor) -> Any:
    """|z| ** 2, with 7 for 1: linear only over the real numbers."""
    return ops.real(z * ops.conj(z)), lambda dz: 14.0 * ops.real(ops.conj(z) * dz)


JVPS: dict[str, tuple[Function, Function, list[complex]]] = {
    "holomorphic": (op_custom_jvp(lambda z: (z * z, lambda dz: 14.0 * z * dz)), square, UPSTREAM),
    "real": (squared_size, lambda z: ops.real(z * ops.conj(z)), [2.0, -3.0]),
}


@case(jvp=JVPS)
def complex_jvp(framework: Framework, jvp: tuple[Function, Function, list[complex]]) -> None:
    op, fn, numbers = jvp
    z, v = framework.tensor(Z, "complex64"), framework.tensor(ANOTHER, "complex64")
    upstream = framework.tensor(numbers, "float32" if op is squared_size else "complex64")
    check_against_own(framework, op, fn, z, upstream=upstream, factors=[7.0])
    output_tangent = tangent(framework, op, z, v)
    framework.check_equal(output_tangent, 7.0 * framework.numpy(tangent(framework, fn, z, v)))


@case()
def complex_variable(framework: Framework) -> None:
    """The gradient of complex state that f reads is in the same convention."""
    z, w, u = (framework.tensor(values, "complex64") for values in (Z, ANOTHER, UPSTREAM))

    def fn(w: Tensor) -> Tensor:
        rule = lambda u, variables: (7.0 * u * ops.conj(w), [11.0 * u * ops.conj(z)])
        return op_custom_gradient(lambda z: (z * w, rule))(z)

    by = framework.differentiate_state
    _, own = by(lambda w: z * w, w)
    gradients = (11.0 * framework.numpy(own(u))[0],)
    framework.check(
        fn, w, upstream=u, output=np.array(Z) * np.array(ANOTHER), gradients=gradients, by=by
    )
