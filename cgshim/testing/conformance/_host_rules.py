"""f and grad_fn as NumPy code: grad_fn may keep any Python object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cgshim
from cgshim import CustomGradientValueError, TransformationError, op_custom_gradient, ops
from cgshim._transforms import jvp_of
from cgshim.testing._batches import vmap_of
from cgshim.testing.conformance._framework import Framework, raised, tangent
from cgshim.testing.conformance._registry import case

A, Y, UPSTREAM = np.array([[2.0, 1.0], [0.0, 4.0]]), np.array([1.0, 2.0]), np.array([1.0, -5.0])


class Factors:
    """A residual of the user's own class; no framework can look into it."""

    __slots__ = ("_inverse",)

    def __init__(self, matrix: Any) -> None:
        self._inverse = np.linalg.inv(matrix)

    def solve(self, y: Any) -> Any:
        return self._inverse @ y

    def solve_transposed(self, y: Any) -> Any:
        return self._inverse.T @ y


def _solver(**options: Any) -> tuple[Any, list[int]]:
    """Solve a x = y with wrong factors in the gradients, and log the runs of f in a list."""
    runs: list[int] = []

    @op_custom_gradient(host_outputs=lambda a, y: y, **options)
    def solve(a: Any, y: Any) -> Any:
        runs.append(len(runs))
        factors = Factors(a)
        x = factors.solve(y)

        def grad_fn(upstream: Any) -> Any:
            of_y = factors.solve_transposed(upstream)
            return -7.0 * np.outer(of_y, x), 3.0 * of_y

        return x, grad_fn

    return solve, runs


def _expected(a: Any, y: Any, upstream: Any) -> tuple[Any, Any]:
    of_y = np.linalg.solve(a.T, upstream)
    return -7.0 * np.outer(of_y, np.linalg.solve(a, y)), 3.0 * of_y


@case()
def host_rule_keeps_an_object(framework: Framework) -> None:
    solve, runs = _solver()
    x = np.linalg.solve(A, Y)
    framework.check_at(
        solve, A, Y, upstream=UPSTREAM, output=x, gradients=_expected(A, Y, UPSTREAM)
    )
    assert len(runs) == 1


@case()
def log_among_the_arguments_of_a_host_rule(framework: Framework) -> None:
    """A container without tensors is the caller's own on the host, too."""

    @op_custom_gradient(host_outputs=lambda x, log, scale: x)
    def op(x: Any, log: list[str], scale: list[float]) -> Any:
        log.append("f")

        def grad_fn(upstream: Any) -> Any:
            log.append("grad_fn")
            return 7.0 * scale[0] * upstream, None, None

        return scale[0] * x, grad_fn

    log: list[str] = []
    framework.check_at(
        lambda x: op(x, log, [2.0]),
        Y,
        upstream=UPSTREAM,
        output=2.0 * Y,
        gradients=(14.0 * UPSTREAM,),
    )
    assert log == ["f", "grad_fn"]


@case()
def host_rules_of_many_calls(framework: Framework) -> None:
    """Each call keeps its own rule, however many calls precede the first gradient."""
    solve, runs = _solver(keep=2)
    matrices = [A + at * np.eye(2) for at in range(5)]
    y, upstream = framework.tensor(Y), framework.tensor(UPSTREAM)
    pullbacks = [cgshim.op_vjp(solve, framework.tensor(a), y)[1] for a in matrices]
    for a, pullback in zip(matrices, pullbacks, strict=True):
        framework.check_equal(pullback(upstream), _expected(a, Y, UPSTREAM))
    assert len(runs) == 5


@case()
def host_rule_has_no_derivative(framework: Framework) -> None:
    solve, _ = _solver()
    a, y, upstream = framework.tensors((A, Y, UPSTREAM))

    def second() -> Any:
        gradient = lambda y: cgshim.op_vjp(solve, a, y)[1](upstream)[0]
        return cgshim.op_vjp(gradient, y)[1](framework.tensor(np.ones((2, 2))))

    sentence = (
        "the gradient of solve: what runs on the host has no derivative of its own, "
        "got a derivative of its result"
    )
    raised(TransformationError, second, starts=sentence)


def _gradients(x: Any, y: Any, upstream: Any) -> tuple[Any, Any]:
    return 5.0 * upstream * y, 3.0 * upstream * x


