"""The ops that are compared, by cgshim: plain arithmetic, so that each is written once for all
frameworks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.linalg

import cgshim
from benchmarks.functions import BY_OPS, kalman, log1pexp, tracked
from cgshim import op_custom_gradient, op_embed_gradient, op_host, op_stop_gradient

Op = Callable[..., Any]


def cube(x):
    return x * x * x, lambda upstream: 3 * upstream * x * x


def given_forward(x):
    """The same, by its derivative in forward mode."""
    return x * x * x, lambda tangent: 3 * tangent * x * x


def embedded(x, name=None):
    """The same number and gradient, which come from elsewhere."""
    value = op_stop_gradient(x)
    return op_embed_gradient(value * value * value, 3 * value * value, x, name=name)


def residual(x):
    """The same number, by a rule that keeps an intermediate result."""
    square = x * x
    return square * x, lambda upstream: 3 * upstream * square


def in_a_list(x):
    """The same, but the intermediate result is in a list."""
    squares = [x * x]
    return squares[0] * x, lambda upstream: 3 * upstream * squares[0]


def static(x, kind, config, scale):
    """Three leaves of the arguments are no tensors."""
    assert kind == "cube"
    assert config is None
    return scale * x * x * x, lambda upstream: 3 * scale * upstream * x * x


def option(x, *, scale):
    """The same, with a number that comes by name."""
    return scale * x * x * x, lambda upstream: 3 * scale * upstream * x * x


def square(x):
    """An activation."""
    return x * x, lambda upstream: 2 * upstream * x


def three_outputs(x):
    return (2 * x, x * x, 5 * x), lambda a, b, c: 2 * a + 2 * b * x + 5 * c


def tree(params):
    """Eight tensors in a nested dict."""

    def grad(upstream):
        return {
            name: {key: 2 * upstream * leaf for key, leaf in layer.items()}
            for name, layer in params.items()
        }

    return sum(leaf * leaf for layer in params.values() for leaf in layer.values()), grad


def leaves(tensors):
    """A list of any number of tensors."""
    return sum(tensors), lambda upstream: [7 * upstream for _ in tensors]


def positional(*tensors):
    """Any number of arguments."""
    return sum(tensors), lambda upstream: [7 * upstream for _ in tensors]


def nested(lists):
    """One tensor, some lists deep."""
    x = innermost(lists)
    return x * x, lambda upstream: nest(2 * upstream * x, depth_of(lists))


def matmul(x, w):
    """The product of matrices, by a rule that leaves out the gradient of a frozen one."""

    def grad(upstream, needs_input_grad):
        needs_x, needs_w = needs_input_grad
        return upstream @ w.T if needs_x else None, x.T @ upstream if needs_w else None

    return x @ w, grad


def innermost(lists):
    while isinstance(lists, list):
        lists = lists[0]
    return lists


def depth_of(lists):
    return 1 + depth_of(lists[0]) if isinstance(lists, list) else 0


def nest(x, depth):
    return [nest(x, depth - 1)] if depth else x


class Layer:
    """An object with an op as a method, which is bound anew at each call."""

    @op_custom_gradient
    def cube(self, x):
        return cube(x)


LAYER = Layer()


def on_host(x):
    """A function of NumPy arrays."""
    return x * x * x


def solve(matrix, right):
    """A linear system; grad_fn keeps the LU factors, which only the host knows."""
    factors = scipy.linalg.lu_factor(matrix)
    solution = scipy.linalg.lu_solve(factors, right)

    def grad(upstream):
        adjoint = scipy.linalg.lu_solve(factors, upstream, trans=1)
        return -np.outer(adjoint, solution), adjoint

    return solution, grad


def solve_by_hand(matrix, right, upstream):
    """The solution and its gradients, in plain NumPy."""
    solution, grad = solve(matrix, right)
    return solution, grad(upstream)


def system(size):
    """A matrix, a right-hand side and an upstream gradient."""
    drawn = np.random.default_rng(7).normal(size=(size + 2, size)).astype("float32")
    return drawn[:size], drawn[size], drawn[size + 1]


FUNCTIONS = (
    cube,
    residual,
    in_a_list,
    static,
    three_outputs,
    tree,
    leaves,
    positional,
    nested,
    matmul,
    square,
)

BY_CGSHIM: dict[str, Op] = {
    **{f.__name__: op_custom_gradient(f) for f in FUNCTIONS},
    "residual_once": op_custom_gradient(residual, once_differentiable=True),
    "embedded": embedded,
    "embedded_by_name": functools.partial(embedded, name="tripled"),
    "option": functools.partial(op_custom_gradient(option), scale=2.0),
    "method": lambda x: LAYER.cube(x),
    **{f"ops.{name}": function for name, function in BY_OPS.items()},
    "log1pexp": log1pexp,
    "kalman": kalman,
    "on_host": op_host(on_host, outputs=lambda x: x),
    "solve": op_custom_gradient(solve, host_outputs=lambda matrix, right: right),
}
if hasattr(cgshim, "op_custom_jvp"):  # a checkout from before it can still be measured
    BY_CGSHIM["given_forward"] = cgshim.op_custom_jvp(given_forward)


def arguments(op: str, tensor: Callable[[], Any], width: int) -> tuple[Any, ...]:
    """What an op is called with; the first argument is differentiated."""
    if op == "static":
        return tensor(), "cube", None, 2.0
    if op == "tree":
        return ({f"layer{n}": {"w": tensor(), "b": tensor()} for n in range(4)},)
    if op == "leaves":
        return ([tensor() for _ in range(width)],)
    if op == "positional":
        return tuple(tensor() for _ in range(width))
    if op == "matmul":
        return tensor(), tensor()
    if op == "nested":
        return (nest(tensor(), width),)
    if op == "solve":
        return system(width)
    if op == "kalman":
        return tracked()
    return (tensor(),)


def by_keras() -> dict[str, Op]:
    """The ops of one tensor, in the only form that Keras's custom_gradient takes on each of its
    backends.
    """
    import keras

    def portable(f: Op) -> Op:
        def with_portable_rule(x):
            output, rule = f(x)
            return output, lambda *args, upstream=None: rule(
                args[0] if upstream is None else upstream
            )

        return keras.ops.custom_gradient(with_portable_rule)

    return {f.__name__: portable(f) for f in (cube, residual)}
