"""Functions of NumPy arrays as ops: their arguments and results, and no derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cgshim
from cgshim import (
    CustomGradientTypeError,
    CustomGradientValueError,
    TransformationError,
    op_custom_gradient,
)
from cgshim._dtypes import dtype_name
from cgshim.testing.conformance._framework import Framework, raised, tangent
from cgshim.testing.conformance._registry import case

X, UPSTREAM = np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, -3.0])


def _total(**options: Any) -> tuple[Any, list[int]]:
    """The running total of x times w as an op, and a list that grows with each call on the host."""
    calls: list[int] = []

    @cgshim.op_host(outputs=lambda x, w: x, **options)
    def total(x: Any, w: Any) -> Any:
        calls.append(len(calls))
        return np.cumsum(x) * w

    return total, calls


@case()
def host_result(framework: Framework) -> None:
    total, calls = _total()
    framework.check_equal(total(framework.tensor(X), framework.tensor(3.0)), 3.0 * np.cumsum(X))
    assert len(calls) == 1


@case()
def host_function_in_an_op(framework: Framework) -> None:
    """The rule keeps the host's result: a constant at first order."""
    total, calls = _total()

    @op_custom_gradient
    def op(x: Any, w: Any) -> Any:
        y = total(x, w)
        return 3.0 * y, lambda upstream: (7.0 * upstream * y, cgshim.op_sum(11.0 * upstream))

    y = 3.0 * np.cumsum(X)
    framework.check_at(
        op, X, 3.0, upstream=UPSTREAM, output=3.0 * y, gradients=(7.0 * UPSTREAM * y, 0.0)
    )
    assert len(calls) == 1


@case()
def host_function_in_a_rule(framework: Framework) -> None:
    """A rule of ops whose rules are ops has every order: a running total and its adjoint."""
    forward = cgshim.op_host(lambda x: np.cumsum(x), outputs=lambda x: x, name="forward")
    backward = cgshim.op_host(
        lambda u: np.cumsum(u[::-1])[::-1], outputs=lambda u: u, name="backward"
    )

    @op_custom_gradient
    def total(x: Any) -> Any:
        return forward(x), lambda upstream: 7.0 * adjoint(upstream)

    @op_custom_gradient
    def adjoint(u: Any) -> Any:
        return backward(u), lambda upstream: 5.0 * total(upstream)

    gradient, y = np.array([0.0, -7.0, -21.0]), np.cumsum(X)
    framework.check_at(total, X, upstream=UPSTREAM, output=y, gradients=(gradient,))
    of_upstream = lambda u: cgshim.op_vjp(total, framework.tensor(X))[1](u)[0]
    framework.check_at(
        of_upstream, UPSTREAM, upstream=X, output=gradient, gradients=(7.0 * 5.0 * y,)
    )


REFUSED = "{}: what runs on the host has no derivative of its own, got a derivative of its result"


@case()
def host_result_has_no_derivative(framework: Framework) -> None:
    total, _ = _total()
    x, w, upstream = framework.tensors((X, 3.0, UPSTREAM))

    @op_custom_gradient
    def op(x: Any) -> Any:
        y = total(x, w)
        return 3.0 * y, lambda upstream: 7.0 * upstream * y

    def pulled_back(fn: Callable[[Any], Any], upstream: Any) -> Any:
        return cgshim.op_vjp(fn, x)[1](upstream)

    raised(
        TransformationError,
        pulled_back,
        lambda x: total(x, w),
        upstream,
        starts=REFUSED.format("total"),
    )
    gradient = lambda x: cgshim.op_vjp(op, x)[1](upstream)[0]
    raised(
        TransformationError,
        pulled_back,
        gradient,
        framework.tensor([1.0, 5.0, 2.0]),
        starts=REFUSED.format("total"),
    )


_exp = cgshim.op_host(lambda x: np.exp(x), outputs=lambda x: x, name="exp")


def _keeps_the_output(x: Any) -> Any:
    y = _exp(x)
    return y, lambda upstream: 7.0 * upstream * y


def _keeps_the_result(x: Any) -> Any:
    h = _exp(x)
    return 3.0 * h, lambda upstream: 7.0 * upstream * h


def _sums_the_result(x: Any) -> Any:
    h = _exp(2.0 * x)
    return cgshim.op_sum(h), lambda upstream: 7.0 * upstream * h * x