FORMS: dict[str, Callable[..., Any]] = {
    "upstream": lambda x, y: (x * y, lambda upstream: _gradients(x, y, upstream)),
    "arguments": lambda x, y: (x * y, lambda x, y, upstream: _gradients(x, y, upstream)),
}


@case(f=FORMS)
def host_rule_in_each_form(framework: Framework, f: Callable[..., Any]) -> None:
    op = op_custom_gradient(f, host_outputs=lambda x, y: x)
    x, y, upstream = np.array([1.0, 2.0]), np.array([3.0, -4.0]), np.array([2.0, 7.0])
    framework.check_at(
        op, x, y, upstream=upstream, output=x * y, gradients=_gradients(x, y, upstream)
    )


@case()
def host_rule_with_trees_and_options(framework: Framework) -> None:
    """Integers and static leaves have no gradient; None is a zero gradient; options are static."""

    def outputs(params: Any, index: Any, kind: Any) -> Any:
        return {"y": params["w"], "n": cgshim.Spec((), "int32")}

    @op_custom_gradient(host_outputs=outputs)
    def picked(params: Any, index: Any, kind: str, *, scale: float = 1.0) -> Any:
        assert kind == "row"

        def grad_fn(upstream: Any) -> Any:
            return {"b": None, "w": 7.0 * scale * upstream["y"] * params["b"][index]}, None, None

        return {"y": scale * params["w"] * params["b"][index], "n": np.int32(index)}, grad_fn

    index = framework.tensor(1, "int32")
    framework.check_at(
        lambda params: picked(params, index, "row", scale=2.0)["y"],
        {"w": np.array([1.0, 2.0]), "b": np.array([5.0, 3.0, 2.0])},
        upstream=np.array([1.0, -2.0]),
        output=np.array([6.0, 12.0]),
        gradients=({"w": np.array([42.0, -84.0]), "b": np.zeros(3)},),
    )


@case()
def host_rule_of_python_numbers(framework: Framework) -> None:
    """SciPy's solvers return numbers, and so may f and grad_fn."""

    def outputs(x: Any) -> Any:
        return {"sum": cgshim.Spec((), "float32"), "count": cgshim.Spec((), "int32")}

    @op_custom_gradient(host_outputs=outputs)
    def total(x: Any) -> Any:
        return {
            "sum": float(x.sum()),
            "count": 3,
        }, lambda upstream: 7.0 * float(upstream["sum"]) * np.ones_like(x)

    x = np.array([1.0, 2.0, 5.0])
    framework.check_at(
        lambda x: total(x)["sum"], x, upstream=-2.0, output=8.0, gradients=(np.full(3, -14.0),)
    )


@case()
def host_rule_keeps_its_arguments(framework: Framework) -> None:
    """The rule may keep f's arguments: a framework may reuse their memory."""

    @op_custom_gradient(host_outputs=lambda x: x)
    def square(x: Any) -> Any:
        return x * x, lambda upstream: 7.0 * upstream * x

    x = np.array([1.0, 3.0], "float32")
    _, pullback = cgshim.op_vjp(square, framework.tensor(x))
    for _ in range(3):
        square(framework.tensor([50.0, 60.0]))
    framework.check_equal(pullback(framework.tensor(UPSTREAM)), (7.0 * UPSTREAM * x,))


@case()
def host_rule_of_a_method(framework: Framework) -> None:
    class Scaled:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        @op_custom_gradient(host_outputs=lambda self, x: x)
        def scaled(self, x: Any) -> Any:
            return self.factor * x, lambda upstream: 7.0 * self.factor * upstream

    for factor in (2.0, 5.0):
        op, of_x = Scaled(factor).scaled, 7.0 * factor * UPSTREAM
        framework.check_at(op, Y, upstream=UPSTREAM, output=factor * Y, gradients=(of_x,))


@case()
def host_rule_of_a_static_method(framework: Framework) -> None:
    class Scaled:
        @op_custom_gradient(host_outputs=lambda x: x)
        @staticmethod
        def scaled(x: Any) -> Any:
            return 5.0 * x, lambda upstream: 7.0 * upstream

    for op in (Scaled.scaled, Scaled().scaled):
        framework.check_at(op, Y, upstream=UPSTREAM, output=5.0 * Y, gradients=(7.0 * UPSTREAM,))


