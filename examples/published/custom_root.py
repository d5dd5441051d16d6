"""A root of any function, with the gradient of the implicit function theorem: nothing goes through
the solver.

Published as custom_root in jax-ml/jax, `jax/_src/lax/control_flow/solves.py` (Blondel et al. 2022,
"Efficient and Modular Implicit Differentiation"). The rule keeps the root, the op's output, so
derivatives of every order are right, and `solve` may be opaque: SciPy's, say, as an `op_host`.
"""

from cgshim import op_custom_gradient, op_vjp, ops


@op_custom_gradient
def custom_root(f, parameters, guess, solve, transpose_solve):
    """The x at which f(parameters, x) is zero.

    `solve(f, parameters, guess)` finds it, and `transpose_solve(g, y)` finds the v for which g(v)
    is y: g is linear, the transposed Jacobian of f by x. The parameters are a tree of tensors.
    """
    # nothing records its steps
    root = solve(f, *ops.tree_map(ops.stop_gradient, (parameters, guess)))

    def grad(upstream):
        _, pullback = op_vjp(f, parameters, root, as_in_rules=True)
        adjoint = transpose_solve(lambda v: pullback(v)[1], upstream)
        return None, pullback(-adjoint)[0], None, None, None

    return root, grad


def rows(linear, x):
    """linear(v) for each unit vector v of the size of x: its matrix, transposed."""
    identity = ops.diag(ops.ones_like(x))
    return ops.stack([linear(identity[at]) for at in range(x.shape[0])])


def dense_solve(linear, right):
    return ops.linalg.solve(ops.transpose(rows(linear, right)), right)


def newton(f, parameters, x):
    for _ in range(8):
        value, pullback = op_vjp(lambda x: f(parameters, x), x)
        x = x - ops.linalg.solve(rows(lambda v, back=pullback: back(v)[0], x), value)
    return x