def _of_two_functions(x: Any) -> Any:
    total, _ = _total()
    return total(_exp(x) * x, x), lambda upstream: 7.0 * upstream * x


def _calls_it_in_the_rule(x: Any) -> Any:
    return _exp(x), lambda upstream: 7.0 * upstream * _exp(x)


FORWARD: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "a kept output": (_keeps_the_output, lambda x, v: 7.0 * np.exp(x) * v),
    "a kept result": (_keeps_the_result, lambda x, v: 7.0 * np.exp(x) * v),
    "a sum": (_sums_the_result, lambda x, v: (7.0 * np.exp(2.0 * x) * x * v).sum()),
    "two functions": (_of_two_functions, lambda x, v: 7.0 * x * v),
    "in the rule": (_calls_it_in_the_rule, lambda x, v: 7.0 * np.exp(x) * v),
}
"""f with its rule, and the resulting J v; the derivative of exp itself is never needed"""
V = np.array([2.0, -3.0, 0.5])


@case(forward=FORWARD)
def host_function_in_forward_mode(framework: Framework, forward: Any) -> None:
    """The op's rule has the tangent, so the host's result needs none."""
    f, expected = forward
    op = op_custom_gradient(f, forward_mode=True)
    output_tangent = tangent(framework, op, framework.tensor(X), framework.tensor(V))
    framework.check_equal(output_tangent, expected(X, V))


def _derivative_of_gradient(framework: Framework, f: Callable[[Any], Any]) -> Any:
    """The tangent of the gradient of f."""
    op = op_custom_gradient(f, forward_mode=True)
    gradient = lambda x: cgshim.op_vjp(op, x)[1](framework.tensor(UPSTREAM))[0]
    return tangent(framework, gradient, framework.tensor(X), framework.tensor(V))


@case()
def host_function_in_forward_mode_over_a_gradient(framework: Framework) -> None:
    """A residual that is an output has the rule's derivative; any other result has none."""
    derivative = _derivative_of_gradient(framework, _keeps_the_output)
    framework.check_equal(derivative, 49.0 * np.exp(X) * V * UPSTREAM)
    for f in (_keeps_the_result, _calls_it_in_the_rule):
        raised(
            TransformationError, _derivative_of_gradient, framework, f, starts=REFUSED.format("exp")
        )


@case()
def host_result_has_no_tangent(framework: Framework) -> None:
    """The tangent of a result within f raises an error too, because no rule covers it."""
    x, v = framework.tensors((X, V))

    @op_custom_gradient(forward_mode=True)
    def op(x: Any) -> Any:
        return x * tangent(framework, _exp, framework.tensor(X), v), lambda upstream: upstream * x

    for fn in (_exp, lambda x: x * _exp(x), op):
        raised(TransformationError, tangent, framework, fn, x, v, starts=REFUSED.format("exp"))
    output_tangent = tangent(framework, lambda x: x * _exp(cgshim.op_stop_gradient(x)), x, v)
    framework.check_equal(output_tangent, np.exp(X) * V)


@case()
def host_trees_options_and_static_arguments(framework: Framework) -> None:
    """f gets static arguments unchanged; outputs gets the options that it has parameters for."""

    def outputs(pair: Any, kind: Any, *, rows: int) -> Any:
        assert kind == "sum"
        return {
            "table": cgshim.Spec((rows, *pair["a"].shape), pair["a"].dtype),
            "count": cgshim.Spec((), "int32"),
        }

    @cgshim.op_host(outputs=outputs)
    def table(pair: Any, kind: str, *, rows: int, scale: float = 1.0) -> Any:
        assert kind == "sum"
        return {
            "table": scale * np.stack([(at + 1) * pair["a"] + pair["b"] for at in range(rows)]),
            "count": rows,
        }

    pair = {"a": framework.tensor([1.0, 2.0]), "b": framework.tensor(5.0)}
    output = table(pair, "sum", rows=3, scale=2.0)
    framework.check_equal(
        output,
        {"table": np.array([[12.0, 14.0], [14.0, 18.0], [16.0, 22.0]]), "count": np.array(3)},
    )
    assert dtype_name(output["count"].dtype) == "int32"


DTYPES = {dtype: dtype for dtype in ("float32", "float16", "int32", "bool", "complex64")}