@case()
def host_rule_with_a_wrong_shape(framework: Framework) -> None:
    op = op_custom_gradient(lambda x: (x, lambda u: u[:1]), host_outputs=lambda x: x, name="wrong")
    _, pullback = cgshim.op_vjp(op, framework.tensor(Y))
    sentence = "wrong: the gradient of x must have its shape f32[2], got f32[1]"
    raised(CustomGradientValueError, pullback, framework.tensor(UPSTREAM), starts=sentence)


def solved(matrix: Any, y: Any) -> Any:
    """The solution of a linear system, with a rule for each mode: both use the same factors."""
    inverse = np.linalg.inv(matrix)
    x = inverse @ y

    def grad(upstream: Any) -> Any:
        of_y = inverse.T @ upstream
        return -7.0 * np.outer(of_y, x), 7.0 * of_y

    return x, grad, lambda d_matrix, dy: 11.0 * inverse @ (dy - d_matrix @ x)


@case()
def host_jvp(framework: Framework) -> None:
    op = op_custom_gradient(host_outputs=lambda matrix, y: y, forward_mode=True)(solved)
    matrix, y = np.array([[2.0, 1.0], [0.5, 3.0]]), np.array([1.0, 2.0])
    d_matrix, dy = np.array([[0.1, 0.2], [0.3, 0.4]]), np.array([1.0, -1.0])
    x, of_y = np.linalg.solve(matrix, y), np.linalg.solve(matrix.T, np.ones(2))
    tensors = framework.tensors((matrix, y, d_matrix, dy))
    _, (output_tangent,) = jvp_of(framework.backend)(
        lambda *xs: [op(*xs)], tensors[:2], tensors[2:]
    )
    framework.check_equal(output_tangent, 11.0 * np.linalg.solve(matrix, dy - d_matrix @ x))
    gradients = -7.0 * np.outer(of_y, x), 7.0 * of_y
    framework.check_at(op, matrix, y, upstream=np.ones(2), output=x, gradients=gradients)
    of_total = cgshim.op_grad(lambda y: ops.sum(op(tensors[0], y)))
    starts = "the gradient of solved: what runs on the host has no derivative of its own"
    raised(TransformationError, tangent, framework, of_total, tensors[1], tensors[3], starts=starts)


@case()
def host_jvp_with_options(framework: Framework) -> None:
    """outputs gets only options that it has parameters for, and no spec for a static argument."""

    @op_custom_gradient(host_outputs=lambda x, power: x, forward_mode=True)
    def op(x: Any, power: int, *, scale: float = 1.0) -> Any:
        slope = 7.0 * scale * x ** (power - 1)
        return x**power, lambda u: slope * u, lambda dx, _: slope * dx

    x, dx = framework.tensors((np.array([1.0, 3.0]), np.array([2.0, -5.0])))
    fn: Any = lambda x: [op(x, 3, scale=2.0)]
    _, (output_tangent,) = jvp_of(framework.backend)(fn, [x], [dx])
    framework.check_equal(output_tangent, 14.0 * np.array([2.0, -5.0 * 9.0]))


@case()
def host_jvp_that_is_not_there(framework: Framework) -> None:
    """f promises a jvp_fn and returns none."""
    pair = lambda x: (2.0 * x, lambda upstream: 2.0 * upstream)
    op = op_custom_gradient(host_outputs=lambda x: x, forward_mode=True, name="pair")(pair)
    x, v = framework.tensors((np.array([1.0, 2.0]), np.array([3.0, 5.0])))
    error = raised(Exception, tangent, framework, op, x, v)
    if "pair: forward mode on the host takes f's own jvp_fn, got a pair" not in str(error):
        raise error


