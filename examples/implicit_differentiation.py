"""The gradient of a solution, without a gradient through the solver: of a fixed point and of a
linear system.

Both rules solve one linear system, the adjoint of the first, with the solver at hand; nothing of
the iterations is kept. The fixed point is the hidden layer of a deep equilibrium model (Bai, Kolter
and Koltun, 2019).
"""

import numpy as np

from cgshim import (
    op_convert_to_numpy,
    op_convert_to_tensor,
    op_custom_gradient,
    op_diagonal,
    op_grad,
    op_matmul,
    op_outer,
    op_sum,
    op_tanh,
    op_transpose,
    op_vjp,
)
from cgshim.ops import linalg

ITERATIONS = 40


def iterate(step, start):
    for _ in range(ITERATIONS):
        start = step(start)
    return start


@op_custom_gradient
def fixed_point(step, parameters, start):
    """The x for which step(parameters, x) is x."""
    x = iterate(lambda x: step(parameters, x), start)

    def grad(upstream):
        x = fixed_point(step, parameters, start)
        _, pullback = op_vjp(step, parameters, x, as_in_rules=True)
        adjoint = iterate(lambda v: upstream + pullback(v)[1], upstream)
        return None, pullback(adjoint)[0], None

    return x, grad


@op_custom_gradient
def solve(matrix, right):
    """The x for which matrix @ x is right, by Jacobi's iteration (the diagonal must dominate)."""
    diagonal = op_diagonal(matrix)
    x = iterate(lambda x: x + (right - op_matmul(matrix, x)) / diagonal, right / diagonal)

    def grad(upstream):
        adjoint = solve(op_transpose(matrix), upstream)
        return -op_outer(adjoint, solve(matrix, right)), adjoint

    return x, grad


def layer(parameters, x):
    weights, bias = parameters
    return op_tanh(op_matmul(weights, x) + bias)


def main():
    rng = np.random.default_rng(0)
    draw = lambda *shape: op_convert_to_tensor(rng.normal(size=shape), "float32")
    parameters, start, costs = (0.2 * draw(4, 4), draw(4)), draw(4), draw(4)
    matrix, right = 0.3 * draw(4, 4) + op_convert_to_tensor(3.0 * np.eye(4), "float32"), draw(4)

    unrolled = lambda p: iterate(lambda x: layer(p, x), start)
    comparisons = {
        "fixed point": (lambda p: fixed_point(layer, p, start), unrolled, parameters),
        "linear solve": (lambda p: solve(*p), lambda p: linalg.solve(*p), (matrix, right)),
    }
    for name, (implicit, plain, at) in comparisons.items():
        of = {}
        for spelling, fn in [("rule", implicit), ("autodiff", plain)]:
            first = op_grad(lambda p, fn=fn: op_sum(costs * fn(p)))
            # of a gradient penalty
            second = op_grad(lambda p, first=first: op_sum(first(p)[0] ** 2))
            of[spelling] = [
                op_convert_to_numpy(derivative(at)[0])[0] for derivative in (first, second)
            ]
        for order, rule, autodiff in zip(("first", "second"), *of.values(), strict=True):
            agree = np.allclose(rule, autodiff, rtol=1e-4, atol=1e-5)
            print(f"{name}, {order} order: {np.round(rule, 4)}; autodiff agrees: {agree}")


if __name__ == "__main__":
    main()