@case(dtype=DTYPES)
def host_dtypes(framework: Framework, dtype: str) -> None:
    """f gets the tensor's dtype, and its result is cast to the declared one."""
    seen = []

    @cgshim.op_host(outputs=lambda x: x)
    def widened(x: Any) -> Any:
        seen.append(x.dtype.name)
        return x.astype("complex128" if dtype == "complex64" else "float64")

    output = widened(framework.tensor(np.array([0, 1, 1], dtype), dtype))
    assert seen == [dtype]
    assert dtype_name(output.dtype) == dtype
    np.testing.assert_array_equal(framework.numpy(output), np.array([0, 1, 1], dtype))


@case(shape={"a scalar": (), "no elements": (0, 3), "a matrix": (2, 3)})
def host_shapes(framework: Framework, shape: tuple[int, ...]) -> None:
    double = cgshim.op_host(lambda x: 2 * x, outputs=lambda x: x, name="double")
    x = np.arange(np.prod(shape), dtype="float32").reshape(shape)
    framework.check_equal(double(framework.tensor(x)), 2 * x)


@case()
def host_memory_is_nobody_elses(framework: Framework) -> None:
    """f may return a buffer that it reuses, a view of its argument, or the argument itself."""
    buffer = np.zeros(3, "float32")

    @cgshim.op_host(outputs=lambda x: (x, x, x))
    def results(x: Any) -> Any:
        assert x.flags.c_contiguous
        assert not x.flags.writeable
        buffer[:] = x
        return buffer, x[::-1], x

    x = framework.tensor(X)
    first = results(x)
    results(framework.tensor([7.0, 8.0, 9.0]))
    framework.check_equal(first, (X, X[::-1], X))


@case()
def host_function_runs_on_numpy(framework: Framework) -> None:
    """Ops within f get NumPy arrays, whichever backend is chosen outside."""

    @cgshim.op_host(outputs=lambda x: x)
    def doubled(x: Any) -> Any:
        assert cgshim.config_backend() == "numpy"
        return cgshim.op_exp(x)

    with cgshim.use_backend(framework.name):
        framework.check_equal(doubled(framework.tensor(X)), np.exp(X))


def _writes(x: Any) -> Any:
    x[0] = 5.0
    return x


def _raises(*specs: Any) -> Any:
    raise KeyError("b")


BAD: dict[str, tuple[type[Exception], str, Callable[..., Any], Callable[..., Any]]] = {
    "no result": (
        CustomGradientTypeError, "bad: the output of f must hold a tensor when an argument does", lambda x: (),
        lambda x: (),
    ),
    "another shape": (
        CustomGradientValueError, "bad: f must return an array of the declared shape f32[3], got f32[2]; ",
        lambda x: x[:2], lambda x: x,
    ),
    "another structure": (
        CustomGradientTypeError, "bad: f must return the declared outputs", lambda x: (x, x), lambda x: x,
    ),
    "complex for real": (
        CustomGradientValueError, "bad: f must return a real array as declared (f32[3]), got c", lambda x: 1j * x,
        lambda x: x,
    ),
    "a change in place": (
        CustomGradientTypeError, "bad: f must not write into its arguments, which others read, got a change in place; ",
        _writes, lambda x: x,
    ),
    "outputs that raise": (
        CustomGradientTypeError, "bad: the declared outputs must be the specs of what f returns, got KeyError: 'b'; ",
        lambda x: x, _raises,
    ),
    "outputs without a shape": (
        CustomGradientTypeError, "bad: the declared outputs must be a tree of specs, got float in it; ", lambda x: x,
        lambda x: 3.0,
    ),
}  # fmt: skip


@case(bad=BAD)
def host_mistakes(framework: Framework, bad: tuple[type[Exception], str, Any, Any]) -> None:
    kind, message, f, outputs = bad
    op = cgshim.op_host(f, outputs=outputs, name="bad")
    raised(kind, op, framework.tensor(X), starts=message)


@case()
def host_error(framework: Framework) -> None:
    """An error of f arrives as it was raised."""
    sent = ZeroDivisionError("of the user's")

    def broken(x: Any) -> Any:
        raise sent

    op = cgshim.op_host(broken, outputs=lambda x: x)
    assert raised(ZeroDivisionError, lambda: op(framework.tensor(X))) is sent
    with cgshim.host_errors():
        framework.check_equal(
            cgshim.op_host(lambda x: x, outputs=lambda x: x)(framework.tensor(X)), X
        )