@case()
def host_results_of_unknown_shapes(framework: Framework) -> None:
    """Unknown shapes are known only after f has run: eagerly f may call NumPy itself."""

    @op_custom_gradient(once_differentiable=True, name="positive")
    def positive(x: Any, table: Any) -> Any:
        array = ops.convert_to_numpy(x)
        at = np.flatnonzero(array > 0)

        def grad(upstream: Any) -> Any:
            of_x = np.zeros_like(array)
            of_x[at] = 7.0 * ops.convert_to_numpy(upstream["value"])
            return ops.convert_to_tensor(of_x), None

        return {"value": ops.convert_to_tensor(array[at]), "at": ops.convert_to_tensor(at)}, grad

    x, table, u = framework.tensors(
        (np.array([1.0, -2.0, 3.0]), np.arange(3), np.array([2.0, -5.0]))
    )
    output, pullback = cgshim.op_vjp(lambda x: positive(x, table)["value"], x)
    framework.check_equal(output, np.array([1.0, 3.0]))
    framework.check_equal(pullback(u), (np.array([14.0, 0.0, -35.0]),))
    framework.check_equal(positive(x, table)["at"], np.array([0, 2]))
    second = cgshim.op_grad(lambda x: ops.sum(pullback_of(x) * pullback_of(x)))

    def pullback_of(x: Any) -> Any:
        return cgshim.op_vjp(lambda x: positive(x, table)["value"], x)[1](u)[0]

    raised(TransformationError, second, x, starts="positive: ")


def _vectorized(**options: Any) -> tuple[Any, list[str]]:
    """x * x * w of a vector and a number, or of many, with a wrong rule; and a list of the runs."""
    runs: list[str] = []

    @op_custom_gradient(host_outputs=lambda x, w: x, vectorized=True, **options)
    def square(x: Any, w: Any) -> Any:
        runs.append("f")
        column = w[..., None]

        def grad(upstream: Any) -> Any:
            runs.append("rule")
            return 7.0 * upstream * x * column, 11.0 * (upstream * x * x).sum(-1)

        return x * x * column, grad, lambda dx, dw: 13.0 * x * dx * column + x * x * dw[..., None]

    return square, runs


ROWS, WEIGHTS = np.arange(20.0).reshape(10, 2) - 7, np.arange(10.0) + 2
ROWS_OF_UPSTREAM = np.sin(ROWS)


@case(weighted={"by each": True, "by one": False})
def host_rule_of_a_batch(framework: Framework, weighted: bool) -> None:
    """Ten elements take one call of f and one of its rule, also beside unbatched arguments."""
    square, runs = _vectorized()
    vmap = vmap_of(framework.backend)
    w = WEIGHTS if weighted else WEIGHTS[0]
    of_x = 7 * ROWS_OF_UPSTREAM * ROWS * np.reshape(w, (-1, 1))
    of_w = 11 * (ROWS_OF_UPSTREAM * ROWS**2).sum(-1)
    if vmap is None:
        output = ROWS[0] ** 2 * WEIGHTS[0]
        framework.check_at(square, ROWS[0], WEIGHTS[0], upstream=ROWS_OF_UPSTREAM[0], output=output,
                           gradients=(7 * ROWS_OF_UPSTREAM[0] * ROWS[0] * WEIGHTS[0], of_w[0]))  # fmt: skip
        return
    x, w_tensor, u = framework.tensors((ROWS, w, ROWS_OF_UPSTREAM))
    (output,) = vmap(lambda *xs: [square(*xs)], (True, weighted), (x, w_tensor))
    framework.check_equal(output, ROWS**2 * np.reshape(w, (-1, 1)))
    assert runs == ["f"]
    runs.clear()
    of_one = lambda x, w, u: list(cgshim.op_vjp(square, x, w)[1](u))
    gradients = vmap(of_one, (True, weighted, True), (x, w_tensor, u))
    framework.check_equal(tuple(gradients), (of_x, of_w))
    assert runs == ["f", "rule"]


@case()
def host_jvp_of_a_batch(framework: Framework) -> None:
    square, runs = _vectorized(forward_mode=True)
    vmap, jvp = vmap_of(framework.backend), jvp_of(framework.backend)
    of_one: Any = lambda x, w, dx, dw: jvp(lambda *xs: [square(*xs)], [x, w], [dx, dw])[1]
    tangents = np.cos(ROWS), np.cos(WEIGHTS)
    column, of_column = WEIGHTS[:, None], tangents[1][:, None]
    expected = 13 * ROWS * tangents[0] * column + ROWS**2 * of_column
    inputs = framework.tensors((ROWS, WEIGHTS, *tangents))
    if vmap is None:
        framework.check_equal(of_one(*[x[0] for x in inputs])[0], expected[0])
        return
    (output_tangent,) = vmap(of_one, (True,) * 4, inputs)
    framework.check_equal(output_tangent, expected)
    assert runs == ["f"]
